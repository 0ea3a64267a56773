"""One step of Schedule-Free AdamW: schedules, directions, and the three points."""

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_eopt.optimizers import foreach

Variant = Literal["kempnerforge", "schedulefree"]


def check_weights(name: str, group: Mapping[str, Any]) -> None:
    """Check what the weights of a group's steps are made of.

    Raises:
        ValueError: for a power out of its range, or for one that has no effect with the variant.
    """
    r, power = group["r"], group["weight_lr_power"]
    if not (isfinite(r) and 0 <= power < inf):
        raise ValueError(f"{name}: r must be finite and weight_lr_power at least 0, got {r} and {power}")
    if group["variant"] == "kempnerforge" and (r, power) != (0, 2):
        raise ValueError(
            f"{name}: r={r} and weight_lr_power={power} would have no effect with variant 'kempnerforge', whose "
            f"weights are the rates: leave them away, or take variant='schedulefree'"
        )


def advance(schedule: Tensor, accepted: Tensor, count: int, group: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the schedules, and the rate and the share of ``z`` in ``x``, both 0 where not accepted.

    Args:
        schedule: (parameters x 3): steps, sum of weights and largest rate of each.
        accepted: (parameters).
        count: steps of the optimizer, this one included.
        group: the settings.

    Returns:
        The new schedule (parameters x 3), the rates (parameters) and the shares (parameters).
    """
    warmup = group["warmup_steps"]
    rates = group["lr"] * (min(1.0, count / warmup) if warmup else 1.0) * accepted.double()
    largest = torch.maximum(schedule[:, 2], rates)
    weights = rates if group["variant"] == "kempnerforge" else count ** group["r"] * largest ** group["weight_lr_power"]
    total = schedule[:, 1] + weights
    shares = torch.where(total > 0, weights / total, 0.0)  # rates may all have been zero
    advanced = torch.stack([schedule[:, 0] + 1, total, largest], dim=1)
    return torch.where(accepted[:, None], advanced, schedule), rates, shares * accepted


def directions(
    gradients: list[Tensor], squares: list[Tensor], accepted: Tensor, beta2: float, correction: float, eps: float
) -> list[Tensor]:
    """``g / (sqrt(v / (1 - beta2^k)) + eps)`` after ``v`` was updated; 0 for those not accepted, whose ``v`` stays."""
    gradients = [g.to(v.dtype) for g, v in zip(gradients, squares, strict=True)]
    # a CPU has the answer at once, and then mostly nothing is to do
    if accepted.device.type != "cpu" or not accepted.all():
        gradients = [torch.where(flag, g, 0.0) for g, flag in zip(gradients, accepted.unbind(), strict=True)]
    new = list(torch._foreach_mul(gradients, gradients))
    torch._foreach_clamp_max_(new, [torch.finfo(v.dtype).max for v in squares])  # an infinity would stay for ever
    torch._foreach_lerp_(squares, foreach.masked(new, squares, accepted), 1 - beta2)
    roots = list(torch._foreach_div(squares, correction))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    return list(torch._foreach_div(gradients, roots))


def scale_and_decay(
    steps: list[Tensor], ys: list[Tensor], zs: list[Tensor], rates: Tensor, weight_decay: float, variant: Variant
) -> None:
    """Make directions what is subtracted from ``z``, decay included, in place."""
    if weight_decay != 0 and variant == "schedulefree":
        torch._foreach_add_(steps, ys, alpha=weight_decay)
    torch._foreach_mul_(steps, rates.unbind())
    if weight_decay != 0 and variant == "kempnerforge":
        after = torch._foreach_sub(zs, steps)
        torch._foreach_mul_(after, (rates * weight_decay).unbind())
        torch._foreach_add_(steps, after)


def move(
    ys: list[Tensor], zs: list[Tensor], xs: list[Tensor], steps: list[Tensor], shares: Tensor, beta1: float
) -> None:
    """``z -= step``, ``x += share (z - x)``, ``y = (1 - beta1) z + beta1 x``.

    Without an ``x``: ``y += share (z - y) - (1 - beta1 (1 - share)) step``, of ``z`` before its step.
    """
    if xs:
        torch._foreach_sub_(zs, steps)
    averages = xs or ys
    towards = torch._foreach_sub(zs, averages)
    torch._foreach_mul_(towards, shares.unbind())
    torch._foreach_add_(averages, towards)
    if xs:
        torch._foreach_copy_(ys, torch._foreach_lerp(zs, xs, beta1))
    else:
        torch._foreach_sub_(ys, torch._foreach_mul(steps, (1 - beta1 * (1 - shares)).unbind()))
        torch._foreach_sub_(zs, steps)
