"""Checks that several optimizers share: of the settings of Adam, and of the kind of gradients."""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor


def check_adam_settings(name: str, group: dict[str, Any]) -> None:
    """Check ``lr``, ``weight_decay``, ``eps`` and ``betas`` of a group.

    Args:
        name: of the optimizer, for messages.
        group: its settings.

    Raises:
        ValueError: for one out of its range.
    """
    for key in ("lr", "weight_decay"):
        if not 0 <= group[key] < inf:
            raise ValueError(f"{name}: {key} must be a finite number of at least 0, got {group[key]}")
    if not 0 < group["eps"] < inf:
        raise ValueError(f"{name}: eps must be a finite number above 0, got {group['eps']}")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {betas}")


def check_real_and_dense(name: str, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Check that no gradient is complex or sparse.

    Args:
        name: of the optimizer, for messages.
        parameters: with or without a gradient.
        names: one per parameter.

    Raises:
        ValueError: for the first gradient that is.
    """
    for parameter, which in zip(parameters, names, strict=True):
        gradient = parameter.grad
        if gradient is None or (gradient.layout == torch.strided and not gradient.is_complex()):
            continue
        kind = "complex" if gradient.is_complex() else f"sparse ({gradient.layout})"
        raise ValueError(f"{name} takes real, dense gradients, but that of {which} is {kind}")
