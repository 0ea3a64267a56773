"""The records of a plan: which rectangle of a matrix each rank holds, and how matrices are orthogonalized.

Pure Python: no tensors, no process groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

Shape = tuple[int, int]


@dataclass(frozen=True, order=True)
class Rectangle:
    """A rectangle of a matrix: rows from ``top`` to ``bottom``, columns from ``left`` to ``right``, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> Shape:
        """Rows and columns; one of them is 0 for a rank that holds nothing."""
        return self.bottom - self.top, self.right - self.left

    @property
    def numel(self) -> int:
        """Number of entries."""
        return (self.bottom - self.top) * (self.right - self.left)


def whole(shape: Shape) -> Rectangle:
    """The shard of a rank that holds everything."""
    return Rectangle(0, shape[0], 0, shape[1])


def cut(shape: Shape, dim: int, ranks: int) -> tuple[Rectangle, ...]:
    """Shards of equal size along ``dim``, as tensor parallelism cuts; a ValueError where they would not be equal."""
    if shape[dim] % ranks:
        raise ValueError(f"dimension {dim} of a matrix {shape} cannot be cut into {ranks} equal parts")
    size = shape[dim] // ranks
    return cut_at(shape, dim, [rank * size for rank in range(ranks + 1)])


def cut_at(shape: Shape, dim: int, edges: list[int]) -> tuple[Rectangle, ...]:
    """Shards between consecutive ``edges`` along ``dim``; equal edges make an empty shard."""
    cuts = pairwise(edges)
    return tuple(Rectangle(*each, 0, shape[1]) if dim == 0 else Rectangle(0, shape[0], *each) for each in cuts)


def cut_twice(
    held: Shape, dim: int, ranks: int, again: int, padding: int = 0
) -> tuple[Shape, tuple[tuple[Rectangle, ...], ...]]:
    """A matrix that is cut along ``dim`` over ``ranks``, and whose shards are each cut along the rows over ``again``.

    The result is the shape of the matrix without padding, and the shards by the rank in the first cut and in the
    second. A shard has fewer rows than ``held`` where padding follows, perhaps none.

    Args:
        held: rows, with padding, and columns that every rank has.
        dim: of the first cut.
        ranks: of the first cut, 1 for a matrix that is cut along the rows alone.
        again: of the second cut.
        padding: rows behind those of each shard of the first cut, which fill up the last ranks of the second.
    """
    rows, cols = held
    of_shard = rows * again - padding
    if padding < 0 or of_shard < 0:
        raise ValueError(f"padding of {again} shards of {rows} rows is from 0 to {rows * again} rows, got {padding}")
    shape = (of_shard * ranks, cols) if dim == 0 else (of_shard, cols * ranks)

    def cut_rows(shard: Rectangle) -> tuple[Rectangle, ...]:
        edges = [min(shard.top + rank * rows, shard.bottom) for rank in range(again + 1)]
        return tuple(Rectangle(*each, shard.left, shard.right) for each in pairwise(edges))

    return shape, tuple(map(cut_rows, cut(shape, dim, ranks)))


def copies(shape: Shape, rectangles: Sequence[Rectangle]) -> int:
    """How often ranks hold a matrix between them; once where it has no entries."""
    return sum(rectangle.numel for rectangle in rectangles) // (shape[0] * shape[1] or 1) or 1


def cut_dimension(shape: Shape, rectangles: tuple[Rectangle, ...]) -> int | None:
    """The one dimension along which the shards tile the matrix in the order of the ranks.

    None where every rank holds everything, and where both dimensions are cut or the order is another.
    """
    for dim in (0, 1):
        if shape[dim] == 0:
            continue
        starts = [(rectangle.top, rectangle.left)[dim] for rectangle in rectangles]
        if rectangles == cut_at(shape, dim, [*starts, shape[dim]]) and starts[0] == 0 and len(rectangles) > 1:
            return dim
    return None


TpMode = Literal["blockwise", "duplicated", "distributed", "owner", "gram", "auto"]
"""What the user asks for."""

Scheme = Literal["local", "blockwise", "duplicated", "distributed", "owner", "gram_split", "gram_replicated", "share"]
"""How a bucket is orthogonalized, where n is the short side and m the long one:

- ``local``: whole matrices, orthogonalized on the rank that holds them, as one stack.
- ``blockwise``: each shard as a matrix of its own: an approximation, nothing is exchanged.
- ``duplicated``: one all-gather of all shards of the bucket; every rank computes everything and keeps its shards.
- ``distributed``: the standard form; every step sums the Gram matrices of the bucket (stacked) over the ranks, in one
  all-reduce each, after one for the norms. The Gram matrix is that of the dimension that is not cut.
- ``owner``: one all-to-all brings each matrix together on one rank, which orthogonalizes it, one takes the shards back.
  Of a matrix that ranks hold in copies, the shards of one copy come, and those of all copies go.
- ``gram_replicated``: the Gram form on the shards, cut along the long side: one all-reduce of the stacked Gram matrices
  (n x n) at the start and after every restart; every rank computes all factors Q.
- ``gram_split``: the same, but each sum goes to one rank, which computes Q and hands it out: a reduce-scatter and an
  all-gather for as many matrices as the ranks can share evenly, a reduce and a broadcast for each of the rest. So as
  many bytes, more collectives, and the cubes of one matrix on a rank instead of those of all.
- ``share``: every rank holds the whole matrices (data parallelism); each orthogonalizes its share, and one all-gather
  hands the results out.
"""


@dataclass(frozen=True)
class Matrix:
    """One logical matrix, as every rank of its group sees it.

    Attributes:
        name: of the parameter, and of the matrix where the parameter has several (``...linear_qkv.weight[q]``).
        shape: of the global matrix.
        rectangles: that of each rank of the group, in the order of its ranks; one for a matrix of one rank.
        group: label of the process group: ``tp``, ``expt_tp``, ``dp`` and so on; a bucket has matrices of one group.
        itemsize: bytes of an entry where it is exchanged.
        iteration: name of the iteration that orthogonalizes it; a bucket has matrices of one iteration alone.
    """

    name: str
    shape: Shape
    rectangles: tuple[Rectangle, ...]
    group: str = "tp"
    itemsize: int = 4
    iteration: str = ""

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.rectangles)

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part only."""
        return any(rectangle.shape != self.shape for rectangle in self.rectangles)

    @cached_property
    def uneven(self) -> bool:
        """Whether one rank holds more entries than another."""
        return len({rectangle.numel for rectangle in self.rectangles}) > 1

    @cached_property
    def held(self) -> tuple[tuple[int, int], ...]:
        """The ranks that hold entries, ascending, each with their number: few ranks of many where rows lie in a row."""
        entries = (rectangle.numel for rectangle in self.rectangles)
        return tuple((rank, number) for rank, number in enumerate(entries) if number)

    @property
    def copies(self) -> int:
        """How often the ranks hold it between them."""
        return copies(self.shape, self.rectangles)

    def copy_of(self, rank: int) -> slice:
        """The ranks that hold one copy of the matrix between them, this one among them."""
        size = self.ranks // self.copies
        return slice(rank // size * size, rank // size * size + size)


@dataclass(frozen=True)
class Bucket:
    """Matrices of equal shape, group, item size and iteration, and how they are orthogonalized.

    Their shards are equal too, but under ``owner``, where each matrix may have uneven shards of its own.

    Attributes:
        matrices: indices into the matrices of the plan, ascending.
        compute_ranks: of each matrix, for ``owner``, ``gram_split`` and ``share``; empty otherwise.
        chunk: number of the chunk that it is a part of; those of one are worked on together.
    """

    matrices: tuple[int, ...]
    scheme: Scheme
    compute_ranks: tuple[int, ...] = ()
    chunk: int = 0


@dataclass(frozen=True)
class Plan:
    """The matrices in the order of the parameters, and buckets in that of execution; each matrix is in one of these."""

    matrices: tuple[Matrix, ...]
    buckets: tuple[Bucket, ...]


def in_rounds(compute_ranks: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """The matrices of which every rank has as many, one rank's after the other's, and the rest."""
    of_each: list[list[int]] = [[] for _ in range(ranks)]
    for index, rank in enumerate(compute_ranks):
        of_each[rank].append(index)
    rounds = min(map(len, of_each))
    full = [index for indices in of_each for index in indices[:rounds]]
    return full, sorted(index for indices in of_each for index in indices[rounds:])
