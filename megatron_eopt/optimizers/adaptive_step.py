"""The second moments of all matrices in a step: what is kept, what is reduced over the ranks, what comes out.

For each logical matrix a direction and a ratio, whose product takes the place of the orthogonal factor. Each method
makes at most one all-reduce for each group of ranks. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_eopt.optimizers import second_moment
from megatron_eopt.parallel.pieces import Shape
from megatron_eopt.parallel.plan import Matrix
from megatron_eopt.parallel.planned import Planned
from megatron_eopt.parallel.sharing import SharedParameters
from megatron_eopt.parallel.statistics import Statistics, Wanted
from megatron_eopt.parallel.variants import Variants

Directed = tuple[Tensor, Tensor | float]
"""A direction and a ratio."""


@dataclass(frozen=True, eq=False)
class Part:
    """One logical matrix of a parameter.

    Attributes:
        matrix: where it lies.
        factor: this rank's piece of its orthogonal factor.
        moment: its second moment; for adamuon that of the whole parameter.
        accepted: whether the parameter takes part.
        beta2: of its group, and
        eps: likewise.
        scale: factor of its update, from the shape of the global matrix.
    """

    matrix: Matrix
    factor: Tensor
    moment: Tensor
    accepted: Tensor
    beta2: float
    eps: float
    scale: Callable[[int, int], float]


def tall(shape: Shape) -> bool:
    """Whether rows are the long dimension of a matrix, which normuon keeps its statistics of; squares count as tall."""
    return shape[0] >= shape[1]


def squared_norms(
    planned: SharedParameters, matrices: Sequence[Matrix], *pieces: Sequence[Tensor]
) -> list[tuple[Tensor, ...]]:
    """For each matrix the squared norms of several tensors that lie as it does, in fp64.

    Args:
        planned: what knows the groups of ranks.
        matrices: where they lie.
        *pieces: this rank's pieces, one sequence after another, each in the order of ``matrices``.
    """
    wanted = [norm(matrix, x) for xs in pieces for matrix, x in zip(matrices, xs, strict=True)]
    found = [_there(statistics.squared_norm) for statistics in planned.statistics(wanted)]
    return [tuple(found[i :: len(matrices)]) for i in range(len(matrices))]


def adamuon(
    planned: Planned | Variants, places: Sequence[int], parts: Sequence[Sequence[Part]], align: bool
) -> list[Directed]:
    """AdaMuon: what is elementwise is of parameters, the norms of their logical matrices.

    Args:
        planned: what puts the matrices of a parameter together.
        places: of the parameters.
        parts: of each of them.
        align: whether to rescale to the norm of the orthogonal factor.
    """
    directions = []
    for place, of_place in zip(places, parts, strict=True):
        first, whole = of_place[0], planned.merge(place, [part.factor for part in of_place])
        direction = second_moment.adamuon(whole, first.moment, first.beta2, first.eps, first.accepted)
        directions += planned.split(place, direction)
    if not align:
        return [(direction, 1.0) for direction in directions]
    flat = [part for of_place in parts for part in of_place]
    norms = squared_norms(planned, [part.matrix for part in flat], [part.factor for part in flat], directions)
    return [(x, second_moment.alignment(*pair)) for x, pair in zip(directions, norms, strict=True)]


def normuon(planned: SharedParameters, parts: Sequence[Part]) -> list[Directed]:
    """NorMuon, with one reduction for two kinds of matrices.

    Where the short dimension is whole on every rank, this one has its means, and ``||O||`` and ``||U||`` are left to
    sum over the ranks. Where it is cut, the means are; these are then of the whole long dimension, so the norms follow
    from them.
    """
    crossing = [part for part in parts if _means_cross(part.matrix)]
    here = [part for part in parts if not _means_cross(part.matrix)]
    means = planned.statistics([_means(part) for part in here])  # exchanges nothing
    directions = {part: _times_steps(part, _steps(part, found)) for part, found in zip(here, means, strict=True)}
    norms = [norm(part.matrix, x) for part in here for x in (part.factor, directions[part])]
    reduced = planned.statistics([*norms, *map(_means, crossing)])
    found = iter(reduced)
    ratios = {
        part: second_moment.alignment(_there(next(found).squared_norm), _there(next(found).squared_norm))
        for part in here
    }
    for part, statistics in zip(crossing, found, strict=True):
        steps = _steps(part, statistics)
        squares = _of_long(part, statistics).double()  # times the short dimension, which the ratio does not see
        directions[part] = _times_steps(part, steps)
        ratios[part] = second_moment.alignment(squares.sum(), (squares * steps.double().square()).sum())
    return [(directions[part], ratios[part]) for part in parts]


def namo(parts: Sequence[Part], norms: Sequence[tuple[Tensor, ...]]) -> list[Directed]:
    """NAMO, where ``norms`` are those of gradient and momentum of each matrix, squared."""
    return [
        (
            part.factor,
            second_moment.namo_ratio(gradient, update, part.moment, part.beta2, part.eps, part.accepted),
        )
        for part, (gradient, update) in zip(parts, norms, strict=True)
    ]


def norm(matrix: Matrix, x: Tensor) -> Wanted:
    """The squared norm of a matrix of which ``x`` is this rank's piece."""
    return Wanted(matrix=matrix, x=x, squared_norm=True)


def _means(part: Part) -> Wanted:
    """The means of squares along the short dimension."""
    rows_are_long = tall(part.matrix.shape)
    return Wanted(
        matrix=part.matrix,
        x=part.factor,
        row_means=rows_are_long,
        column_means=not rows_are_long,
        of_squares=True,
    )


def _means_cross(matrix: Matrix) -> bool:
    """Whether the short dimension is cut; then the long one is not, since a matrix is cut along one at most."""
    short = 1 if tall(matrix.shape) else 0
    return any(piece.shape[1 - short] and piece.shape[short] != matrix.shape[short] for piece in matrix.pieces)


def _of_long(part: Part, statistics: Statistics) -> Tensor:
    return _there(statistics.row_means if tall(part.matrix.shape) else statistics.column_means)


def _steps(part: Part, statistics: Statistics) -> Tensor:
    means = _of_long(part, statistics)
    return second_moment.normuon_steps(means, part.moment, part.beta2, part.eps, part.accepted)


def _times_steps(part: Part, steps: Tensor) -> Tensor:
    return part.factor.float() * (steps[:, None] if tall(part.matrix.shape) else steps)


def _there(x: Tensor | None) -> Tensor:
    assert x is not None  # it was asked for
    return x
