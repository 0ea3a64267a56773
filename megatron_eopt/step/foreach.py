"""Elementwise parts of a step, as multi-tensor operations.

If not ``ok``, parameters and state do not change, and the device is not asked: see
:mod:`~megatron_eopt.step.nonfinite`. With a flag equal small tensors are worked on as stacks, to save launches,
and large ones by themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import batched
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.settings.records import DecayMethod
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step.nonfinite import Flag

Tensors = Sequence[Tensor]
MomentumRule = Callable[[Tensors, Tensors, float, bool, Flag], list[Tensor]]

IN_CACHE = 2**20  # bytes of tensors that a CPU keeps at hand from operation to operation
MOST_COPY_BYTES = 2**26  # of further copies that are in memory at a time, where a single tensor does not take more


def where(ok: Flag, new: Tensor, old: Tensor | float) -> Tensor:
    """``new``, or ``old`` if not ``ok``."""
    return new if ok is None else torch.where(ok, new, old)


def copy_where(ok: Flag, new: Tensor, old: Tensor) -> None:
    """Write ``new`` over ``old`` if ``ok``."""
    if ok is None:
        old.copy_(new)
    else:
        torch.where(ok, new, old, out=old)


def where_each(ok: Flag, new: Tensors, old: Tensors | float) -> list[Tensor]:
    """:func:`where` for each of several."""
    result = list(new)
    if ok is None:
        return result
    for equal in alike(new):
        stack = torch.where(ok, stacked(new, equal), old if isinstance(old, float) else stacked(old, equal))
        for i, x in zip(equal, stack.unbind(), strict=True):
            result[i] = x
    return result


def decay_power(lr: Scalar, method: DecayMethod) -> Scalar:
    """The power of ``lr`` that multiplies the weight decay."""
    if method == "independent":
        return 1.0
    return lr * lr if method == "palm" else lr


def scale(tensors: Tensors, factor: Scalar, ok: Flag = None) -> None:
    """Multiply tensors in place."""
    if ok is not None:
        by_dtype: dict[torch.dtype, Tensor] = {}
        for equal in alike(tensors):
            stack = stacked(tensors, equal)
            wide = torch.promote_types(stack.dtype, torch.float32)
            if wide not in by_dtype:
                full = factor.to(wide) if isinstance(factor, Tensor) else torch.full_like(ok, factor, dtype=wide)
                by_dtype[wide] = torch.where(ok, full, 1.0).view(1)  # which, unlike a scalar, is not rounded to 16 bits
            factors = by_dtype[wide]
            if len(equal) == 1:
                stack.mul_(factors)  # a view, of what may be large
            else:
                torch._foreach_copy_([tensors[i] for i in equal], (stack * factors).unbind())
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


def multiplied_each(tensors: Tensors, factors: Tensor, ok: Flag) -> list[Tensor]:
    """Each tensor times an entry: see :func:`_with_each`."""
    return _with_each(torch._foreach_mul, tensors, factors, ok)


def divided_each(tensors: Tensors, divisors: Tensor, ok: Flag) -> list[Tensor]:
    """Each tensor over an entry: see :func:`_with_each`."""
    return _with_each(torch._foreach_div, tensors, divisors, ok)


def _with_each(operation: Callable[..., Sequence[Tensor]], tensors: Tensors, numbers: Tensor, ok: Flag) -> list[Tensor]:
    """Each tensor and an entry; all are fp32, or fp64.

    With a flag, on a GPU, in few launches at the price of copies.
    """
    of_each = numbers.to(tensors[0].dtype).unbind()
    if ok is None:
        return list(operation(list(tensors), list(of_each)))
    results = list(tensors)
    for equal in alike(tensors):
        stack = stacked(tensors, equal)
        number = stacked(of_each, equal).view(-1, *[1] * (stack.ndim - 1))
        for i, x in zip(equal, operation([stack], [number])[0].unbind(), strict=True):
            results[i] = x
    return results


def follow_squares(squares: Tensors, gradients: Tensors, beta: float, ok: Flag) -> None:
    """``v += (1 - beta) (g^2 - v)``; gradients of a step that is made have squares in fp32's range."""
    new = list(torch._foreach_mul(list(gradients), list(gradients)))
    torch._foreach_lerp_(list(squares), where_each(ok, new, squares), 1 - beta)


def with_decay(gradients: Tensors, weights: Tensors, weight_decay: Scalar) -> list[Tensor]:
    """``g + weight_decay * p``, for an L2 penalty."""
    penalties = torch._foreach_mul(list(weights), weight_decay)
    return list(torch._foreach_add(list(gradients), list(penalties)))


def average(momenta: Tensors, gradients: Tensors, beta: float, nesterov: bool, ok: Flag) -> list[Tensor]:
    """``m += (1 - beta) (g - m)``; returns ``m`` or its look-ahead."""
    gradients = where_each(ok, gradients, momenta)  # averaged with itself a momentum stays as it is
    torch._foreach_lerp_(list(momenta), gradients, 1 - beta)
    return list(torch._foreach_lerp(gradients, list(momenta), beta)) if nesterov else list(momenta)


def heavy_ball(momenta: Tensors, gradients: Tensors, beta: float, nesterov: bool, ok: Flag) -> list[Tensor]:
    """``m <- beta m + g``; returns ``m`` or its look-ahead."""
    gradients = where_each(ok, gradients, 0.0)
    if ok is None:
        torch._foreach_mul_(list(momenta), beta)  # rounded as the original does
    else:
        scale(momenta, beta, ok)
    torch._foreach_add_(list(momenta), list(gradients))
    return list(torch._foreach_add(list(gradients), list(momenta), alpha=beta)) if nesterov else list(momenta)


def subtract(weights: Tensors, updates: Tensors, lr: Scalar, ok: Flag = None) -> None:
    """``p -= lr * update``, in the update's dtype."""
    if ok is None:
        rate = torch.as_tensor(lr, dtype=torch.float64, device=updates[0].device)
        most = _at_once(max(updates, key=lambda x: x.nbytes))
        for start in range(0, len(updates), most):
            products = torch._foreach_mul(list(updates[start : start + most]), rate)
            torch._foreach_sub_(list(weights[start : start + most]), list(products))
        return
    rate = (lr * ok.double()).view(1)  # which, unlike a scalar, is not rounded to 16 bits
    for equal in alike(updates):
        stack = stacked(updates, equal)
        wide = torch.promote_types(stack.dtype, torch.float32)
        steps = (stack * rate.to(wide)).to(stack.dtype)
        torch._foreach_sub_([weights[i] for i in equal], list(steps.unbind()))


def stacked(tensors: Tensors, indices: Sequence[int] | None = None) -> Tensor:
    """A stack of equal tensors; of one, a view."""
    some = list(tensors) if indices is None else [tensors[i] for i in indices]
    return some[0][None] if len(some) == 1 else torch.stack(some)


def active(
    groups: Sequence[dict[str, Any]], ok: Flag, kind: Callable[[Tensor], object] = lambda p: None
) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
    """Bounded batches ``(group, parameters)`` of equal parameters with gradients."""
    most = IN_CACHE if ok is None else MOST_COPY_BYTES
    for group in groups:
        kinds: dict[tuple[int, torch.dtype, object], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                kinds.setdefault((p.nbytes, p.dtype, kind(p)), []).append(p)
        for (nbytes, *_), equal in kinds.items():
            # batched() takes memory for as many as it is told
            for parameters in batched(equal, max(1, min(len(equal), most // max(1, nbytes)))):
                yield group, parameters


def alike(*lists: Tensors) -> Iterator[list[int]]:
    """Indices of equal tensors, as many at a time as may be copied."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, tensors in enumerate(zip(*lists, strict=True)):
        kinds.setdefault(tuple((x.shape, x.dtype) for x in tensors), []).append(i)
    for indices in kinds.values():
        most = _at_once(lists[0][indices[0]])
        yield from (indices[start : start + most] for start in range(0, len(indices), most))


def _at_once(x: Tensor) -> int:
    """Copies of a tensor that are in memory at a time."""
    most = MOST_COPY_BYTES
    if x.device.type == "cpu":
        most = min(most, IN_CACHE)
    return max(1, most // max(1, x.nbytes))
