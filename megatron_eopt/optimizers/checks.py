"""Checks that several optimizers share."""

from math import inf
from typing import Any


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
