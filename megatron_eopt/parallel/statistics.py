"""Statistics of global matrices, in one reduction for many."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megatron_eopt.orthogonalize.newton_schulz import REUSED_BYTES
from megatron_eopt.parallel.collectives import all_reduce
from megatron_eopt.parallel.plan_records import Matrix, grouped

MOST_WIDE_BYTES = 2**26  # of a copy in fp64, unless a single row takes more


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
    if not statistics:
        return torch.empty(0)
    return torch.stack([of_matrix["squared_norm"] for of_matrix in statistics])


def sum_over(tensors: Sequence[Tensor], labels: Sequence[str], groups: Mapping[str, ProcessGroup]) -> list[Tensor]:
    """Sums of tensors over groups; without a label they stay.

    There is one all-reduce for each group and dtype.
    """
    labelled = [i for i, label in enumerate(labels) if label]
    alike = grouped(labelled, lambda i: (labels[i], str(tensors[i].dtype)))
    pending = []
    for (label, _), indices in sorted(alike.items()):
        several = torch.cat([tensors[i].reshape(-1) for i in indices])
        pending.append((indices, all_reduce(several, groups[label])))
    summed = list(tensors)
    for indices, sums in pending:
        parts = sums.wait().split([tensors[i].numel() for i in indices])
        for i, part in zip(indices, parts, strict=True):
            summed[i] = part.view(tensors[i].shape)
    return summed


@dataclass(frozen=True)
class _Sums:
    """Sums of equal matrices, (matrices, sums), of which a statistic is made."""

    name: str
    indices: list[int]  # of the matrices
    x: Tensor
    label: str = ""  # of the group over which they are summed
    here: slice = slice(None)  # those of this rank's rows or columns
    entries: int | None = None  # of a row or column, over which they are means; None: numbers of matrices

    def statistics(self, x: Tensor) -> Tensor:
        """Of each matrix, from the sums over ranks."""
        if self.entries is None:
            return x[:, 0]
        return (x[:, self.here] / max(self.entries, 1)).float()


def _of_matrices(
    name: str,
    indices: list[int],
    x: Tensor,
    matrix: Matrix,
    rank: int,
) -> _Sums:
    """This rank's sums over whole shards, (matrices, 1)."""
    if not matrix.sharded:
        return _Sums(name, indices, x)
    return _Sums(name, indices, _of_first_copy(x, matrix, rank), matrix.group)


def _of_sides(
    name: str,
    indices: list[int],
    x: Tensor,
    matrix: Matrix,
    rank: int,
    dim: int,
) -> _Sums:
    """This rank's sums over its parts of rows (``dim`` 0) or columns."""
    entries = matrix.shape[1 - dim]
    if not any(shape[dim] and shape[1 - dim] != entries for shape in matrix.shapes):
        return _Sums(name, indices, x, entries=entries)
    shard = matrix.rectangles[rank]
    start = shard.left if dim else shard.top
    end = start + x.shape[1]
    on_all = pad(_of_first_copy(x, matrix, rank), (start, matrix.shape[dim] - end))
    return _Sums(name, indices, on_all, matrix.group, slice(start, end), entries)


def _of_first_copy(x: Tensor, matrix: Matrix, rank: int) -> Tensor:
    """Zeros where another rank has the same."""
    return torch.zeros_like(x) if matrix.copy_of(rank).start > 0 else x


def statistics_of(wanted: Sequence[StatisticsRequest], groups: Mapping[str, ProcessGroup]) -> list[Statistics]:
    """Statistics of global matrices, with at most one all-reduce for each group.

    Only sums along a cut dimension are exchanged, in fp64, where no norm's square vanishes or overflows.
    """

    def kind(i: int) -> tuple[object, ...]:
        matrix = wanted[i].matrix
        return matrix.group, matrix.shape, matrix.rectangles, wanted[i].x.dtype

    alike = grouped(range(len(wanted)), kind)
    sums = list[_Sums]()
    for indices in alike.values():
        matrix = wanted[indices[0]].matrix
        sums += _sums_of(wanted, indices, matrix, matrix.rank_in(groups))
    summed = sum_over([some.x for some in sums], [some.label for some in sums], groups)
    statistics: list[Statistics] = [{} for _ in wanted]
    for some, x in zip(sums, summed, strict=True):
        for i, statistic in zip(some.indices, some.statistics(x).unbind(), strict=True):
            statistics[i][some.name] = statistic
    return statistics


def _sums_of(
    wanted: Sequence[StatisticsRequest],
    indices: list[int],
    matrix: Matrix,
    rank: int,
) -> Iterator[_Sums]:
    """Sums of matrices that lie like ``matrix``."""
    some = [i for i in indices if wanted[i].row_squares]
    if some:
        x = _row_sums(_squares, [wanted[i].x for i in some])
        yield _of_sides("row_squares", some, x, matrix, rank, 0)
    some = [i for i in indices if wanted[i].column_squares]
    if some:
        x = _row_sums(_squares, [wanted[i].x.mT for i in some])
        yield _of_sides("column_squares", some, x, matrix, rank, 1)
    some = [i for i in indices if wanted[i].squared_norm]
    if some:
        x = squared_norms([wanted[i].x for i in some])
        yield _of_matrices("squared_norm", some, x[:, None], matrix, rank)
    others = dict[int, Tensor]()
    for i in indices:
        other = wanted[i].inner
        if other is not None:
            others[i] = other
    if others:
        x = _row_sums(_products, [wanted[i].x for i in others], list(others.values()))
        yield _of_matrices("inner_product", list(others), x.sum(1, keepdim=True), matrix, rank)


def _squares(x: Tensor) -> Tensor:
    if x.device.type == "cpu":  # which takes seven times as long for norms of columns
        return x.to(torch.float64, copy=True).square_().sum(2)
    return torch.linalg.vector_norm(x, dim=2, dtype=torch.float64).square()


def _products(x: Tensor, y: Tensor) -> Tensor:
    return x.to(torch.float64, copy=True).mul_(y).sum(2)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norms, (n,) in fp64; a GPU makes no copies."""
    pieces = [x.split(max(1, MOST_WIDE_BYTES // 8 // max(1, x.shape[1:].numel()))) for x in tensors]
    of_pieces = iter(torch._foreach_norm(list(chain(*pieces)), 2, torch.float64))
    norms = []
    for of_tensor in pieces:
        some = list(islice(of_pieces, len(of_tensor)))
        norms.append(torch.stack(some).norm() if len(some) > 1 else some[0])
    return torch.stack(norms).square()


def _row_sums(sums: Callable[..., Tensor], *shards: Sequence[Tensor]) -> Tensor:
    """Sums over rows, (shards, rows), of shards of one shape."""
    rows, cols = shards[0][0].shape
    most = MOST_WIDE_BYTES
    if shards[0][0].device.type == "cpu":
        most = min(most, REUSED_BYTES)
    height = max(1, most // 8 // max(1, cols))
    at_once = max(1, height // max(1, rows))
    of_shards = []
    for first in range(0, len(shards[0]), at_once):
        of_rows = []
        for top in range(0, max(1, rows), height):
            stacks = []
            for xs in shards:
                some = [x[top : top + height] for x in xs[first : first + at_once]]
                stacks.append(some[0][None] if len(some) == 1 else torch.stack(some))
            of_rows.append(sums(*stacks))
        of_shards.append(torch.cat(of_rows, 1))
    return torch.cat(of_shards)
