"""State of torch's Adam in Megatron's distributed optimizer, which cuts buffers."""

from typing import Any

import torch
from torch.optim import Adam, AdamW

from megatron_eopt.step.parameters import parameters_in

STEP = "step"


class AdamOfBuffers:
    """Lets Megatron's distributed optimizer save and load the state of torch's Adam.

    Transformer Engine's and Apex's Adam count steps in their groups; torch's counts them beside each parameter, from
    its first step on, and nowhere on a rank whose shards of buffers are padding alone. Megatron asserts that there is
    such a count when it saves and before it loads. It loads one tensor for all parameters, which each would raise, and
    writes the count from before the load over it.
    """

    def __init__(self, optimizer: Any) -> None:
        adam = optimizer.optimizer
        if not isinstance(adam, Adam | AdamW):
            return
        for parameter in parameters_in(adam.param_groups):
            adam.state[parameter] = {
                STEP: torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        adam.register_state_dict_post_hook(_with_a_count)
        adam.register_load_state_dict_post_hook(_with_counts_apart)
        self._get = optimizer._get_main_param_and_optimizer_states
        self._set = optimizer._set_main_param_and_optimizer_states
        optimizer._get_main_param_and_optimizer_states = self.get
        optimizer._set_main_param_and_optimizer_states = self.set

    def get(self, parameter: Any) -> dict[str, Any]:
        """Megatron's: the state of a parameter, without its count."""
        return {key: value for key, value in self._get(parameter).items() if key != STEP}

    @torch.no_grad()
    def set(self, parameter: Any, tensors: dict[str, Any]) -> None:
        """Megatron's: takes over loaded state; the count stays."""
        self._set(parameter, tensors | {STEP: self._get(parameter)[STEP]})


def _with_a_count(adam: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict | {"state": state_dict["state"] or {"nothing": {STEP: torch.zeros(())}}}


def _with_counts_apart(adam: Any) -> None:
    for state in adam.state.values():
        state[STEP] = state[STEP].clone()
    for group in adam.param_groups:
        group.pop(STEP, None)
