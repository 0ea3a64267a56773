"""A second moment of updates, in fp32: a setting of groups.

``O`` is the orthogonal factor of a whole logical matrix (m x n), ``G`` its gradient, ``g'`` its momentum after the
look-ahead, and EMA an average with ``beta2``:

- ``adamuon`` [1]: ``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)``; with ``align_rms`` rescaled to the norm of ``O``;
- ``normuon`` [2]: ``v <- EMA(mean(O^2))`` over the short dimension, ``U = O rsqrt(max(v, eps))``, rescaled to the norm
  of ``O``;
- ``namo`` [3]: ``v <- EMA(||G||^2)``, ``U = O ||g'|| / (sqrt(v) + eps)``.

Muon's scale multiplies ``U``. Means and norms are those of the global matrix, in at most one all-reduce of a step for
each group of ranks.

[1] AdaMuon, arXiv 2507.11005.  [2] NorMuon, arXiv 2510.05491, which has one ``v`` for each row, whatever the shape; the
short dimension is that of emerging-optimizers.  [3] NAMO, arXiv 2602.17080.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import Matrix, grouped
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.parallel.statistics import Statistics, StatisticsRequest, norms_of, squared_norms
from megatron_eopt.settings.modifiers import MOMENT2_BUFFER, GroupModifiers
from megatron_eopt.step import foreach
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.foreach import Tensors
from megatron_eopt.step.momenta.momentum_stack import MomentumStack, Update, Updates, scaled
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.stacks import joined, matrices_of
from megatron_eopt.step.state import Dim, StateTensor, check_placements
from megatron_eopt.step.weight_step import squares_of_shards


def divided(updates: Updates, engine: Engine) -> dict[MomentumStack, Update]:
    """Updates, divided by the second moments of the groups that have one."""
    changed = dict(updates)
    by_method = grouped(updates, lambda stack: stack.modifiers.moment2_method)
    for method, stacks in by_method.items():
        if method != "none":
            changed |= METHODS[method]({stack: updates[stack] for stack in stacks}, engine)
    return changed


def adamuon(updates: Updates, engine: Engine) -> dict[MomentumStack, Update]:
    """``U = O / (sqrt(v) + eps)``, ``v <- EMA(O^2)``."""
    changed = dict(updates)
    compared: dict[MomentumStack, tuple[Tensors, Tensors]] = {}  # shards, or norms of parts, of O and U
    for stack, (factors, scale, _) in updates.items():
        aligned = stack.modifiers.align_rms
        if stack.has_views:  # kernels divide when they subtract
            norms = stack.kernels.moments(stack, factors, aligned)
            changed[stack] = Update(factors, scale, divided=True)
        else:
            norms = factors, _directions(stack, factors)
            changed[stack] = Update(norms[1], scale)
        if aligned:
            compared[stack] = norms
    if compared:
        of_factors, of_updates = map(joined, zip(*compared.values(), strict=True))
        squares = squares_of_shards(engine, matrices_of(compared), of_factors, of_updates)
        for stack, scale in scales_of(compared, ratios(*squares)).items():
            changed[stack] = changed[stack]._replace(scale=scale)
    for stack, update in changed.items():
        if not stack.has_views:  # rounded once, when all is in
            factors = list(updates[stack].factors)
            torch._foreach_copy_(factors, scaled([update]))
            changed[stack] = Update(factors, 1.0)
    return changed


def _directions(stack: MomentumStack, factors: Tensors) -> list[Tensor]:
    """``O / (sqrt(v) + eps)`` in fp32."""
    v = stack.shards(MOMENT2_BUFFER)
    directions = [torch.empty_like(factor, dtype=torch.float32) for factor in factors]
    torch._foreach_copy_(directions, list(factors))
    for equal in foreach.alike(directions):
        some = [directions[i] for i in equal]
        squares = list(torch._foreach_mul(some, some))
        roots = torch._foreach_sqrt(follow([v[i] for i in equal], squares, [stack] * len(some), stack.ok))
        torch._foreach_add_(roots, stack.group["eps"])
        torch._foreach_div_(some, roots)
    return directions


def normuon(updates: Updates, engine: Engine) -> dict[MomentumStack, Update]:
    """``U = O rsqrt(max(v, eps))`` of rows or columns, ``v <- EMA(mean(O^2))``, by one reduction."""
    here = {stack: update for stack, update in updates.items() if not _means_cross(stack.matrix)}
    crossing = {stack: update for stack, update in updates.items() if stack not in here}
    # a short dimension that is cut needs its means reduced; one that is whole, the norms of O and U
    means = list[StatisticsRequest]()
    for stack, (factors, _, _) in crossing.items():
        means += _means(stack, factors)
    norms = list[StatisticsRequest]()
    steps = list[Tensor]()
    if here:
        of_here = list[StatisticsRequest]()
        for stack, (factors, _, _) in here.items():
            of_here += _means(stack, factors)
        steps, lengths = _followed(here, engine.statistics(of_here))  # exchanges nothing
        for matrix, x in zip([*matrices_of(here), *matrices_of(here)], lengths, strict=True):
            norms.append(StatisticsRequest(matrix=matrix, x=x, squared_norm=True))
    reduced = engine.statistics([*norms, *means])
    if here:
        _align(steps, norms_of(reduced[: len(norms)]))
    if crossing:
        of_crossing, lengths = _followed(crossing, reduced[len(norms) :])
        _align(of_crossing, squared_norms(lengths))
        steps += of_crossing
    stacks = [*here, *crossing]
    torch._foreach_mul_(steps, [stack.scale for stack in stacks for _ in stack.members])
    changed = {}
    lines = torch.cat(steps).split([len(stack.members) * _length(stack) for stack in stacks])
    for stack, of_stack in zip(stacks, lines, strict=True):
        by_line = of_stack.view(len(stack.members), _length(stack))
        scale = by_line[:, :, None] if _is_tall(stack.matrix.shape) else by_line[:, None]
        changed[stack] = Update(updates[stack].factors, scale)
    return changed


def _means(stack: MomentumStack, factors: Tensors) -> list[StatisticsRequest]:
    by_rows = _is_tall(stack.matrix.shape)
    lines = stack.kernels.norms_of_lines(stack, factors, by_rows) if stack.has_views else factors
    wanted = []
    for x in lines:
        wanted.append(StatisticsRequest(matrix=stack.matrix, x=x, row_squares=by_rows, column_squares=not by_rows))
    return wanted


def _length(stack: MomentumStack) -> int:
    """How many rows or columns of each matrix this rank has."""
    shape = stack.chunk.engine.shard(stack.matrix).shape
    return shape[0] if _is_tall(stack.matrix.shape) else shape[1]


def _followed(stacks: Iterable[MomentumStack], means: Sequence[Statistics]) -> tuple[list[Tensor], list[Tensor]]:
    """``rsqrt(max(v, eps))`` of rows or columns, and norms: those of all ``O``, then of all ``U``."""
    of_each = [stack for stack in stacks for _ in stack.members]
    squares = [x for of_matrix in means for x in of_matrix.values()]
    v = joined(stack.of_each(MOMENT2_BUFFER) for stack in stacks)
    follow(v, squares, of_each, of_each[0].ok)
    steps = list(torch._foreach_clamp_min(v, [stack.group["eps"] for stack in of_each]))
    torch._foreach_rsqrt_(steps)
    roots = torch._foreach_sqrt(squares)
    return steps, [*roots, *torch._foreach_mul(roots, steps)]


def _align(steps: list[Tensor], squares: Tensor) -> None:
    """Let each ``U`` have the norm of its ``O``, whose squared norms are in the first half of ``squares``."""
    foreach.scale_each(steps, ratios(*squares.chunk(2)).unbind())


def namo(updates: Updates, engine: Engine) -> dict[MomentumStack, Update]:
    """``U = O ||g'|| / (sqrt(v) + eps)``, ``v <- EMA(||G||^2)``."""
    gradients = joined(stack.compared[0] for stack in updates)
    momenta = joined(stack.compared[1] for stack in updates)
    of_gradients, of_momenta = squares_of_shards(engine, matrices_of(updates), gradients, momenta)
    of_each = [stack for stack in updates for _ in stack.members]
    v = joined(stack.of_each(MOMENT2_BUFFER) for stack in updates)
    roots = torch._foreach_sqrt(follow(v, list(of_gradients.float().unbind()), of_each, of_each[0].ok))
    torch._foreach_add_(roots, [stack.group["eps"] for stack in of_each])
    changed = {}
    for stack, scale in scales_of(updates, of_momenta.sqrt() / torch.stack(roots)).items():
        stack.compared = ((), ())
        changed[stack] = Update(updates[stack].factors, scale)
    return changed


METHODS = {"adamuon": adamuon, "normuon": normuon, "namo": namo}


def follow(v: list[Tensor], values: list[Tensor], of_each: Sequence[MomentumStack], ok: Flag) -> list[Tensor]:
    """``v += (1 - beta2) (value - v)``, each by the group of its stack; overwrites ``values``."""
    torch._foreach_clamp_max_(values, torch.finfo(torch.float32).max)  # an infinity would stay in v for ever
    torch._foreach_lerp_(v, foreach.where_each(ok, values, v), [1 - stack.group["beta2"] for stack in of_each])
    return v


def ratios(factor: Tensor, update: Tensor) -> Tensor:
    """Ratios of norms, of their squares; 0 for an update of zero."""
    return torch.where(update > 0, factor / update, 0.0).sqrt()


def scales_of(stacks: Iterable[MomentumStack], numbers: Tensor) -> dict[MomentumStack, Tensor]:
    """A number of each matrix times Muon's scale."""
    of_each = [stack for stack in stacks for _ in stack.members]
    torch._foreach_mul_(list(numbers.unbind()), [stack.scale for stack in of_each])
    if of_each[0].has_views:
        numbers = numbers.float()  # for kernels
    return dict(zip(stacks, numbers.split([len(stack.members) for stack in stacks]), strict=True))


def moment_tensors(method: str, ends: Sequence[str], layouts: Sequence[Layout], optional: bool) -> list[StateTensor]:
    """The second moments of a parameter."""
    if method == "adamuon":
        return [StateTensor(MOMENT2_BUFFER, dtype=torch.float32, optional=optional, non_negative=True)]
    tensors = []
    for part, (end, layout) in enumerate(zip(ends, layouts, strict=True)):
        along: tuple[Dim, ...] = ("rows" if _is_tall(layout.shape) else "columns",)
        dims = along if method == "normuon" else ()
        key = MOMENT2_BUFFER + end
        tensors.append(StateTensor(key, dims, part, torch.float32, optional=optional, non_negative=True))
    return tensors


def check_moments(optimizer: BaseOptimizer, parameter: Tensor, called: str, method: str) -> None:
    """Refuse layouts of which there are no statistics."""
    name = type(optimizer).__name__
    if method == "normuon" and len(optimizer.layout(parameter).cut_dims) > 1:
        raise ValueError(
            f"{name}: the statistics of normuon, one for each row or column, need one of them whole, but "
            f"{called}, a matrix {optimizer.layout(parameter).shape}, is cut along both: shard one dimension of it "
            f"alone, or take adamuon or namo"
        )
    check_placements(f"{name}: {called}", parameter, optimizer.state_tensors(parameter), optimizer.matrix_layouts)


def first_rms(settings: Mapping[str, Any], modifiers: GroupModifiers, muon: float, scale: float) -> float:
    """RMS of a matrix's first update, before the learning rate, where Muon's is ``muon``.

    The first second moment is ``1 - beta2`` times its first value, so entries of AdaMuon without ``align_rms`` are
    ``+-scale / sqrt(1 - beta2)``. NAMO's first ``g'`` is ``(1 - b) G``, times ``1 + b`` with Nesterov's look-ahead.
    """
    root = sqrt(1 - settings["beta2"])
    if modifiers.moment2_method == "namo":
        momentum = settings["momentum"]
        return muon * (1 - momentum) * (1 + momentum if settings["nesterov"] else 1) / root
    return muon if modifiers.moment2_method != "adamuon" or modifiers.align_rms else scale / root


def _means_cross(matrix: Matrix) -> bool:
    short = int(_is_tall(matrix.shape))
    return any(r.shape[1 - short] and r.shape[short] != matrix.shape[short] for r in matrix.rectangles)


def _is_tall(shape: Shape) -> bool:
    return shape[0] >= shape[1]  # normuon keeps statistics of rows then, else of columns
