"""The second moment of AdaMuon, NorMuon and NAMO, in fp32: a setting of groups.

``O`` is the orthogonal factor of a whole logical matrix (m x n), ``G`` its gradient, ``g'`` its momentum after the
look-ahead, and EMA an average with ``beta2``:

- ``adamuon`` [1]: ``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)``; with ``align_rms`` rescaled to the norm of ``O``;
- ``normuon`` [2]: ``v <- EMA(mean(O^2))`` over the short dimension, ``U = O rsqrt(max(v, eps))``, rescaled to the norm
  of ``O``;
- ``namo`` [3]: ``v <- EMA(||G||^2)``, ``U = O ||g'|| / (sqrt(v) + eps)``.

Muon's scale multiplies ``U``. Means and norms are those of the global matrix, in at most one all-reduce of a step for
each method and group of ranks.

[1] AdaMuon, arXiv 2507.11005.  [2] NorMuon, arXiv 2510.05491.  [3] NAMO, arXiv 2602.17080.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.batches import Batch
from megatron_eopt.optimizers.foreach import Tensors
from megatron_eopt.optimizers.modifiers import MOMENT2_BUFFER, Modifiers
from megatron_eopt.optimizers.muon import Chunk, counts_of, decay, kept_momentum, subtract
from megatron_eopt.optimizers.muon_arguments import refuse_blockwise
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.optimizers.state import Dim, StateTensor, check_placements
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.records import Matrix, Shape
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.parallel.statistics import Statistics, StatisticsRequest, norms_of, squared_norms


def adaptive_muon(chunk: Chunk, engine: Engine) -> Program:
    """Muon's step with second moments, in the groups that have one."""
    decay(chunk)  # p -= lr * weight_decay * p
    u = kept_momentum(chunk, engine)  # m += (1 - beta) (g - m);  u = (1 - beta) g + beta m
    kept = list(u) if any(batch.modifiers.moment2_method == "namo" for batch in chunk.batches) else []
    factors = yield from engine.orthogonalize(chunk.indices, u)  # O of each whole logical matrix
    scales = second_moment(chunk, engine, factors, kept)  # U
    subtract(chunk, engine, factors, scales)  # p -= lr * s U


def second_moment(
    chunk: Chunk, engine: Engine, factors: list[Tensor], updates: Tensors
) -> Sequence[float] | Sequence[float | Tensor]:
    """The scale of each factor; adamuon and normuon scale factors themselves, in place."""
    scales, done, methods = list[float | Tensor](chunk.scales), 0, dict[str, list[tuple[Batch, slice]]]()
    for batch in chunk.batches:
        at = slice(done, done := done + sum(counts_of(engine, batch)))
        if batch.modifiers.moment2_method != "none":
            methods.setdefault(batch.modifiers.moment2_method, []).append((batch, at))
    for method, of_method in methods.items():
        numbers = [n for _, at in of_method for n in range(at.start, at.stop)]
        batches, own = [batch for batch, _ in of_method], [factors[n] for n in numbers]
        new = _scaled(
            method, batches, engine, own, [updates[n] for n in numbers if updates], [chunk.scales[n] for n in numbers]
        )
        for n, scale in zip(numbers, new, strict=True):
            scales[n] = scale
    return scales


def _scaled(
    method: str, batches: Sequence[Batch], engine: Engine, factors: list[Tensor], updates: Tensors, scales: list[float]
) -> Sequence[float | Tensor]:
    moments, indices = list[Moment](), [i for batch in batches for i in batch.indices]
    for batch in batches:
        beta2, eps, radii = batch.modifiers.beta2, batch.modifiers.eps, batch.modifiers.weight_norm == "hold"
        of_each = enumerate(zip(batch.further, counts_of(engine, batch), strict=True))
        moments += [Moment(v, batch.flag(n), beta2, eps) for n, (kept, count) in of_each for v in kept[radii * count :]]
    if not moments:
        return [1.0] * len(factors)
    matrices = engine.flat(indices)
    if method == "adamuon":
        new = engine.split(indices, adamuon(engine.merge(indices, factors), moments))
        aligned = [batch.modifiers.align_rms for batch in batches]
        if all(aligned):
            ratios = list(_alignment(*_squared_norms(engine, matrices, factors, new)).unbind())
            torch._foreach_mul_(ratios, scales)
            foreach.scale_each(new, ratios)
        else:
            torch._foreach_mul_(new, scales)
        torch._foreach_copy_(factors, new)
        return [1.0] * len(factors)
    if method == "normuon":
        of_lines = normuon(engine, matrices, factors, moments)  # one for each row or column
        torch._foreach_mul_(of_lines, scales)
        foreach.scale_each(factors, of_lines)
        return [1.0] * len(factors)
    gradients = engine.split(indices, [gradient for batch in batches for gradient in batch.gradients])
    ratios = namo(moments, *_squared_norms(engine, matrices, gradients, updates))
    torch._foreach_mul_(ratios, scales)
    return ratios


def moments(method: str, ends: Sequence[str], layouts: Sequence[Layout], optional: bool) -> list[StateTensor]:
    """The second moments of a parameter."""
    if method == "adamuon":
        return [StateTensor(MOMENT2_BUFFER, dtype=torch.float32, optional=optional)]
    tensors = []
    for part, (end, layout) in enumerate(zip(ends, layouts, strict=True)):
        along: tuple[Dim, ...] = ("rows" if _tall(layout.shape) else "columns",)
        dims = along if method == "normuon" else ()
        tensors.append(StateTensor(MOMENT2_BUFFER + end, dims, part, torch.float32, optional=optional))
    return tensors


def check_moments(optimizer: OrthogonalizedOptimizer, parameter: Tensor, called: str, method: str) -> None:
    """Refuse layouts of which there are no statistics."""
    name = type(optimizer).__name__
    if method != "adamuon":
        refuse_blockwise(optimizer, f"statistics of {method}", ", or adamuon")
    if method == "normuon" and len(optimizer.layout(parameter).cut_dims) > 1:
        raise ValueError(
            f"{name}: the statistics of normuon, one for each row or column, need one of them whole, but "
            f"{called}, a matrix {optimizer.layout(parameter).shape}, is cut along both: shard one dimension of it "
            f"alone, or take adamuon or namo"
        )
    check_placements(f"{name}: {called}", parameter, optimizer.state_tensors(parameter), optimizer.matrix_layouts)


def first_rms(modifiers: Modifiers, muon: float, scale: float, momentum: float, nesterov: bool) -> float:
    """RMS of a matrix's first update, before the learning rate, where Muon's is ``muon``.

    The first second moment is ``1 - beta2`` times its first value, so entries of AdaMuon without ``align_rms`` are
    ``+-scale / sqrt(1 - beta2)``. NAMO's first ``g'`` is ``(1 - b) G``, times ``1 + b`` with Nesterov's look-ahead.
    """
    root = sqrt(1 - modifiers.beta2)
    if modifiers.moment2_method == "namo":
        return muon * (1 - momentum) * (1 + momentum if nesterov else 1) / root
    return muon if modifiers.moment2_method != "adamuon" or modifiers.align_rms else scale / root


@dataclass(frozen=True)
class Moment:
    """A second moment, kept where ``accepted`` is False."""

    v: Tensor
    accepted: Tensor | bool
    beta2: float
    eps: float


def average(moments: Sequence[Moment], values: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    """``v += (1 - beta2) (value - v)``, overwriting ``values``."""
    vs, flags = [m.v for m in moments], [m.accepted for m in moments if isinstance(m.accepted, Tensor)]
    torch._foreach_clamp_max_(values, torch.finfo(torch.float32).max)  # an infinity would stay in v for ever
    new = foreach.masked(values, vs, torch.stack(flags) if flags else None)
    torch._foreach_lerp_(vs, new, [1 - m.beta2 for m in moments])
    return vs


def adamuon(factors: Tensors, moments: Sequence[Moment]) -> list[Tensor]:
    """``U = O / (sqrt(v) + eps)``, ``v <- EMA(O^2)``."""
    directions = [torch.empty_like(factor, dtype=torch.float32) for factor in factors]
    torch._foreach_copy_(directions, list(factors))
    for some in foreach.alike(directions):
        wide, of_some = [directions[i] for i in some], [moments[i] for i in some]
        roots = torch._foreach_sqrt(average(of_some, torch._foreach_mul(wide, wide)))
        torch._foreach_add_(roots, [moment.eps for moment in of_some])
        torch._foreach_div_(wide, roots)
    return directions


def normuon(engine: Engine, matrices: Sequence[Matrix], factors: Tensors, moments: Sequence[Moment]) -> list[Tensor]:
    """``rsqrt(max(v, eps))`` of rows or columns, keeping ``||O||``; one reduction."""
    steps: dict[int, Tensor] = {}
    measured = [(m, x, _tall(m.shape)) for m, x in zip(matrices, factors, strict=True)]
    means = [StatisticsRequest(matrix=m, x=x, row_squares=tall, column_squares=not tall) for m, x, tall in measured]
    # a short dimension that is cut needs its means reduced; one that is whole, the norms of O and U
    crossing = [i for i, matrix in enumerate(matrices) if _means_cross(matrix)]
    here = [i for i, matrix in enumerate(matrices) if not _means_cross(matrix)]

    def follow(some: list[int], statistics: Sequence[Statistics]) -> list[Tensor]:
        """Norms of rows or columns of ``O`` and ``U``, unscaled."""
        of_some = [moments[i] for i in some]
        along = [squares for of_matrix in statistics for squares in of_matrix.values()]
        new = torch._foreach_clamp_min(average(of_some, along), [moment.eps for moment in of_some])
        torch._foreach_rsqrt_(new)
        steps.update(zip(some, new, strict=True))
        roots = torch._foreach_sqrt(along)
        return [*roots, *torch._foreach_mul(roots, new)]

    def align(some: list[int], squares: Tensor) -> None:
        foreach.scale_each([steps[i] for i in some], _alignment(*squares.chunk(2)).unbind())

    lengths = follow(here, engine.statistics([means[i] for i in here])) if here else []  # exchanges nothing
    pairs = zip([matrices[i] for i in here] * 2, lengths, strict=True)
    norms = [StatisticsRequest(matrix=W, x=x, squared_norm=True) for W, x in pairs]
    reduced = engine.statistics([*norms, *(means[i] for i in crossing)])
    if here:
        align(here, norms_of(reduced[: len(norms)]))
    if crossing:
        align(crossing, squared_norms(follow(crossing, reduced[len(norms) :])))
    return [steps[i][:, None] if _tall(matrix.shape) else steps[i][None] for i, matrix in enumerate(matrices)]


def namo(moments: Sequence[Moment], squared_gradients: Tensor, squared_updates: Tensor) -> list[Tensor]:
    """``||g'|| / (sqrt(v) + eps)`` of each matrix, from squared norms."""
    roots = torch._foreach_sqrt(average(moments, squared_gradients.float().unbind()))
    torch._foreach_add_(roots, [moment.eps for moment in moments])
    return list((squared_updates.sqrt() / torch.stack(roots)).unbind())


def _tall(shape: Shape) -> bool:
    return shape[0] >= shape[1]  # normuon keeps statistics of rows then, else of columns


def _means_cross(matrix: Matrix) -> bool:
    short = int(_tall(matrix.shape))
    return any(r.shape[1 - short] and r.shape[short] != matrix.shape[short] for r in matrix.rectangles)


def _squared_norms(engine: Engine, matrices: Sequence[Matrix], *shards: Tensors) -> tuple[Tensor, ...]:
    several = [zip(matrices, xs, strict=True) for xs in shards]
    wanted = [StatisticsRequest(matrix=matrix, x=x, squared_norm=True) for pairs in several for matrix, x in pairs]
    return norms_of(engine.statistics(wanted)).chunk(len(shards))


def _alignment(factor: Tensor, update: Tensor) -> Tensor:
    return torch.where(update > 0, factor / update, 0.0).sqrt()
