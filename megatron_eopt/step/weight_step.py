"""The mathematics of :mod:`~megatron_eopt.settings.modifiers`, over lists of shards."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.statistics import StatisticsRequest, norms_of
from megatron_eopt.settings.modifiers import GroupModifiers
from megatron_eopt.step import foreach
from megatron_eopt.step.foreach import Tensors


def decay_cautiously(weights: Tensors, updates: Tensors, factor: Tensor) -> None:
    """``p *= factor`` in place, of entries whose signs do not differ from the update's.

    An entry that is zero in either decays, as the paper has it.
    """
    for xs, before, update, (kept,) in _stacks(weights, updates, factor.expand(len(weights), 1)):
        decayed = (before.to(kept.dtype) * kept).to(before.dtype)
        agrees = before.sign() * update.sign() >= 0  # of signs: a product of small entries may become zero
        torch._foreach_copy_(xs, torch.where(agrees, decayed, before).unbind())


def move(weights: Tensors, updates: Tensors, coefficients: Tensor) -> None:
    """Apply ``W <- (W - a U) b`` in place, rounded once; each has ``(moves, a, b)``."""
    for xs, before, update, (moves, step, resize) in _stacks(weights, updates, coefficients):
        moved = (before.to(step.dtype) - step * update.to(step.dtype)) * resize
        torch._foreach_copy_(xs, torch.where(moves > 0, moved.to(before.dtype), before).unbind())


def on_spheres(squares: Tensor, inner: Tensor, radii: Tensor, lengths: Tensor) -> Tensor:
    """Coefficients ``(moves, a, b)`` of each step ``(W - a U) b`` that holds a norm.

    That is ``R normalize(W - lr R normalize(U))``. The norm of the difference follows from those of its terms, so one
    reduction is enough; fp64 leaves enough digits where they cancel. All is in fp64: ``squares`` are squared norms of
    all ``W``, and of all ``U``; ``lengths`` are ``lr R``, and 0 where a matrix stays. Waits for no device.
    """
    squared_weights, squared_updates = squares
    steps = lengths / nonzero(squared_updates.sqrt())
    squared = (squared_weights - 2 * steps * inner + steps.square() * squared_updates).clamp(min=0)
    # nearer to the center, what a step leaves of a matrix is rounding, and so is its direction
    moves = _has_direction(steps, squared_updates) & (squared > 1e-12 * squared_weights)
    return torch.stack([moves, steps, radii / nonzero(squared.sqrt())], 1)


def resized(squares: Tensor, inner: Tensor, rate: Tensor, modifiers: GroupModifiers, sizes: Sequence[int]) -> Tensor:
    """As :func:`on_spheres`, of other modifiers; ``rate`` is ``lr``, or 0 where all stays.

    ``sizes`` are the numbers of entries of matrices.
    """
    squared_weights, squared_updates = squares
    norms = squared_weights.sqrt()
    steps = rate.expand(len(norms))
    if modifiers.matches:
        steps = steps * (modifiers.update_ratio * norms / nonzero(squared_updates.sqrt()))
    if modifiers.max_update_rms:
        # each by a number of the host's, so that no device waits for a copy of them
        mean_squares = torch.stack(torch._foreach_div(list(squared_updates.unbind()), [max(1, n) for n in sizes]))
        steps = steps * (modifiers.max_update_rms / nonzero(mean_squares.sqrt())).clamp(max=1)
    resize = torch.ones_like(norms)
    if modifiers.weight_norm == "brake":
        after = (squared_weights - 2 * steps * inner + steps.square() * squared_updates).clamp(min=0).sqrt()
        change = after - norms
        inward = modifiers.brake_inward
        kept = inward + (change > 0).double() * (modifiers.brake_outward - inward)  # in fp64, by no copy from the host
        resize = (norms + kept * change) / nonzero(after)
    return torch.stack([_has_direction(steps, squared_updates), steps, resize], 1)


def _has_direction(steps: Tensor, squared_updates: Tensor) -> Tensor:
    """Whether there is a step, which fp32 can have: an update near its least number is rounding."""
    return (steps != 0) & (squared_updates > 0) & (steps <= torch.finfo(torch.float32).max)


def _stacks(
    weights: Tensors, updates: Tensors, of_each: Tensor
) -> Iterator[tuple[list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]]:
    """Equal pieces as they lie and stacked, of updates too, with columns of numbers.

    A piece has few enough rows that a copy is bounded. Numbers have the dtype to compute in.
    """
    shards = list[Tensor]()
    changes = list[Tensor]()
    numbers = list[Tensor]()
    for x, update, row in zip(weights, updates, of_each.unbind(), strict=True):
        height = max(1, foreach.MOST_COPY_BYTES // 4 // max(1, x.shape[1:].numel()))
        for shard, change in zip(x.split(height), update.split(height), strict=True):
            shards.append(shard)
            changes.append(change)
            numbers.append(row)
    for equal in foreach.alike(shards, changes, numbers):
        xs = [shards[i] for i in equal]
        before = torch.stack(xs)
        update = torch.stack([changes[i] for i in equal])
        rows = torch.stack([numbers[i] for i in equal]).to(torch.promote_types(before.dtype, torch.float32))
        yield xs, before, update, rows.view(*rows.shape, *[1] * before[0].ndim).unbind(1)


def squares_of_shards(engine: Engine, matrices: Sequence[Matrix], *shards: Tensors) -> tuple[Tensor, ...]:
    """Squared norms in fp64 of matrices, for each list of this rank's shards of them; by one reduction."""
    wanted = list[StatisticsRequest]()
    for xs in shards:
        pairs = zip(matrices, xs, strict=True)
        wanted += [StatisticsRequest(matrix=W, x=x, squared_norm=True) for W, x in pairs]
    return norms_of(engine.statistics(wanted)).chunk(len(shards))


def squares_and_products(
    engine: Engine, matrices: Sequence[Matrix], weights: Tensors, updates: Tensors
) -> tuple[Tensor, Tensor]:
    """Squared norms (2, n) of shards of weights and updates, and inner products of both (n,); by one reduction.

    They are in fp64 and of whole matrices, as :func:`on_spheres` and :func:`resized` take them.
    """
    of_weights = list[StatisticsRequest]()
    of_updates = list[StatisticsRequest]()
    for W, x, u in zip(matrices, weights, updates, strict=True):
        of_weights.append(StatisticsRequest(matrix=W, x=x, squared_norm=True, inner=u))
        of_updates.append(StatisticsRequest(matrix=W, x=u, squared_norm=True))
    statistics = engine.statistics([*of_weights, *of_updates])
    inner = torch.stack([of_matrix["inner_product"] for of_matrix in statistics[: len(of_weights)]])
    return norms_of(statistics).view(2, -1), inner
