"""What gradients a step refuses, and that it has none."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.parameters import local, parameter_names

logger = logging.getLogger(__name__)


def check_gradients(
    name: str, parameters: Iterable[Tensor], groups: Sequence[dict[str, Any]], placements: bool = True
) -> None:
    """Refuse gradients that are sparse or placed otherwise."""
    for parameter in parameters:
        gradient = parameter.grad
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
    in_groups = [p for group in groups for p in group["params"]]
    return dict(zip(in_groups, parameter_names(groups), strict=True))[parameter]


def _is_summand(gradient: Tensor) -> bool:
    """Whether each rank has its own summand, as torch leaves those of norms under sequence parallelism."""
    if not isinstance(gradient, DTensor):
        return False
    placed = enumerate(gradient.placements)
    return any(x.is_partial() and gradient.device_mesh.size(i) > 1 for i, x in placed)


def warned_without_gradients(name: str, parameters: Sequence[Tensor]) -> bool:
    """Whether no trained parameter has a gradient, with a warning."""
    if any(p.grad is not None for p in parameters) or not any(p.requires_grad for p in parameters):
        return False
    logger.warning(
        f"{name} makes a step in which none of its parameters ({len(parameters)}) has a gradient, and leaves them as "
        "they are: fully_shard replaces the parameters of a model, so build the optimizer after it, of those that "
        "the model has then; without fully_shard, call backward() before step(), and zero_grad() after it"
    )
    return True
