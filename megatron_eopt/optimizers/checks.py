"""Checks that several optimizers share."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers.skipping import parameter_names


def check_rates(name: str, group: dict[str, Any]) -> None:
    """Check ``lr`` and ``weight_decay`` of a group.

    Args:
        name: of the optimizer, for messages.
        group: its settings.

    Raises:
        ValueError: for one out of its range.
    """
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
        called = zip((p for group in groups for p in group["params"]), parameter_names(groups), strict=True)
        own = next(each for p, each in called if p is parameter)
        raise ValueError(f"{name} takes real, dense gradients, but that of {own} is {kind}")
