"""Which optimizer has which parameters, as a table."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.screen import aligned
from megatron_eopt.step.parameters import NAME

KIND = "kind_in_model"  # attribute of a parameter: what it is in its model, which says who has it

_HEADER = ("parameters", "tensors", "entries", "optimizer", "lr", "decay", "the first")


def ownership(optimizers: Iterable[Optimizer]) -> str:
    """A line for each kind of parameter: its optimizer, rate, decay, and the first of them."""
    alike: dict[tuple[str, ...], list[Tensor]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = [f"{float(group[key]):g}" if key in group else "" for key in ("lr", "weight_decay")]
            for parameter in group["params"]:
                kind = getattr(parameter, KIND, "parameters")
                alike.setdefault((kind, type(optimizer).__name__, *settings), []).append(parameter)
    lines = []
    for (kind, *settings), parameters in alike.items():
        entries = sum(p.numel() for p in parameters)
        first = getattr(parameters[0], NAME, "")
        lines.append((kind, f"{len(parameters):,}", f"{entries:,}", *settings, first))
    return "\n".join(aligned(_HEADER, lines, _HEADER[1:3], wrap=False))
