"""Elementwise parts of a step, as multi-tensor operations.

``accepted`` has one entry per parameter, on their device: where it is False, parameter and state do not change, and the
device is not asked which these are. None accepts all, as the host knows on a CPU. Equal small tensors are masked as
stacks, to save launches, and large ones by themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import batched
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.settings.records import DecayMethod
from megatron_eopt.settings.values import Scalar

Tensors = Sequence[Tensor]
Mask = Tensor | None  # which of several parameters step; None for all
MomentumRule = Callable[[Tensors, Tensors, float, bool, Mask], list[Tensor]]

IN_CACHE = 2**20  # bytes of tensors that a CPU keeps at hand from operation to operation
MOST_BYTES = 2**26  # of further copies that are in memory at a time, where a single tensor does not take more


def masked(new: Tensors, old: Tensors | float, accepted: Mask) -> list[Tensor]:
    """``new`` where accepted, ``old`` elsewhere."""
    result = list(new)
    if accepted is None:
        return result
    for equal in alike(new):
        stack = stacked(new, equal)
        otherwise = old if isinstance(old, float) else stacked(old, equal)
        stack = torch.where(_column(accepted, equal, stack[0]), stack, otherwise)
        for i, x in zip(equal, stack.unbind(), strict=True):
            result[i] = x
    return result


def decay_power(lr: Scalar, method: DecayMethod) -> Scalar:
    """The power of ``lr`` that multiplies the weight decay."""
    if method == "independent":
        return 1.0
    return lr * lr if method == "palm" else lr


def scale(tensors: Tensors, factor: Scalar, accepted: Mask = None) -> None:
    """Multiply tensors in place."""
    if accepted is not None:
        scale_each(tensors, torch.where(accepted, factor, 1.0).unbind())
        return
    if tensors[0].device.type == "cpu":  # which would round a number to the dtype of the tensors
        factor = torch.as_tensor(factor, dtype=torch.float64)
    torch._foreach_mul_(list(tensors), factor)


def scale_each(tensors: Tensors, factors: Tensors) -> None:
    """Multiply each tensor in place by its own factor."""
    for equal in alike(tensors, factors):
        first = tensors[equal[0]]
        factor = stacked(factors, equal).to(torch.promote_types(first.dtype, torch.float32))
        if factor.ndim == 1:
            factor = factor.view(-1, *[1] * first.ndim)
        if len(equal) == 1:
            first.mul_(factor[0])  # without a copy, of what may be large
        else:
            torch._foreach_copy_([tensors[i] for i in equal], (stacked(tensors, equal) * factor).unbind())


def times(tensors: Tensors, factors: Tensor, accepted: Mask) -> None:
    """Multiply each tensor by an entry, in few launches; with a mask at the price of copies."""
    multiply = torch._foreach_mul_ if accepted is None else scale_each
    multiply(list(tensors), factors.unbind())


def follow_squares(squares: Tensors, gradients: Tensors, beta: float, accepted: Mask) -> None:
    """``v += (1 - beta) (g^2 - v)``."""
    new = list(torch._foreach_mul(list(gradients), list(gradients)))
    torch._foreach_clamp_max_(new, [torch.finfo(v.dtype).max for v in squares])  # an infinity would stay for ever
    torch._foreach_lerp_(list(squares), masked(new, squares, accepted), 1 - beta)


def with_decay(gradients: Tensors, weights: Tensors, weight_decay: Scalar) -> list[Tensor]:
    """``g + weight_decay * p``, for an L2 penalty."""
    penalties = torch._foreach_mul(list(weights), weight_decay)
    return list(torch._foreach_add(list(gradients), list(penalties)))


def average(momenta: Tensors, gradients: Tensors, beta: float, nesterov: bool, accepted: Mask) -> list[Tensor]:
    """``m += (1 - beta) (g - m)``; returns ``m`` or its look-ahead."""
    # averaged with itself a momentum stays as it is
    gradients = list(gradients) if accepted is None else masked(gradients, momenta, accepted)
    torch._foreach_lerp_(list(momenta), gradients, 1 - beta)
    return list(torch._foreach_lerp(gradients, list(momenta), beta)) if nesterov else list(momenta)


def heavy_ball(momenta: Tensors, gradients: Tensors, beta: float, nesterov: bool, accepted: Mask) -> list[Tensor]:
    """``m <- beta m + g``; returns ``m`` or its look-ahead."""
    gradients = masked(gradients, 0.0, accepted)
    if accepted is None:
        torch._foreach_mul_(list(momenta), beta)  # rounded as the original does
    else:
        scale(momenta, beta, accepted)
    torch._foreach_add_(list(momenta), list(gradients))
    return list(torch._foreach_add(list(gradients), list(momenta), alpha=beta)) if nesterov else list(momenta)


def subtract(weights: Tensors, updates: Tensors, lr: Scalar, accepted: Mask = None) -> None:
    """``p -= lr * update``, in the update's dtype."""
    if accepted is None:
        rate = torch.as_tensor(lr, dtype=torch.float64, device=updates[0].device)
        most = max(1, MOST_BYTES // max(1, *(x.nbytes for x in updates)))
        for start in range(0, len(updates), most):
            products = torch._foreach_mul(list(updates[start : start + most]), rate)
            torch._foreach_sub_(list(weights[start : start + most]), list(products))
        return
    for equal in alike(updates):
        stack = stacked(updates, equal)
        rates = _column(lr * accepted.double(), equal, stack[0]).to(torch.promote_types(stack.dtype, torch.float32))
        steps = (stack * rates).to(stack.dtype)
        torch._foreach_sub_([weights[i] for i in equal], list(steps.unbind()))


def stacked(tensors: Tensors, indices: Sequence[int] | None = None) -> Tensor:
    """A stack of equal tensors; of one, a view."""
    chosen = list(tensors) if indices is None else [tensors[i] for i in indices]
    return chosen[0][None] if len(chosen) == 1 else torch.stack(chosen)


def _column(x: Tensor, indices: Sequence[int], like: Tensor) -> Tensor:
    entries = x.unbind()
    chosen = x if len(indices) == len(x) else torch.stack([entries[i] for i in indices])
    return chosen.view(-1, *[1] * like.ndim)


def active(
    groups: Sequence[dict[str, Any]], accepted: Tensor, kind: Callable[[Tensor], object] = lambda p: None
) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...], Mask]]:
    """Bounded batches ``(group, parameters, mask)`` of equal parameters with gradients."""
    on_cpu = accepted.device.type == "cpu"  # which knows what is not accepted, and leaves it out
    flags = iter(accepted.tolist() if on_cpu else accepted.unbind())
    most = IN_CACHE if on_cpu else MOST_BYTES
    for group in groups:
        kinds: dict[tuple[int, torch.dtype, object], list[tuple[Tensor, Any]]] = {}
        for p, flag in zip(group["params"], flags, strict=False):
            if p.grad is not None and flag is not False:
                kinds.setdefault((p.nbytes, p.dtype, kind(p)), []).append((p, flag))
        for (nbytes, *_), equal in kinds.items():
            for batch in batched(equal, max(1, most // max(1, nbytes))):
                parameters, of_batch = zip(*batch, strict=True)
                yield group, parameters, None if on_cpu else torch.stack(of_batch)


def alike(*lists: Tensors) -> Iterator[list[int]]:
    """Indices of equal tensors, :data:`MOST_BYTES` at a time."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, tensors in enumerate(zip(*lists, strict=True)):
        kinds.setdefault(tuple((x.shape, x.dtype) for x in tensors), []).append(i)
    for indices in kinds.values():
        most = max(1, MOST_BYTES // max(1, lists[0][indices[0]].nbytes))
        yield from (indices[start : start + most] for start in range(0, len(indices), most))
