"""What a step takes as gradients: dense ones, which lie as their parameters, and are there."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.screen import listed
from megatron_eopt.step.parameters import has_dtensors, local, parameter_names, parameters_in

logger = logging.getLogger(__name__)


def check_gradients(
    name: str, parameters: Iterable[Tensor], groups: Sequence[dict[str, Any]], placements: bool = True
) -> None:
    """Refuse gradients that are sparse or placed otherwise."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters]
    placements = placements and has_dtensors([*parameters, *gradients])
    if not placements and {x.layout for x in gradients if x is not None} <= {torch.strided}:
        return
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{name} takes dense gradients, but that of {_called(parameter, groups)} is sparse ({gradient.layout})"
            )
        if not placements or not (isinstance(gradient, DTensor) or isinstance(parameter, DTensor)):
            continue
        if _is_summand(gradient) or local(gradient).shape != local(parameter).shape:
            raise ValueError(
                f"{name} takes gradients that lie as their parameters, but that of {_called(parameter, groups)} has "
                f"placements {getattr(gradient, 'placements', None)}, and the parameter "
                f"{getattr(parameter, 'placements', None)}: before the step, set parameter.grad to "
                "parameter.grad.redistribute(placements=parameter.placements)"
            )


def _called(parameter: Tensor, groups: Sequence[dict[str, Any]]) -> str:
    return dict(zip(parameters_in(groups), parameter_names(groups), strict=True))[parameter]


def _is_summand(gradient: Tensor) -> bool:
    """Whether each rank has its own summand, as torch leaves those of norms under sequence parallelism."""
    if not isinstance(gradient, DTensor):
        return False
    placed = enumerate(gradient.placements)
    return any(x.is_partial() and gradient.device_mesh.size(i) > 1 for i, x in placed)


class WithoutGradients:
    """Warns once of groups that have no gradient in two steps."""

    def __init__(self) -> None:
        self._told = False
        self._before: set[int] = set()  # groups without a gradient in the last step

    def look(self, name: str, groups: Sequence[dict[str, Any]]) -> None:
        """Look at the gradients of a step; an optimizer's ``name`` begins the warning."""
        if self._told:
            return
        now = set()
        for number, group in enumerate(groups):
            if group["params"] and all(p.grad is None for p in group["params"]):
                now.add(number)
        twice = now & self._before
        self._before = now
        if not twice:
            return
        self._told = True
        without = parameters_in([groups[number] for number in sorted(twice)])
        called = dict(zip(parameters_in(groups), parameter_names(groups), strict=True))
        if any(p.requires_grad for p in without):
            why = (
                "fully_shard and the like replace the parameters of a model, so build the optimizer after them, of "
                "those that the model has then; else call backward() before step(), and zero_grad() after it"
            )
        else:
            why = (
                "they are frozen. PEFT, also by TRL's peft_config, freezes a model's parameters and adds others: wrap "
                "the model first, and build the optimizer of what it trains then"
            )
        logger.warning(
            f"{name}: in two steps no parameter of a whole group had a gradient, so these {len(without)} stay as they "
            f"are: {listed(called[p] for p in without)}: {why}"
        )
