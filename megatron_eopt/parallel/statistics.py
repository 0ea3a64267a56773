"""Statistics of global matrices, in one reduction for many."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megatron_eopt.parallel.collectives import all_reduce
from megatron_eopt.parallel.records import Matrix

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


def sum_over(tensors: Sequence[Tensor], labels: Sequence[str], groups: Mapping[str, ProcessGroup]) -> list[Tensor]:
    """Sums of tensors over groups, by one all-reduce for each group and dtype; without a label they stay."""
    summed = list(tensors)
    kinds = sorted({(label, str(x.dtype)) for x, label in zip(tensors, labels, strict=True) if label})
    pending = []
    for kind in kinds:
        indices = [i for i, x in enumerate(tensors) if (labels[i], str(x.dtype)) == kind]
        several = torch.cat([tensors[i].reshape(-1) for i in indices])
        pending.append((indices, all_reduce(several, groups[kind[0]])))
    for indices, sums in pending:
        for i, part in zip(indices, sums.wait().split([tensors[i].numel() for i in indices]), strict=True):
            summed[i] = part.view(tensors[i].shape)
    return summed


def statistics_of(wanted: Sequence[StatisticsRequest], groups: Mapping[str, ProcessGroup]) -> list[Statistics]:
    """Statistics of global matrices, with at most one all-reduce for each group.

    Only sums along a cut dimension are exchanged, in fp64, where no norm's square vanishes or overflows.
    """
    sums: list[Tensor] = []  # of this rank, (matrices, sums), padded to those of whole matrices where exchanged
    labels: list[str] = []  # of the groups over which they are summed
    kinds: list[tuple[str, list[int], int, int, int | None]] = []

    def add(
        name: str,
        indices: list[int],
        own: Tensor,
        crosses: bool,
        start: int = 0,
        length: int = 1,
        entries: int | None = None,
    ) -> None:
        count = own.shape[1]
        if not crosses:
            start = 0
        else:
            if matrix.copy_of(rank).start > 0:  # another rank has the same
                own = torch.zeros_like(own)
            own = pad(own, (start, length - start - count))
        sums.append(own)
        labels.append(matrix.group if crosses else "")
        kinds.append((name, indices, start, count, entries))

    alike: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(wanted):
        alike.setdefault((one.matrix.group, one.matrix.shape, one.matrix.rectangles, one.x.dtype), []).append(i)
    for indices in alike.values():
        matrix = wanted[indices[0]].matrix
        rank = groups[matrix.group].rank() if matrix.ranks > 1 else 0
        rectangle = matrix.rectangles[rank]
        for dim, name, start in ((0, "row_squares", rectangle.top), (1, "column_squares", rectangle.left)):
            some = [i for i in indices if getattr(wanted[i], name)]
            if some:
                across = matrix.shape[1 - dim]
                crosses = any(shape[dim] and shape[1 - dim] != across for shape in matrix.shapes)
                own = _row_sums(_squares, [wanted[i].x.mT if dim else wanted[i].x for i in some])
                add(name, some, own, crosses, start, matrix.shape[dim], across)
        some = [i for i in indices if wanted[i].squared_norm]
        if some:
            add("squared_norm", some, squared_norms([wanted[i].x for i in some])[:, None], matrix.sharded)
        inner = {i: y for i in indices if (y := wanted[i].inner) is not None}
        if inner:
            own = _row_sums(_products, [wanted[i].x for i in inner], list(inner.values())).sum(1, keepdim=True)
            add("inner_product", list(inner), own, matrix.sharded)

    statistics: list[Statistics] = [{} for _ in wanted]
    for (name, indices, start, count, entries), x in zip(kinds, sum_over(sums, labels, groups), strict=True):
        x = x[:, 0] if entries is None else (x[:, start : start + count] / max(entries, 1)).float()
        for i, statistic in zip(indices, x.unbind(), strict=True):
            statistics[i][name] = statistic
    return statistics


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=2, dtype=torch.float64).square()


def _products(x: Tensor, y: Tensor) -> Tensor:
    return x.double().mul_(y).sum(2)


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
