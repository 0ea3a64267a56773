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

MOST_BYTES = 2**24  # of further copies that are in memory at a time, where a single tensor does not take more


@dataclass(frozen=True)
class Batch:
    """What a step works on of one group of parameters, gathered once."""

    indices: list[int]  # of the parameters, among all of the optimizer
    parameters: list[Tensor]  # in the order of the group
    weights: list[Tensor]  # this rank's part of each of them
    momenta: list[Tensor]  # of each momentum
    gradients: list[Tensor]  # of each gradient; chosen() has them in the dtype of the momentum
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
    """The batches of some of their parameters, by default of all, with gradients in the dtype of the momenta."""
    wanted, found = set(parameters or ()), []
    for batch in batches:
        at = [n for n, i in enumerate(batch.indices) if parameters is None or i in wanted]
        if not at:
            continue
        flags = batch.accepted
        if flags is not None and len(at) < len(batch.indices):
            each = flags.unbind()
            flags = torch.stack([each[n] for n in at])
        pairs = [(batch.gradients[n], batch.momenta[n].dtype) for n in at]
        found.append(
            replace(
                batch,
                indices=[batch.indices[n] for n in at],
                parameters=[batch.parameters[n] for n in at],
                weights=[batch.weights[n] for n in at],
                momenta=[batch.momenta[n] for n in at],
                gradients=[g if g.dtype == dtype else g.to(dtype) for g, dtype in pairs],
                further=[batch.further[n] for n in at],
                accepted=flags,
            )
        )
    return found


def masked(new: Tensors, old: Tensors | float, accepted: Mask) -> list[Tensor]:
    """``new`` where accepted, ``old`` elsewhere: further tensors where there is a mask."""
    result = list(new)
    for some in _alike(new) if accepted is not None else ():
        assert accepted is not None
        flags = _column(accepted, some, new[some[0]])
        otherwise = old if isinstance(old, float) else _stacked(old, some)
        stack = torch.where(flags, _stacked(new, some), otherwise)
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
    factors = torch.where(accepted, factor, 1.0)
    for some in _alike(tensors):
        rates = _rates(factors, some, tensors[some[0]])
        if len(some) == 1:
            tensors[some[0]].mul_(rates[0])
        else:
            torch._foreach_copy_([tensors[i] for i in some], (_stacked(tensors, some) * rates).unbind())


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
    for some in _alike(updates):
        stack = _stacked(updates, some)
        steps = (stack * _rates(lr * accepted.double(), some, stack[0])).to(stack.dtype)
        torch._foreach_sub_([weights[i] for i in some], list(steps.unbind()))


def _stacked(tensors: Tensors, some: Sequence[int]) -> Tensor:
    """Some tensors as a stack; of a single one a view."""
    return tensors[some[0]][None] if len(some) == 1 else torch.stack([tensors[i] for i in some])


def _rates(factors: Tensor, some: Sequence[int], like: Tensor) -> Tensor:
    """Factors of some tensors, which multiply a stack of them."""
    return _column(factors, some, like).to(torch.promote_types(like.dtype, torch.float32))


def _column(x: Tensor, some: Sequence[int], like: Tensor) -> Tensor:
    """Entries of a vector, as many dimensions as a stack of tensors has."""
    each = x.unbind()
    chosen = x if len(some) == len(x) else torch.stack([each[i] for i in some])
    return chosen.view(-1, *[1] * like.ndim)


def _alike(tensors: Tensors) -> Iterator[list[int]]:
    """Indices of tensors of equal shape and dtype, as many at a time as :data:`MOST_BYTES` allow."""
    kinds: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault((x.shape, x.dtype), []).append(i)
    for (shape, dtype), indices in kinds.items():
        most = max(1, MOST_BYTES // max(1, shape.numel() * dtype.itemsize))
        yield from (indices[start : start + most] for start in range(0, len(indices), most))
