"""Statistics of global matrices from shards, in one reduction for many matrices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.collectives import Pending, all_reduce
from megatron_eopt.parallel.records import Matrix


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A matrix, and which of its statistics are wanted: the same on every rank of its group.

    Attributes:
        matrix: where its shards lie.
        x: this rank's shard, (rows x cols), of any floating dtype; may be empty.
        row_means: the mean of each row.
        column_means: the mean of each column.
        of_squares: take these means of the squares of the entries.
        squared_norm: the sum of the squares of all entries.
        inner: this rank's shard of another matrix that lies as this one does, whose inner product with it is wanted.
    """

    matrix: Matrix
    x: Tensor
    row_means: bool = False
    column_means: bool = False
    of_squares: bool = False
    squared_norm: bool = False
    inner: Tensor | None = None


@dataclass(frozen=True)
class Statistics:
    """Statistics of one global matrix; None where they were not asked for.

    Attributes:
        row_means: (rows,) of this rank's rows, in fp32; 0 where a row has no entries.
        column_means: (cols,) of this rank's columns, likewise.
        squared_norm: (), in fp64.
        inner_product: the sum of the products of entries in the same places; (), in fp64.
    """

    row_means: Tensor | None
    column_means: Tensor | None
    squared_norm: Tensor | None
    inner_product: Tensor | None


def known(statistic: Tensor | None) -> Tensor:
    """A statistic that was asked for."""
    assert statistic is not None
    return statistic


def reduce_statistics(wanted: Sequence[Wanted], group: ProcessGroup | None) -> Pending[list[Statistics]]:
    """Start what several matrices of one group need: at most one all-reduce, in fp64, of partial sums.

    Only sums along a dimension that is cut cross; where there is none, nothing does. Sums are taken in fp64, so there
    is no norm whose square would vanish or overflow.

    Args:
        wanted: the matrices; may be of different shapes.
        group: the ranks that hold the shards; None for whole matrices.

    Raises:
        ValueError: if shards of a matrix overlap, but are not all the whole of it, and for a missing group.
    """
    rank = 0 if group is None else group.rank()
    tables = [_Sums(one, rank) for one in wanted]
    crossing = [part for sums in tables for part in sums.crossing]
    if not crossing:
        return Pending(None, lambda: [sums.statistics([]) for sums in tables])
    if group is None:
        raise ValueError("statistics of matrices that are cut need the group of the ranks that hold the shards")
    pending = all_reduce(torch.cat(crossing), group)

    def finish() -> list[Statistics]:
        parts = iter(pending.wait().split([part.numel() for part in crossing]))
        return [sums.statistics([next(parts) for _ in sums.crossing]) for sums in tables]

    return Pending(None, finish)


class _Sums:
    """This rank's partial sums of one matrix, and how they become statistics."""

    def __init__(self, wanted: Wanted, rank: int) -> None:
        self._wanted = wanted
        (rows, cols), rectangles = wanted.matrix.shape, wanted.matrix.rectangles
        self._rectangle = rectangles[rank]
        replicated = all(rectangle.shape == (rows, cols) for rectangle in rectangles)
        if not replicated and sum(rectangle.numel for rectangle in rectangles) != rows * cols:
            raise ValueError(f"the shards of {wanted.matrix.name} are not {rows} x {cols} entries: {rectangles}")
        shapes = [rectangle.shape for rectangle in rectangles]
        self._cross = {
            "rows": any(of_rows and of_cols != cols for of_rows, of_cols in shapes),
            "cols": any(of_cols and of_rows != rows for of_rows, of_cols in shapes),
            "norm": not replicated,
            "inner": not replicated,
        }
        self._local = self._sums()
        self.crossing = [self._spread(name, sums) for name, sums in self._local.items() if self._cross[name]]

    def _sums(self) -> dict[str, Tensor]:
        wanted, sums = self._wanted, {}
        for name, dim, asked in (("rows", 1, wanted.row_means), ("cols", 0, wanted.column_means)):
            if asked and wanted.of_squares:
                sums[name] = torch.linalg.vector_norm(wanted.x, dim=dim, dtype=torch.float64).square()
            elif asked:
                sums[name] = wanted.x.sum(dim, dtype=torch.float64)
        if wanted.squared_norm:
            sums["norm"] = torch.linalg.vector_norm(wanted.x, dtype=torch.float64).square()[None]
        if wanted.inner is not None:
            sums["inner"] = (wanted.x.double() * wanted.inner).sum()[None]
        return sums

    def _own(self, name: str) -> slice:
        rectangle = self._rectangle
        return {"rows": slice(rectangle.top, rectangle.bottom), "cols": slice(rectangle.left, rectangle.right)}.get(
            name, slice(None)
        )

    def _spread(self, name: str, sums: Tensor) -> Tensor:
        """The sums in their places among those of the global matrix."""
        rows, cols = self._wanted.matrix.shape
        everything = sums.new_zeros({"rows": rows, "cols": cols}.get(name, 1))
        everything[self._own(name)] = sums
        return everything

    def statistics(self, reduced: list[Tensor]) -> Statistics:
        """The statistics, where ``reduced`` is what became of :attr:`crossing`."""
        crossed = iter(reduced)
        sums = {
            name: next(crossed)[self._own(name)] if self._cross[name] else local for name, local in self._local.items()
        }
        rows, cols = self._wanted.matrix.shape
        return Statistics(
            row_means=(sums["rows"] / max(cols, 1)).float() if "rows" in sums else None,
            column_means=(sums["cols"] / max(rows, 1)).float() if "cols" in sums else None,
            squared_norm=sums["norm"][0] if "norm" in sums else None,
            inner_product=sums["inner"][0] if "inner" in sums else None,
        )
