"""torch's AdamW, and what this package knows of it."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW as OfTorch

from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.reporting import ReportingOptimizer
from megatron_eopt.step.state import StateTensor

_STEP = StateTensor("step", (), dtype=torch.float32, non_negative=True)


def state_tensors(group: dict[str, Any]) -> list[StateTensor]:
    """The state of each parameter of a group."""
    keys = ["exp_avg", "exp_avg_sq"]
    if group["amsgrad"]:
        keys.append("max_exp_avg_sq")
    return [_STEP, *(StateTensor(key, non_negative=key != "exp_avg") for key in keys)]


class AdamW(ReportingOptimizer, OfTorch):
    """torch's AdamW."""

    found_inf: Tensor | None = None  # what torch's step looks at

    def step_if(self, ok: Flag) -> None:
        """Step if a flag on the device is true; nothing waits."""
        if ok is not None:
            self._fuse()
            self.found_inf = (~ok).float()
        self.step()
        self.found_inf = None

    def _fuse(self) -> None:
        """Let the fused kernel step, which takes a flag."""
        for group in self.param_groups:
            if group["fused"]:
                continue
            group.update(fused=True, foreach=None)
            for parameter in group["params"]:
                if "step" in self.state.get(parameter, {}):  # which the kernel has on the device
                    self.state[parameter]["step"] = self.state[parameter]["step"].to(parameter.device)

    @torch.inference_mode(False)  # whose tensors no later step could change
    def init_state(self) -> None:
        """Create state that is missing, as torch's step would."""
        for group in self.param_groups:
            on_device = group["capturable"] or group["fused"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if "step" in state:
                    continue
                state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu", dtype=torch.float32)
                for tensor in state_tensors(group)[1:]:
                    state[tensor.key] = torch.zeros_like(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, laid as the parameters are."""
        super().load_state_dict(state_dict)  # the fused kernel takes state to lie as they do
        for parameter, state in self.state.items():
            for key, x in state.items():
                if isinstance(x, Tensor) and x.shape == parameter.shape and x.stride() != parameter.stride():
                    state[key] = torch.empty_like(parameter, dtype=x.dtype, requires_grad=False).copy_(x)
