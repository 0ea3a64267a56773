"""The second moment of AdaMuon, NorMuon and NAMO, in fp32: a setting of groups.

``O`` is the orthogonal factor of a whole logical matrix (m x n), ``G`` its gradient, ``g'`` its momentum after the
look-ahead, and EMA an average with ``beta2``:

- ``adamuon`` [1]: ``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)``; with ``align_rms`` rescaled to the norm of ``O``;
- ``normuon`` [2]: ``v <- EMA(mean(O^2))`` over the short dimension, ``U = O rsqrt(max(v, eps))``, rescaled to the norm
  of ``O``;
- ``namo`` [3]: ``v <- EMA(||G||^2)``, ``U = O ||g'|| / (sqrt(v) + eps)``.

Muon's scale multiplies ``U``. Means and norms are those of the global matrix, in at most one all-reduce of a step for
each method and group of ranks.

[1] AdaMuon, arXiv 2507.11005.  [2] NorMuon, arXiv 2510.05491, which has one ``v`` for each row, whatever the shape; the
short dimension is that of emerging-optimizers.  [3] NAMO, arXiv 2602.17080.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.parallel.statistics import Statistics, StatisticsRequest, norms_of, squared_norms
from megatron_eopt.step import foreach
from megatron_eopt.step.foreach import Tensors
from megatron_eopt.step.modifiers import MOMENT2_BUFFER, aligns_rms, moment2_of
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.state import Dim, StateTensor, check_placements
from megatron_eopt.step.step import Batch, Step
from megatron_eopt.step.weight_step import squares_of_shards


def adaptive_muon(step: Step) -> Program:
    """Muon's step with second moments, in the groups that have one."""
    methods = {batch.modified.moment2_method for batch in step.batches}
    step.decay()  # p -= lr * weight_decay * p
    u, *compared = step.compared_momentum("namo" in methods)  # m += (1 - beta) (g - m);  u = (1 - beta) g + beta m
    O = yield from step.orthogonalize(u)  # of each whole logical matrix
    scales = second_moment(step, O, *compared)  # U
    step.subtract(O, scales, divide=step.has_views and "adamuon" in methods)  # p -= lr * s U


def second_moment(step: Step, factors: list[Tensor], gradients: Tensors, updates: Tensors) -> list[float | Tensor]:
    """The scale of each factor; without kernels adamuon changes factors themselves.

    ``gradients`` and ``updates``, of namo, are shards with their norms.
    """
    engine = step.engine
    scales = list[float | Tensor](step.scales)
    for method, (batches, positions) in by_method(step).items():
        of_method = [factors[n] for n in positions]
        of_muon = [step.scales[n] for n in positions]
        new: Sequence[float | Tensor]
        if method == "namo":
            new = namo(engine, batches, [gradients[n] for n in positions], [updates[n] for n in positions], of_muon)
        elif method == "normuon":
            if step.has_views:
                tall = [_tall(matrix.shape) for matrix in engine.flat(step.indices)]
                of_method = step.kernels.norms_of_lines(step.batches, factors, tall)
            new = normuon(engine, batches, of_method, of_muon)
        elif step.has_views:
            new = adamuon_by_kernels(step, factors)
        else:
            adamuon(engine, batches, of_method, of_muon)
            new = [1.0] * len(positions)
        for n, scale in zip(positions, new, strict=True):
            scales[n] = scale
    return scales


def by_method(step: Step) -> dict[str, tuple[list[Batch], list[int]]]:
    """Method -> batches that have it, and positions of their logical matrices in the chunk."""
    found: dict[str, tuple[list[Batch], list[int]]] = {}
    start = 0
    for batch in step.batches:
        end = start + sum(step.counts(batch))
        method = batch.modified.moment2_method
        if method != "none" and end > start:
            batches, positions = found.setdefault(method, ([], []))
            batches.append(batch)
            positions += range(start, end)
        start = end
    return found


def moment_tensors(method: str, ends: Sequence[str], layouts: Sequence[Layout], optional: bool) -> list[StateTensor]:
    """The second moments of a parameter."""
    if method == "adamuon":
        return [StateTensor(MOMENT2_BUFFER, dtype=torch.float32, optional=optional, non_negative=True)]
    tensors = []
    for part, (end, layout) in enumerate(zip(ends, layouts, strict=True)):
        along: tuple[Dim, ...] = ("rows" if _tall(layout.shape) else "columns",)
        dims = along if method == "normuon" else ()
        key = MOMENT2_BUFFER + end
        tensors.append(StateTensor(key, dims, part, torch.float32, optional=optional, non_negative=True))
    return tensors


def check_moments(optimizer: OrthogonalizedOptimizer, parameter: Tensor, called: str, method: str) -> None:
    """Refuse layouts of which there are no statistics."""
    name = type(optimizer).__name__
    if method == "normuon" and len(optimizer.layout(parameter).cut_dims) > 1:
        raise ValueError(
            f"{name}: the statistics of normuon, one for each row or column, need one of them whole, but "
            f"{called}, a matrix {optimizer.layout(parameter).shape}, is cut along both: shard one dimension of it "
            f"alone, or take adamuon or namo"
        )
    check_placements(f"{name}: {called}", parameter, optimizer.state_tensors(parameter), optimizer.matrix_layouts)


def first_rms(settings: Mapping[str, Any], muon: float, scale: float) -> float:
    """RMS of a matrix's first update, before the learning rate, where Muon's is ``muon``.

    The first second moment is ``1 - beta2`` times its first value, so entries of AdaMuon without ``align_rms`` are
    ``+-scale / sqrt(1 - beta2)``. NAMO's first ``g'`` is ``(1 - b) G``, times ``1 + b`` with Nesterov's look-ahead.
    """
    root = sqrt(1 - settings["beta2"])
    if moment2_of(settings) == "namo":
        momentum = settings["momentum"]
        return muon * (1 - momentum) * (1 + momentum if settings["nesterov"] else 1) / root
    return muon if moment2_of(settings) != "adamuon" or aligns_rms(settings) else scale / root


@dataclass(frozen=True)
class Moment:
    """A second moment."""

    v: Tensor
    beta2: float
    eps: float


def moments_of(batches: Sequence[Batch]) -> list[Moment]:
    """The second moments of batches."""
    found = list[Moment]()
    for batch in batches:
        beta2 = batch.group["beta2"]
        eps = batch.group["eps"]
        for of_parameter in batch.matrix_states(MOMENT2_BUFFER):
            found += [Moment(v, beta2, eps) for v in of_parameter]
    return found


def average(moments: Sequence[Moment], values: list[Tensor] | tuple[Tensor, ...], ok: Flag) -> list[Tensor]:
    """``v += (1 - beta2) (value - v)``, overwriting ``values``."""
    vs = [moment.v for moment in moments]
    torch._foreach_clamp_max_(values, torch.finfo(torch.float32).max)  # an infinity would stay in v for ever
    torch._foreach_lerp_(vs, foreach.where_each(ok, values, vs), [1 - moment.beta2 for moment in moments])
    return vs


def adamuon(engine: Engine, batches: Sequence[Batch], factors: list[Tensor], scales: list[float]) -> None:
    """``U = O / (sqrt(v) + eps)`` in place of ``O``, ``v <- EMA(O^2)``, times scales."""
    indices = [i for batch in batches for i in batch.indices]
    moments = moments_of(batches)
    whole = engine.merge(indices, factors)
    directions = [torch.empty_like(factor, dtype=torch.float32) for factor in whole]
    torch._foreach_copy_(directions, whole)
    for equal in foreach.alike(directions):
        wide = [directions[i] for i in equal]
        roots = torch._foreach_sqrt(average([moments[i] for i in equal], torch._foreach_mul(wide, wide), batches[0].ok))
        torch._foreach_add_(roots, [moments[i].eps for i in equal])
        torch._foreach_div_(wide, roots)
    new = engine.split(indices, directions)
    if all(aligns_rms(batch.group) for batch in batches):
        ratios = list(_alignment(*squares_of_shards(engine, indices, factors, new)).unbind())
        torch._foreach_mul_(ratios, scales)
        foreach.scale_each(new, ratios)
    else:
        torch._foreach_mul_(new, scales)
    torch._foreach_copy_(factors, new)


def adamuon_by_kernels(step: Step, factors: list[Tensor]) -> Sequence[float | Tensor]:
    """``v <- EMA(O^2)``; scales of ``O / (sqrt(v) + eps)``, which kernels make when they subtract."""
    aligned = all(aligns_rms(batch.group) for batch in step.batches)
    norms = step.kernels.moments(step.batches, factors, aligned)
    if not aligned:
        return step.scales
    ratios = list(_alignment(*squares_of_shards(step.engine, step.indices, *norms)).unbind())
    torch._foreach_mul_(ratios, step.scales)
    return ratios


def normuon(engine: Engine, batches: Sequence[Batch], factors: Tensors, scales: list[float]) -> list[Tensor]:
    """``rsqrt(max(v, eps))`` of rows or columns, aligned and times scales; one reduction.

    Of ``factors`` the norms of rows or columns are enough, as kernels leave them.
    """
    matrices = engine.flat([i for batch in batches for i in batch.indices])
    moments = moments_of(batches)
    ok = batches[0].ok
    tall = [_tall(matrix.shape) for matrix in matrices]
    means = list[StatisticsRequest]()
    # a short dimension that is cut needs its means reduced; one that is whole, the norms of O and U
    crossing = list[int]()
    here = list[int]()
    for i, (matrix, x) in enumerate(zip(matrices, factors, strict=True)):
        means.append(StatisticsRequest(matrix=matrix, x=x, row_squares=tall[i], column_squares=not tall[i]))
        if _means_cross(matrix):
            crossing.append(i)
        else:
            here.append(i)
    steps: dict[int, Tensor] = {}  # of rows or columns
    norms = list[StatisticsRequest]()
    if here:
        statistics = engine.statistics([means[i] for i in here])  # exchanges nothing
        new, lengths = followed([moments[i] for i in here], statistics, ok)
        steps.update(zip(here, new, strict=True))
        for i, x in zip([*here, *here], lengths, strict=True):
            norms.append(StatisticsRequest(matrix=matrices[i], x=x, squared_norm=True))
    reduced = engine.statistics([*norms, *(means[i] for i in crossing)])
    if here:
        align([steps[i] for i in here], norms_of(reduced[: len(norms)]))
    if crossing:
        new, lengths = followed([moments[i] for i in crossing], reduced[len(norms) :], ok)
        steps.update(zip(crossing, new, strict=True))
        align(new, squared_norms(lengths))
    of_lines = [steps[i][:, None] if tall[i] else steps[i][None] for i in range(len(matrices))]
    torch._foreach_mul_(of_lines, scales)
    return of_lines


def followed(
    moments: Sequence[Moment], statistics: Sequence[Statistics], ok: Flag
) -> tuple[list[Tensor], list[Tensor]]:
    """Steps of rows or columns, and their norms: those of all ``O``, then of all ``U``."""
    squares = [x for of_matrix in statistics for x in of_matrix.values()]
    steps = list(torch._foreach_clamp_min(average(moments, squares, ok), [moment.eps for moment in moments]))
    torch._foreach_rsqrt_(steps)
    roots = torch._foreach_sqrt(squares)
    return steps, [*roots, *torch._foreach_mul(roots, steps)]


def align(steps: list[Tensor], squares: Tensor) -> None:
    """Let each ``U`` have the norm of its ``O``, whose squared norms are in the first half of ``squares``."""
    foreach.scale_each(steps, _alignment(*squares.chunk(2)).unbind())


def namo(
    engine: Engine, batches: Sequence[Batch], gradients: Tensors, updates: Tensors, scales: list[float]
) -> list[Tensor]:
    """``||g'|| / (sqrt(v) + eps)`` of each matrix, ``v <- EMA(||G||^2)``, times scales."""
    indices = [i for batch in batches for i in batch.indices]
    moments = moments_of(batches)
    of_gradients, of_updates = squares_of_shards(engine, indices, gradients, updates)
    roots = torch._foreach_sqrt(average(moments, of_gradients.float().unbind(), batches[0].ok))
    torch._foreach_add_(roots, [moment.eps for moment in moments])
    ratios = list((of_updates.sqrt() / torch.stack(roots)).unbind())
    torch._foreach_mul_(ratios, scales)
    return ratios


def _tall(shape: Shape) -> bool:
    return shape[0] >= shape[1]  # normuon keeps statistics of rows then, else of columns


def _means_cross(matrix: Matrix) -> bool:
    short = int(_tall(matrix.shape))
    return any(r.shape[1 - short] and r.shape[short] != matrix.shape[short] for r in matrix.rectangles)


def _alignment(factor: Tensor, update: Tensor) -> Tensor:
    return torch.where(update > 0, factor / update, 0.0).sqrt()
