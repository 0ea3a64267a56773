"""Checks that several optimizers share."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.batch import local
from megatron_eopt.optimizers.skipping import parameter_names

_SCALARS = ("lr", "weight_decay", "momentum", "momentum_beta", "beta2", "shampoo_beta", "eps", "radius")


def check_scalars(name: str, group: Mapping[str, Any]) -> None:
    """Check that settings of a group that are numbers have one entry where they are tensors.

    Args:
        name: of the optimizer, for messages.
        group: its settings.

    Raises:
        ValueError: for one of more entries, or of none.
    """
    of_keys = [(key, group[key]) for key in _SCALARS if key in group]
    betas = group.get("betas")
    of_keys += [("betas", beta) for beta in betas] if isinstance(betas, list | tuple) else [("betas", betas)]
    for key, value in of_keys:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{name}: {key} must be a number, or a tensor of one entry, got a tensor of shape {tuple(value.shape)}"
            )


def check_rates(name: str, group: Mapping[str, Any]) -> None:
    """Check ``lr`` and ``weight_decay`` of a group.

    Args:
        name: of the optimizer, for messages.
        group: its settings.

    Raises:
        ValueError: for one out of its range.
    """
    check_scalars(name, group)
    for key in ("lr", "weight_decay"):
        if not 0 <= group[key] < inf:
            raise ValueError(f"{name}: {key} must be a finite number of at least 0, got {group[key]}")


def check_betas(name: str, betas: Any) -> None:
    """Check a pair of ``betas``, likewise."""
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {betas}")


def check_adam_settings(name: str, group: dict[str, Any]) -> None:
    """Check ``lr``, ``weight_decay``, ``eps`` and ``betas`` of a group.

    Args:
        name: of the optimizer, for messages.
        group: its settings.

    Raises:
        ValueError: for one out of its range.
    """
    check_rates(name, group)
    if not 0 < group["eps"] < inf:
        raise ValueError(f"{name}: eps must be a finite number above 0, got {group['eps']}")
    check_betas(name, group["betas"])


def check_gradients(name: str, parameters: Iterable[Tensor], groups: Sequence[dict[str, Any]]) -> None:
    """Check that the gradients of parameters, where they are there, are real and dense.

    Args:
        name: of the optimizer, for messages.
        parameters: with or without gradients.
        groups: all that the optimizer has, with these parameters in them.

    Raises:
        ValueError: for the first gradient that is of another kind.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or (gradient.layout == torch.strided and not gradient.is_complex()):
            continue
        kind = "complex" if gradient.is_complex() else f"sparse ({gradient.layout})"
        raise ValueError(f"{name} takes real, dense gradients, but that of {_called(parameter, groups)} is {kind}")


def check_lying(name: str, parameters: Iterable[Tensor], groups: Sequence[dict[str, Any]]) -> None:
    """Check that the gradients of DTensors are there whole, in the parts that their parameters have.

    torch leaves those of norms under sequence parallelism as ``Partial``: each rank has its own summand.

    Args:
        name: of the optimizer, for messages.
        parameters: with or without gradients.
        groups: all that the optimizer has, with these parameters in them.

    Raises:
        ValueError: for the first gradient that lies otherwise.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or not (isinstance(gradient, DTensor) or isinstance(parameter, DTensor)):
            continue
        if _is_summand(gradient) or local(gradient).shape != local(parameter).shape:
            found, expected = (
                f"the placements {x.placements}" if isinstance(x, DTensor) else "no placements"
                for x in (gradient, parameter)
            )
            raise ValueError(
                f"{name} takes gradients that lie as their parameters, but that of {_called(parameter, groups)} has "
                f"{found}, and the parameter has {expected}: before the step, set parameter.grad to "
                f"parameter.grad.redistribute(placements=parameter.placements)"
            )


def _is_summand(gradient: Tensor) -> bool:
    """Whether a rank has a summand of a gradient alone."""
    if not isinstance(gradient, DTensor):
        return False
    return any(each.is_partial() and gradient.device_mesh.size(i) > 1 for i, each in enumerate(gradient.placements))


def _called(parameter: Tensor, groups: Sequence[dict[str, Any]]) -> str:
    names = zip((p for group in groups for p in group["params"]), parameter_names(groups), strict=True)
    return next(name for p, name in names if p is parameter)
