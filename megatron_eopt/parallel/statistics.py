"""Statistics of global matrices, in one reduction for many."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import batched

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megatron_eopt.parallel.collectives import Pending, all_reduce
from megatron_eopt.parallel.records import Matrix, Rectangle, Shape

MOST_BYTES = 2**26  # of a copy in fp64, unless a single row takes more


@dataclass(frozen=True, kw_only=True)
class StatisticsRequest:
    """Statistics wanted of a matrix, equal on all its ranks.

    The shard ``x`` may be empty. For the squared norm alone it may also be the norms of its rows, or of its columns.
    """

    matrix: Matrix
    x: Tensor  # (rows x cols), of any floating dtype
    row_squares: bool = False  # the mean of the squares of each row
    column_squares: bool = False
    squared_norm: bool = False  # the sum of the squares of all entries
    inner: Tensor | None = None  # the shard of another matrix that lies alike, for the sum of products of entries


Statistics = dict[str, Tensor]
"""Of one global matrix, by name: ``row_squares`` (rows,) and ``column_squares`` (cols,) of this rank's in fp32, 0
without entries; ``squared_norm`` and ``inner_product`` as numbers in fp64."""


def norms_of(statistics: Sequence[Statistics]) -> Tensor:
    """The squared norms of several matrices, (n,)."""
    return torch.stack([of_matrix["squared_norm"] for of_matrix in statistics]) if statistics else torch.empty(0)


# statistic, whether it is summed over ranks, its matrices; this rank's sums (matrices, sums), their first index and
# number in each global matrix; the entries of a mean
_Sums = tuple[str, bool, list[int], Tensor, int, int, int | None]


def reduce_statistics(wanted: Sequence[StatisticsRequest], group: ProcessGroup | None) -> Pending[list[Statistics]]:
    """Start statistics of a group's matrices: at most one all-reduce.

    Only sums along a cut dimension are exchanged, in fp64, where no norm's square vanishes or overflows. Whole matrices
    need no ``group``. Raises ``ValueError`` for a missing group, and for shards that overlap without being whole.
    """
    sums = _partial_sums(wanted, 0 if group is None else group.rank())
    crossing = [
        pad(x, (start, length - start - x.shape[1])).flatten() for _, crosses, _, x, start, length, _ in sums if crosses
    ]
    if crossing and group is None:
        raise ValueError("statistics of matrices that are cut need the group of the ranks that hold the shards")
    pending = all_reduce(torch.cat(crossing), group) if crossing and group is not None else None

    def finish() -> list[Statistics]:
        reduced = iter(() if pending is None else pending.wait().split([part.numel() for part in crossing]))
        statistics: list[Statistics] = [{} for _ in wanted]
        for name, crosses, indices, x, start, length, count in sums:
            x = next(reduced).view(-1, length).narrow(1, start, x.shape[1]) if crosses else x
            x = x[:, 0] if count is None else (x / max(count, 1)).float()
            for i, statistic in zip(indices, x.unbind(), strict=True):
                statistics[i][name] = statistic
        return statistics

    return Pending(None, finish)


def _partial_sums(wanted: Sequence[StatisticsRequest], rank: int) -> list[_Sums]:
    """Sums of each layout, in an order known to all."""
    layouts: dict[tuple[Shape, tuple[Rectangle, ...], torch.dtype], list[int]] = {}
    for i, one in enumerate(wanted):
        layouts.setdefault((one.matrix.shape, one.matrix.rectangles, one.x.dtype), []).append(i)
    sums: list[_Sums] = []
    xs = [one.x for one in wanted]
    for (shape, rectangles, _), indices in layouts.items():
        rectangle, shapes = rectangles[rank], [r.shape for r in rectangles]
        cut = any(other != shape for other in shapes)
        matrix = wanted[indices[0]].matrix
        if cut and sum(r.numel for r in rectangles[matrix.copy_of(0)]) != math.prod(shape):
            raise ValueError(f"the shards of {matrix.name} are not {shape[0]} x {shape[1]} entries: {rectangles}")
        counts = matrix.copy_of(rank).start == 0  # else another rank has the same
        for name, dim, start in (("row_squares", 0, rectangle.top), ("column_squares", 1, rectangle.left)):
            if some := [i for i in indices if getattr(wanted[i], name)]:
                along = [xs[i].mT if dim else xs[i] for i in some]
                x = _row_sums(lambda x: torch.linalg.vector_norm(x, dim=2, dtype=torch.float64).square(), along)
                crosses = any(other[dim] and other[1 - dim] != shape[1 - dim] for other in shapes)
                x = x if counts or not crosses else torch.zeros_like(x)
                sums.append((name, crosses, some, x, start, shape[dim], shape[1 - dim]))
        if some := [i for i in indices if wanted[i].squared_norm]:
            x = squared_norms([xs[i] for i in some])[:, None]
            sums.append(("squared_norm", cut, some, x if counts or not cut else torch.zeros_like(x), 0, 1, None))
        if inner := {i: y for i in indices if (y := wanted[i].inner) is not None}:
            some = list(inner)
            x = _row_sums(lambda x, y: x.double().mul_(y).sum(2), [xs[i] for i in some], list(inner.values()))
            x = x.sum(1, keepdim=True)
            sums.append(("inner_product", cut, some, x if counts or not cut else torch.zeros_like(x), 0, 1, None))
    return sums


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norms, (n,) in fp64; a GPU makes no copies."""
    pieces = [x.split(max(1, MOST_BYTES // 8 // max(1, x.shape[1:].numel()))) for x in tensors]
    of_pieces = iter(torch._foreach_norm([x for xs in pieces for x in xs], 2, torch.float64))
    norms = [torch.stack([next(of_pieces) for _ in xs]).norm() if len(xs) > 1 else next(of_pieces) for xs in pieces]
    return torch.stack(norms).square()


def _row_sums(sums: Callable[..., Tensor], *shards: Sequence[Tensor]) -> Tensor:
    """Sums over rows, (shards, rows), of shards of one shape."""
    rows, cols = shards[0][0].shape
    height = max(1, MOST_BYTES // 8 // max(1, cols))
    of_rows = []
    for some in batched(zip(*shards, strict=True), max(1, height // max(1, rows))):
        pieces = [zip(*(x.split(height) for x in xs), strict=True) for xs in zip(*some, strict=True)]
        of_rows.append(torch.cat([sums(*map(torch.stack, piece)) for piece in zip(*pieces, strict=True)], 1))
    return torch.cat(of_rows)
