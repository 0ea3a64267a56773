"""The elementwise parts of a step, as multi-tensor operations over all parameters of a group.

``accepted`` has one entry per parameter, on their device: False leaves the parameter and its state as they are, without
asking the device which ones these are. None says that all are accepted, as the host knows on a CPU. Masks are put on
stacks of equal small tensors, so that they cost a launch for many, and on large ones by themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers.group_settings import DecayMethod, Scalar, decay_power

Tensors = Sequence[Tensor]
Mask = Tensor | None  # which of several parameters step; None for all
Follow = Callable[[Tensors, Tensors, float, bool, Mask], list[Tensor]]

IN_CACHE = 2**20  # bytes of tensors that a CPU keeps at hand from operation to operation
MOST_BYTES = 2**24  # of further copies that are in memory at a time, where a single tensor does not take more


@dataclass(frozen=True)
class Batch:
    """What a step works on of one group of parameters, gathered once."""

    indices: list[int]  # of the parameters, among all of the optimizer
    parameters: list[Tensor]  # in the order of the group
    weights: list[Tensor]  # this rank's part of each of them
    momenta: list[Tensor]  # of each momentum
    gradients: list[Tensor]  # of each gradient; chosen() has them in the dtype of averages
    further: list[list[Tensor]]  # of what else is kept of each parameter and changed in a step
    settings: dict[str, Any]  # of the group
    lr: Scalar
    weight_decay: Scalar
    decay_method: DecayMethod
    accepted: Mask = None

    @property
    def decays(self) -> bool:
        """Whether there is a weight decay; of one that is a tensor a device would have to be asked."""
        return isinstance(self.weight_decay, Tensor) or self.weight_decay != 0

    def flag(self, index: int) -> Tensor | bool:
        """Whether one of the parameters steps."""
        return True if self.accepted is None else self.accepted[index]


def chosen(batches: Sequence[Batch], parameters: Sequence[int] | None = None) -> list[Batch]:
    """The batches of some of their parameters, by default of all, with gradients in the dtype of the momenta.

    Where momenta are kept in one of fewer bits than the weights, it is that of the weights.
    """
    found, wanted = list(batches), None if parameters is None else set(parameters)
    if wanted is not None and len(wanted) < sum(len(batch.indices) for batch in batches):
        found = [_subset(b, at) for b in batches if (at := [n for n, i in enumerate(b.indices) if i in wanted])]
    for number, batch in enumerate(found):
        kept = zip(batch.momenta, batch.weights, strict=True)
        dtypes = [m.dtype if m.dtype == w.dtype else torch.promote_types(m.dtype, w.dtype) for m, w in kept]
        pairs = list(zip(batch.gradients, dtypes, strict=True))
        if any(g.dtype != dtype for g, dtype in pairs):
            found[number] = replace(batch, gradients=[g.to(dtype) for g, dtype in pairs])
    return found


def _subset(batch: Batch, at: Sequence[int]) -> Batch:
    lists = ("indices", "parameters", "weights", "momenta", "gradients", "further")
    changed: dict[str, Any] = {name: [getattr(batch, name)[n] for n in at] for name in lists}
    if batch.accepted is not None:
        each = batch.accepted.unbind()
        changed["accepted"] = torch.stack([each[n] for n in at])
    return replace(batch, **changed)


def masked(new: Tensors, old: Tensors | float, accepted: Mask) -> list[Tensor]:
    """``new`` where accepted, ``old`` elsewhere: further tensors where there is a mask."""
    result = list(new)
    for some in alike(new) if accepted is not None else ():
        assert accepted is not None
        flags = _column(accepted, some, new[some[0]])
        otherwise = old if isinstance(old, float) else stacked(old, some)
        stack = torch.where(flags, stacked(new, some), otherwise)
        for i, each in zip(some, stack.unbind(), strict=True):
            result[i] = each
    return result


def decay(batch: Batch) -> None:
    """``p -= lr * weight_decay * p``, or by another method; ``l2`` changes no parameter."""
    if not batch.decays or batch.decay_method == "l2":
        return
    scale(batch.weights, 1 - decay_power(batch.lr, batch.decay_method) * batch.weight_decay, batch.accepted)


def scale(tensors: Tensors, factor: Scalar, accepted: Mask = None) -> None:
    """Multiply tensors in place."""
    if accepted is None:
        # a number would be rounded to the dtype of the tensors, a tensor without dimensions is not
        torch._foreach_mul_(list(tensors), torch.as_tensor(factor, dtype=torch.float64, device=tensors[0].device))
        return
    scale_each(tensors, torch.where(accepted, factor, 1.0).unbind())


def scale_each(tensors: Tensors, factors: Tensors) -> None:
    """Multiply each tensor in place by a factor of its own on the device, a number or of as many dimensions."""
    for some in alike(tensors, factors):
        first, each = tensors[some[0]], stacked(factors, some)
        each = each.to(torch.promote_types(first.dtype, torch.float32))
        each = each.view(-1, *[1] * first.ndim) if each.ndim == 1 else each
        if len(some) == 1:
            first.mul_(each[0])  # without a copy, of what may be large
        else:
            torch._foreach_copy_([tensors[i] for i in some], (stacked(tensors, some) * each).unbind())


def with_decay(gradients: Tensors, weights: Tensors, weight_decay: Scalar) -> list[Tensor]:
    """``g + weight_decay * p``, the gradient of the loss with an L2 penalty."""
    penalties = torch._foreach_mul(list(weights), weight_decay)
    return list(torch._foreach_add(list(gradients), list(penalties)))


def average(momenta: Tensors, gradients: Tensors, beta: float, nesterov: bool, accepted: Mask) -> list[Tensor]:
    """``m += (1 - beta) (g - m)``; returns ``(1 - beta) g + beta m``, or ``m`` itself without Nesterov's look-ahead."""
    gradients = masked(gradients, momenta, accepted)  # averaged with itself a momentum stays as it is
    torch._foreach_lerp_(list(momenta), gradients, 1 - beta)
    return list(torch._foreach_lerp(gradients, list(momenta), beta)) if nesterov else list(momenta)


def averaged(momenta: Tensors, gradients: Tensors, beta: float, nesterov: bool, accepted: Mask) -> list[Tensor]:
    """What :func:`average` returns, as further tensors: the momenta stay as they are."""
    found: list[Tensor] = []
    gradients = masked(gradients, momenta, accepted)
    for of_some, momenta_of_some in zip(batched(gradients, 16), batched(momenta, 16), strict=True):  # few more copies
        new = list(torch._foreach_lerp(list(momenta_of_some), list(of_some), 1 - beta))
        found += torch._foreach_lerp(list(of_some), new, beta) if nesterov else new
    return found


def heavy_ball(momenta: Tensors, gradients: Tensors, beta: float, nesterov: bool, accepted: Mask) -> list[Tensor]:
    """``m <- beta m + g``; returns ``g + beta m``, or ``m`` itself without Nesterov's look-ahead."""
    gradients = masked(gradients, 0.0, accepted)
    if accepted is None:
        torch._foreach_mul_(list(momenta), beta)  # rounded as the original does
    else:
        scale(momenta, beta, accepted)
    torch._foreach_add_(list(momenta), list(gradients))
    return list(torch._foreach_add(list(gradients), list(momenta), alpha=beta)) if nesterov else list(momenta)


def subtract(weights: Tensors, updates: Tensors, lr: Scalar, accepted: Mask = None) -> None:
    """``p -= lr * update``, where the product has the dtype of the update, with a mask and without."""
    if accepted is None:
        rate = torch.as_tensor(lr, dtype=torch.float64, device=updates[0].device)
        most = max(1, MOST_BYTES // max(1, *(x.nbytes for x in updates)))
        for start in range(0, len(updates), most):
            products = torch._foreach_mul(list(updates[start : start + most]), rate)
            torch._foreach_sub_(list(weights[start : start + most]), list(products))
        return
    for some in alike(updates):
        stack = stacked(updates, some)
        rates = _column(lr * accepted.double(), some, stack[0]).to(torch.promote_types(stack.dtype, torch.float32))
        steps = (stack * rates).to(stack.dtype)
        torch._foreach_sub_([weights[i] for i in some], list(steps.unbind()))


def stacked(tensors: Tensors, some: Sequence[int] | None = None) -> Tensor:
    """Equal tensors, or some of them, as a stack; of a single one it is a view, without a copy of what may be large."""
    chosen = list(tensors) if some is None else [tensors[i] for i in some]
    return chosen[0][None] if len(chosen) == 1 else torch.stack(chosen)


def _column(x: Tensor, some: Sequence[int], like: Tensor) -> Tensor:
    """Entries of a vector, as many dimensions as a stack of tensors has."""
    each = x.unbind()
    chosen = x if len(some) == len(x) else torch.stack([each[i] for i in some])
    return chosen.view(-1, *[1] * like.ndim)


def active(
    groups: Sequence[dict[str, Any]], accepted: Tensor, kind: Callable[[Tensor], object] = lambda p: None
) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...], Mask]]:
    """``(group, parameters, mask)`` of those with a gradient, of one kind and as many as a bounded copy has at a time.

    A CPU knows what is not accepted, and leaves it out. It takes as many as its cache holds between two operations.
    """
    on_cpu = accepted.device.type == "cpu"
    flags, most = iter(accepted.tolist() if on_cpu else accepted.unbind()), IN_CACHE if on_cpu else MOST_BYTES
    for group in groups:
        kinds: dict[tuple[object, ...], list[tuple[Tensor, Any]]] = {}
        for p, flag in zip(group["params"], flags, strict=False):
            if p.grad is not None and flag is not False:
                kinds.setdefault((p.nbytes, p.dtype, kind(p)), []).append((p, flag))
        for of_kind in kinds.values():
            for some in batched(of_kind, max(1, most // max(1, of_kind[0][0].nbytes))):
                parameters, of_some = zip(*some, strict=True)
                yield group, parameters, None if on_cpu else torch.stack(of_some)


def alike(*lists: Tensors) -> Iterator[list[int]]:
    """Indices at which lists have tensors of equal shape and dtype, as many at a time as :data:`MOST_BYTES` allow."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, each in enumerate(zip(*lists, strict=True)):
        kinds.setdefault(tuple((x.shape, x.dtype) for x in each), []).append(i)
    for indices in kinds.values():
        most = max(1, MOST_BYTES // max(1, lists[0][indices[0]].nbytes))
        yield from (indices[start : start + most] for start in range(0, len(indices), most))
