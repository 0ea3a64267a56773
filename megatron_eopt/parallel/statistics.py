"""Statistics of global matrices from shards, in one reduction for many matrices."""

import math
from collections.abc import Iterator, Sequence
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
        column_means: (cols,) of this rank's columns, in fp32; 0 where a column has no entries.
        squared_norm: (), in fp64.
        inner_product: the sum of the products of entries in the same places; (), in fp64.
    """

    row_means: Tensor | None = None
    column_means: Tensor | None = None
    squared_norm: Tensor | None = None
    inner_product: Tensor | None = None


def known(statistic: Tensor | None) -> Tensor:
    """A statistic that was wanted."""
    assert statistic is not None
    return statistic


def reduce_statistics(wanted: Sequence[Wanted], group: ProcessGroup | None) -> Pending[list[Statistics]]:
    """Start what several matrices of one group need: at most one all-reduce, in fp64, of partial sums.

    Only sums along a dimension that is cut cross; where there is none, nothing does. Sums are taken in fp64, so there
    is no norm whose square would vanish or overflow. The matrices may differ in shape; whole ones need no ``group``.

    Raises:
        ValueError: if shards of a matrix overlap, but are not all the whole of it, and for a missing group.
    """
    rank = 0 if group is None else group.rank()
    sums = [_partial_sums(one, rank) for one in wanted]
    crossing = [each.spread() for of_matrix in sums for each in of_matrix.values() if each.crosses]
    if crossing and group is None:
        raise ValueError("statistics of matrices that are cut need the group of the ranks that hold the shards")
    pending = all_reduce(torch.cat(crossing), group) if crossing and group is not None else None

    def finish() -> list[Statistics]:
        reduced = iter(() if pending is None else pending.wait().split([part.numel() for part in crossing]))
        return [Statistics(**{name: each.result(reduced) for name, each in of_matrix.items()}) for of_matrix in sums]

    return Pending(None, finish)


@dataclass(frozen=True)
class _Sums:
    """This rank's partial sums: those at ``own`` of ``length`` ones of the global matrix.

    They are reduced over the ranks where they cross. A mean is a sum over ``count`` entries.
    """

    x: Tensor
    crosses: bool
    own: slice = slice(None)
    length: int = 1
    count: int | None = None

    def spread(self) -> Tensor:
        """The sums in their places among those of the global matrix."""
        everything = self.x.new_zeros(self.length)
        everything[self.own] = self.x
        return everything

    def result(self, reduced: Iterator[Tensor]) -> Tensor:
        """The statistic; sums that cross are the next of those that were reduced."""
        x = next(reduced)[self.own] if self.crosses else self.x
        return x[0] if self.count is None else (x / max(self.count, 1)).float()


def _partial_sums(wanted: Wanted, rank: int) -> dict[str, _Sums]:
    """By the name of the statistic."""
    x, shape, rectangles = wanted.x, wanted.matrix.shape, wanted.matrix.rectangles
    own, shapes = rectangles[rank], [rectangle.shape for rectangle in rectangles]
    cut = any(each != shape for each in shapes)
    if cut and sum(rectangle.numel for rectangle in rectangles) != math.prod(shape):
        raise ValueError(f"the shards of {wanted.matrix.name} are not {shape[0]} x {shape[1]} entries: {rectangles}")
    sums = {}
    sides = [("row_means", 1, slice(own.top, own.bottom)), ("column_means", 0, slice(own.left, own.right))]
    for name, dim, at in sides:
        if getattr(wanted, name):
            if wanted.of_squares:
                along = torch.linalg.vector_norm(x, dim=dim, dtype=torch.float64).square()
            else:
                along = x.sum(dim, dtype=torch.float64)
            crosses = any(each[1 - dim] and each[dim] != shape[dim] for each in shapes)
            sums[name] = _Sums(along, crosses, at, shape[1 - dim], shape[dim])
    if wanted.squared_norm:
        sums["squared_norm"] = _Sums(torch.linalg.vector_norm(x, dtype=torch.float64).square()[None], cut)
    if wanted.inner is not None:
        sums["inner_product"] = _Sums((x.double() * wanted.inner).sum()[None], cut)
    return sums
