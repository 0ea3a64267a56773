"""What the adaptive variants of Muon make of orthogonal factors: AdaMuon, NorMuon and NAMO.

``O`` is the orthogonal factor, in any floating dtype; statistics and what is computed with them are fp32. ``accepted``
is a flag on the device: where it is False, the second moment stays as it is, bit for bit. For each logical matrix a
direction and a ratio come out, whose product replaces the orthogonal factor. Each method makes at most one all-reduce
for each group of ranks. Nothing here waits for the device.

- AdaMuon: Si, Zhang and Shen, arXiv 2507.11005.
- NorMuon: Li et al., arXiv 2510.05491.
- NAMO: arXiv 2602.17080.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix, Shape
from megatron_eopt.parallel.statistics import Statistics, Wanted, known

Moment2Method = Literal["adamuon", "normuon", "namo"]

Directed = tuple[Tensor, Tensor | float]
"""A direction and a ratio."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Factor:
    """The orthogonal factor of one logical matrix.

    Attributes:
        matrix: the logical matrix.
        x: this rank's shard of its orthogonal factor.
        moment: its second moment; for adamuon that of the whole parameter.
        accepted: whether the parameter steps.
        beta2: of the second moment.
        eps: of the second moment.
    """

    matrix: Matrix
    x: Tensor
    moment: Tensor
    accepted: Tensor
    beta2: float
    eps: float


def predicted_first_rms(
    muon: float, scale: float, method: Moment2Method, align_rms: bool, momentum: float, nesterov: bool, beta2: float
) -> float:
    """RMS of the entries of the first update of a matrix of full rank, before the learning rate.

    The first second moment is ``1 - beta2`` times its first value. So the entries of an AdaMuon update that is not
    aligned are ``+-scale / sqrt(1 - beta2)``, whatever the shape. The first ``g'`` of NAMO is ``(1 - b) G``, with
    Nesterov's look-ahead ``(1 - b) (1 + b) G``, so it multiplies ``O`` by that over ``sqrt(1 - beta2)``. What is
    aligned has the size of Muon's update.

    Args:
        muon: the same of Muon (:func:`~megatron_eopt.orthogonalize.scale.predicted_update_rms`).
        scale: what Muon multiplies the orthogonal factor by.
        method: adamuon, normuon or namo.
        align_rms: whether AdaMuon is aligned.
        momentum: ``b``.
        nesterov: whether to look ahead.
        beta2: of the second moment.
    """
    if method == "namo":
        return muon * (1 - momentum) * (1 + momentum if nesterov else 1) / sqrt(1 - beta2)
    return scale / sqrt(1 - beta2) if method == "adamuon" and not align_rms else muon


def tall(shape: Shape) -> bool:
    """Whether rows are the long dimension of a matrix, which normuon keeps its statistics of; squares count as tall."""
    return shape[0] >= shape[1]


def squared_norms(
    engine: Engine, matrices: Sequence[Matrix], *rectangles: Sequence[Tensor]
) -> list[tuple[Tensor, ...]]:
    """For each matrix the squared norms of several tensors that lie as it does, in fp64.

    Args:
        engine: what knows the groups of ranks.
        matrices: where they lie.
        *rectangles: this rank's shards, one sequence after another, each in the order of ``matrices``.
    """
    wanted = [norm(matrix, x) for xs in rectangles for matrix, x in zip(matrices, xs, strict=True)]
    found = [known(statistics.squared_norm) for statistics in engine.statistics(wanted)]
    return [tuple(found[i :: len(matrices)]) for i in range(len(matrices))]


def adamuon(engine: Engine, indices: Sequence[int], factors: Sequence[Factor], align: bool) -> list[Directed]:
    """AdaMuon: what is elementwise is of parameters, the norms of their logical matrices.

    Args:
        engine: splits and merges the matrices of parameters.
        indices: of the parameters.
        factors: of their matrices.
        align: whether to rescale to the norm of the orthogonal factor.
    """
    each = iter(factors)
    firsts = [list(islice(each, len(engine.matrices[i])))[0] for i in indices]  # noqa: RUF015  # the rest is passed over
    whole = engine.merge_all(indices, [factor.x for factor in factors])
    directions = engine.split_all(
        indices,
        [_adamuon(x, f.moment, f.beta2, f.eps, f.accepted) for x, f in zip(whole, firsts, strict=True)],
    )
    if not align:
        return [(direction, 1.0) for direction in directions]
    norms = squared_norms(engine, engine.flat(indices), [factor.x for factor in factors], directions)
    return [(x, _alignment(*pair)) for x, pair in zip(directions, norms, strict=True)]


def normuon(engine: Engine, factors: Sequence[Factor]) -> list[Directed]:
    """NorMuon, with one reduction for two kinds of matrices.

    Where the short dimension is whole on every rank, this one has its means, and ``||O||`` and ``||U||`` are left to
    sum over the ranks. Where it is cut, the means are; these are then of the whole long dimension, so the norms follow
    from them.
    """
    crossing = [factor for factor in factors if _means_cross(factor.matrix)]
    here = [factor for factor in factors if not _means_cross(factor.matrix)]
    means = engine.statistics([_means(factor) for factor in here])  # exchanges nothing
    directions = {
        factor: _times_steps(factor, _steps(factor, found)) for factor, found in zip(here, means, strict=True)
    }
    norms = [norm(factor.matrix, x) for factor in here for x in (factor.x, directions[factor])]
    reduced = engine.statistics([*norms, *map(_means, crossing)])
    found = iter(reduced)
    ratios = {factor: _alignment(known(next(found).squared_norm), known(next(found).squared_norm)) for factor in here}
    for factor, statistics in zip(crossing, found, strict=True):
        steps = _steps(factor, statistics)
        squares = _of_long(factor, statistics).double()  # times the short dimension, which the ratio does not see
        directions[factor] = _times_steps(factor, steps)
        ratios[factor] = _alignment(squares.sum(), (squares * steps.double().square()).sum())
    return [(directions[factor], ratios[factor]) for factor in factors]


def namo(factors: Sequence[Factor], norms: Sequence[tuple[Tensor, ...]]) -> list[Directed]:
    """NAMO, where ``norms`` are those of gradient and momentum of each matrix, squared."""
    return [
        (
            factor.x,
            _namo_ratio(gradient, update, factor.moment, factor.beta2, factor.eps, factor.accepted),
        )
        for factor, (gradient, update) in zip(factors, norms, strict=True)
    ]


def norm(matrix: Matrix, x: Tensor) -> Wanted:
    """The squared norm of a matrix of which ``x`` is this rank's shard."""
    return Wanted(matrix=matrix, x=x, squared_norm=True)


def _means(factor: Factor) -> Wanted:
    """The means of squares along the short dimension."""
    rows_are_long = tall(factor.matrix.shape)
    return Wanted(
        matrix=factor.matrix,
        x=factor.x,
        row_means=rows_are_long,
        column_means=not rows_are_long,
        of_squares=True,
    )


def _means_cross(matrix: Matrix) -> bool:
    """Whether the short dimension is cut; then the long one is not, since a matrix is cut along one at most."""
    short = 1 if tall(matrix.shape) else 0
    return any(
        rectangle.shape[1 - short] and rectangle.shape[short] != matrix.shape[short] for rectangle in matrix.rectangles
    )


def _of_long(factor: Factor, statistics: Statistics) -> Tensor:
    return known(statistics.row_means if tall(factor.matrix.shape) else statistics.column_means)


def _steps(factor: Factor, statistics: Statistics) -> Tensor:
    means = _of_long(factor, statistics)
    return _normuon_steps(means, factor.moment, factor.beta2, factor.eps, factor.accepted)


def _times_steps(factor: Factor, steps: Tensor) -> Tensor:
    return factor.x.float() * (steps[:, None] if tall(factor.matrix.shape) else steps)


def _average(moment: Tensor, value: Tensor, beta2: float, accepted: Tensor) -> None:
    """``v += (1 - beta2) (value - v)`` where ``accepted``, in place; values beyond fp32 count as its largest number."""
    value = value.clamp(max=_LARGEST).to(moment.dtype)  # an infinity would stay in v for ever
    moment.lerp_(torch.where(accepted, value, moment), 1 - beta2)


def _adamuon(factor: Tensor, moment: Tensor, beta2: float, eps: float, accepted: Tensor) -> Tensor:
    """AdaMuon before its alignment: ``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)``, entry by entry."""
    wide = factor.float()
    _average(moment, wide.square(), beta2, accepted)
    return wide / moment.sqrt().add_(eps)


def _normuon_steps(means: Tensor, moment: Tensor, beta2: float, eps: float, accepted: Tensor) -> Tensor:
    """NorMuon: ``v <- EMA(means)``, and by what it multiplies ``O``, ``rsqrt(max(v, eps))``.

    Args:
        means: of the squares of ``O`` along the short dimension of the global matrix, one for each index of the long.
        moment: ``v``, one for each index of the long dimension.
        beta2: of the average.
        eps: the least that is divided by; it is compared to mean squares, not to their roots.
        accepted: see above.
    """
    _average(moment, means, beta2, accepted)
    return moment.clamp(min=eps).rsqrt()


def _namo_ratio(gradient: Tensor, update: Tensor, moment: Tensor, beta2: float, eps: float, accepted: Tensor) -> Tensor:
    """NAMO: ``v <- EMA(||G||^2)``, and by what it multiplies ``O``, ``||g'|| / (sqrt(v) + eps)``.

    Args:
        gradient: ``||G||^2`` of the whole gradient.
        update: ``||g'||^2`` of what is orthogonalized, the momentum after the look-ahead.
        moment: ``v``.
        beta2: of the average.
        eps: added to the norm.
        accepted: see above.
    """
    _average(moment, gradient, beta2, accepted)
    return update.sqrt() / (moment.sqrt() + eps)


def _alignment(factor: Tensor, update: Tensor) -> Tensor:
    """``||O|| / ||U||`` from the squares of the norms of whole matrices; 0 where ``U`` is zero."""
    return torch.where(update > 0, factor / update, 0.0).sqrt()
