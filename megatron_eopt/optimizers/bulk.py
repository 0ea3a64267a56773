"""The elementwise parts of a step, as multi-tensor operations over all parameters of a group.

``accepted`` has one entry per parameter, on their device: False leaves the parameter and its momentum as they are,
without asking the device which ones these are.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Scalar = float | Tensor
"""A number, or a tensor without dimensions on the device of the parameters."""

DecayMethod = Literal["decoupled", "l2", "independent", "palm"]
"""What weight decay is: ``p -= lr * weight_decay * p`` [1]; ``g + weight_decay * p`` in place of ``g``;
``p -= weight_decay * p``, whatever the learning rate; ``p -= lr^2 * weight_decay * p``, after PaLM's of ``lr^2`` [2].

``independent`` decays at a rate of 0, too, and torch's ``get_optimizer_state_dict`` steps with that rate where there is
no state yet: call ``init_state()`` before it.

[1] Loshchilov and Hutter, arXiv 1711.05101.  [2] Chowdhery et al., arXiv 2204.02311.
"""

AT_ONCE = 16
"""Tensors whose further copies are in memory at a time."""


def replace_rejected(gradients: Sequence[Tensor], momenta: Sequence[Tensor], accepted: Tensor) -> list[Tensor]:
    """The gradients, with the momentum in place of each not accepted: averaged with itself it stays as it is."""
    # a CPU has the answer at once, and then mostly nothing is to do
    if accepted.device.type == "cpu" and accepted.all():
        return list(gradients)
    return [torch.where(*each) for each in zip(accepted.unbind(), gradients, momenta, strict=True)]


def decay(
    parameters: Sequence[Tensor],
    lr: Scalar,
    weight_decay: Scalar,
    accepted: Tensor,
    method: DecayMethod = "decoupled",
) -> None:
    """``p -= lr * weight_decay * p``, or by another method than ``l2``, which changes no parameter."""
    if method != "decoupled":
        lr = 1.0 if method == "independent" else lr * lr
    torch._foreach_mul_(list(parameters), (1 - lr * weight_decay * accepted.double()).unbind())


def with_decay(gradients: Sequence[Tensor], parameters: Sequence[Tensor], weight_decay: Scalar) -> list[Tensor]:
    """``g + weight_decay * p``, the gradient of the loss with an L2 penalty."""
    penalties = torch._foreach_mul(list(parameters), weight_decay)
    return list(torch._foreach_add(list(gradients), list(penalties)))


def average(momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, nesterov: bool) -> list[Tensor]:
    """``m += (1 - beta) (g - m)``; returns ``(1 - beta) g + beta m``, or ``m`` itself without Nesterov's look-ahead."""
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - beta)
    return list(torch._foreach_lerp(list(gradients), list(momenta), beta)) if nesterov else list(momenta)


def heavy_ball(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, nesterov: bool, accepted: Tensor
) -> list[Tensor]:
    """``m <- beta m + g``; returns ``g + beta m``, or ``m`` itself without Nesterov's look-ahead."""
    betas: float | list[Tensor] = beta
    if accepted.device.type != "cpu" or not accepted.all():  # not accepted is 1 m + 0, which is m
        betas = list(torch.where(accepted, torch.full_like(accepted, beta, dtype=torch.float64), 1.0).unbind())
        gradients = [torch.where(flag, g, 0) for flag, g in zip(accepted.unbind(), gradients, strict=True)]
    torch._foreach_mul_(list(momenta), betas)
    torch._foreach_add_(list(momenta), list(gradients))
    return list(torch._foreach_add(list(gradients), list(momenta), alpha=beta)) if nesterov else list(momenta)


def averaged(momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, nesterov: bool) -> list[Tensor]:
    """What :func:`average` returns, as further tensors: the momenta stay as they are."""
    found: list[Tensor] = []
    for start in range(0, len(momenta), AT_ONCE):
        of_some = list(gradients[start : start + AT_ONCE])
        new = list(torch._foreach_lerp(list(momenta[start : start + AT_ONCE]), of_some, 1 - beta))
        found += torch._foreach_lerp(of_some, new, beta) if nesterov else new
    return found


def apply(parameters: Sequence[Tensor], updates: Sequence[Tensor], lr: Scalar, accepted: Tensor) -> None:
    """``p -= lr * update``, for some at a time: the products are further tensors."""
    factors = (lr * accepted.double()).unbind()
    for start in range(0, len(parameters), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        steps = torch._foreach_mul(list(updates[part]), factors[part])
        torch._foreach_sub_(list(parameters[part]), list(steps))
