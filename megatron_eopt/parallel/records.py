"""The records of a plan, in pure Python."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

Shape = tuple[int, int]


def grouped[K, T](values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Values by their keys, each in the order in which it came."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


class Rectangle(NamedTuple):
    """Rows ``top:bottom`` and columns ``left:right`` of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> Shape:
        """Rows and columns; one is 0 for an empty shard."""
        return self.bottom - self.top, self.right - self.left

    @property
    def numel(self) -> int:
        """Number of entries."""
        return (self.bottom - self.top) * (self.right - self.left)


def whole(shape: Shape) -> Rectangle:
    """The shard of a rank that holds everything."""
    return Rectangle(0, shape[0], 0, shape[1])


def cut(shape: Shape, dim: int, ranks: int) -> tuple[Rectangle, ...]:
    """Equal shards along ``dim``; ``ValueError`` if they cannot be equal."""
    if shape[dim] % ranks:
        raise ValueError(f"dimension {dim} of a matrix {shape} cannot be cut into {ranks} equal parts")
    size = shape[dim] // ranks
    return cut_at(shape, dim, [rank * size for rank in range(ranks + 1)])


def cut_at(shape: Shape, dim: int, edges: list[int]) -> tuple[Rectangle, ...]:
    """Shards between ``edges`` along ``dim``; equal edges make empty ones."""
    rows, cols = shape
    shards = []
    for start, end in pairwise(edges):
        shards.append(Rectangle(start, end, 0, cols) if dim == 0 else Rectangle(0, rows, start, end))
    return tuple(shards)


def cut_twice(
    held: Shape,
    dim: int,
    ranks: int,
    again: int,
    padding: int = 0,
) -> tuple[Shape, tuple[tuple[Rectangle, ...], ...]]:
    """A matrix cut over ``ranks``, then by rows over ``again``.

    Returns its shape without padding, and the shards by the rank in each cut. They have the rows of ``held``, or fewer
    where ``padding``, which follows each shard of the first cut, fills up the last ranks of the second.
    """
    rows, cols = held
    of_shard = rows * again - padding
    if padding < 0 or of_shard < 0:
        raise ValueError(f"padding of {again} shards of {rows} rows is from 0 to {rows * again} rows, got {padding}")
    shape = (of_shard * ranks, cols) if dim == 0 else (of_shard, cols * ranks)
    grid = []
    for shard in cut(shape, dim, ranks):
        edges = [min(shard.top + rank * rows, shard.bottom) for rank in range(again + 1)]
        grid.append(tuple(Rectangle(top, bottom, shard.left, shard.right) for top, bottom in pairwise(edges)))
    return shape, tuple(grid)


@lru_cache
def copies(shape: Shape, rectangles: tuple[Rectangle, ...]) -> int:
    """How often ranks hold a matrix; 1 without entries."""
    return sum(rectangle.numel for rectangle in rectangles) // (shape[0] * shape[1] or 1) or 1


@lru_cache
def shapes(rectangles: tuple[Rectangle, ...]) -> frozenset[Shape]:
    """Shapes of shards."""
    return frozenset(rectangle.shape for rectangle in rectangles)


@lru_cache
def held(rectangles: tuple[Rectangle, ...]) -> tuple[tuple[int, int], ...]:
    """Ranks that hold entries, ascending, each with their number."""
    entries = (rectangle.numel for rectangle in rectangles)
    return tuple((rank, number) for rank, number in enumerate(entries) if number)


@lru_cache
def cut_dimension(shape: Shape, rectangles: tuple[Rectangle, ...]) -> int | None:
    """The only cut dimension, if ranks are in its order."""
    for dim in (0, 1):
        if shape[dim] == 0:
            continue
        starts = [(rectangle.top, rectangle.left)[dim] for rectangle in rectangles]
        if rectangles == cut_at(shape, dim, [*starts, shape[dim]]) and starts[0] == 0 and len(rectangles) > 1:
            return dim
    return None


class Strip(NamedTuple):
    """Ranks whose shards are equal and lie side by side."""

    ranks: int  # one after another
    dims: tuple[int, ...]  # of each matrix, along which its shards lie so
    rectangles: tuple[Rectangle, ...]  # of each matrix, all of these shards


@lru_cache
def strips(cuts: tuple[tuple[Rectangle, ...], ...]) -> tuple[Strip, ...]:
    """The strips of the ranks, in their order; ``cuts`` are the shards of matrices."""
    found: list[Strip] = []
    last: tuple[Rectangle, ...] = ()
    for shards in zip(*cuts, strict=True):
        sides = list(map(_beside, last, shards))
        dims = tuple(dim for dim in sides if dim is not None)
        if len(dims) == len(shards) and (found[-1].ranks == 1 or found[-1].dims == dims):
            together = []
            for a, b in zip(found[-1].rectangles, shards, strict=True):
                together.append(Rectangle(a.top, b.bottom, a.left, b.right) if b.numel else a)
            found[-1] = Strip(found[-1].ranks + 1, dims, tuple(together))
        else:
            found.append(Strip(1, (0,) * len(cuts), shards))
        last = shards
    return tuple(found)


def _beside(a: Rectangle, b: Rectangle) -> int | None:
    """The dimension along which ``b`` follows ``a`` and is as large."""
    if a.shape != b.shape:
        return None
    if not a.numel:
        return 0  # nothing lies anywhere
    if (a.bottom, a.left) == (b.top, b.left):
        return 0
    return 1 if (a.top, a.right) == (b.top, b.left) else None


TpMode = Literal["blockwise", "duplicated", "distributed", "owner", "gram", "auto"]  # what the user asks for

Scheme = Literal["local", "blockwise", "duplicated", "distributed", "owner", "gram_split", "gram_replicated", "share"]
"""How a bucket is orthogonalized:

- ``local``: whole matrices as one stack, on the rank that holds them.
- ``blockwise``: each shard as a matrix of its own, without exchange: an approximation.
- ``duplicated``: one all-gather of all shards; every rank computes everything and keeps its shards.
- ``distributed``: the standard form; every step sums the stacked Gram matrices, of the dimension that is not cut, in
  one all-reduce, after one for the norms.
- ``owner``: one all-to-all brings each matrix to one rank, which orthogonalizes it, another one takes the shards back.
  Of several copies of a matrix the shards of one come, and those of all go.
- ``gram_replicated``: the Gram form on shards cut along the long side: one all-reduce of the stacked Gram matrices at
  the start and after every restart; every rank computes all factors Q.
- ``gram_split``: the same, but each sum goes to one rank, which computes Q and hands it out: a reduce-scatter and an
  all-gather for full rounds of matrices, a reduce and a broadcast for each of the rest. As many bytes, more
  collectives, and the cubes of a rank's own matrices only.
- ``share``: every rank holds whole matrices (data parallelism), orthogonalizes its share, and one all-gather hands the
  results out.
"""


@dataclass(frozen=True)
class Matrix:
    """One logical matrix, as its group's ranks see it."""

    name: str  # of the parameter, and of the matrix if it has several (``...linear_qkv.weight[q]``)
    shape: Shape  # of the global matrix
    rectangles: tuple[Rectangle, ...]  # of each rank of the group, in order; one for a matrix of one rank
    group: str = "tp"  # label of the process group: ``tp``, ``expt_tp``, ``dp`` and so on
    itemsize: int = 4  # bytes of an entry where it is exchanged
    iteration: str = ""  # name of the iteration that orthogonalizes it

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.rectangles)

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part only."""
        return self.shapes != {self.shape}

    @cached_property
    def shapes(self) -> frozenset[Shape]:
        """Shapes of what ranks hold."""
        return shapes(self.rectangles)

    @cached_property
    def uneven(self) -> bool:
        """Whether one rank holds more entries than another."""
        return len({rows * cols for rows, cols in self.shapes}) > 1

    @cached_property
    def held(self) -> tuple[tuple[int, int], ...]:
        """Ranks that hold entries, ascending, each with their number."""
        return held(self.rectangles)

    @cached_property
    def copies(self) -> int:
        """How often the ranks hold it between them."""
        return copies(self.shape, self.rectangles)

    def rank_in(self, groups: Mapping[str, Any]) -> int:
        """This rank's index among its ranks; process groups are by label."""
        rank: int = groups[self.group].rank() if self.ranks > 1 else 0
        return rank

    def shard_in(self, groups: Mapping[str, Any]) -> Rectangle:
        """What this rank has of it."""
        return self.rectangles[self.rank_in(groups)]

    def copy_of(self, rank: int) -> slice:
        """The ranks that hold one copy, with this one."""
        size = self.ranks // self.copies
        return slice(rank // size * size, rank // size * size + size)


@dataclass(frozen=True)
class Bucket:
    """Matrices alike, but uneven shards under ``owner``, and their scheme."""

    matrices: tuple[int, ...]  # indices into the matrices of the plan, ascending
    scheme: Scheme
    compute_ranks: tuple[int, ...] = ()  # of each matrix, for ``owner``, ``gram_split`` and ``share``
    chunk: int = 0  # whose buckets are worked on together


@dataclass(frozen=True)
class Plan:
    """Matrices by parameter, and buckets in the order of execution."""

    matrices: tuple[Matrix, ...]
    buckets: tuple[Bucket, ...]

    def one_of(self, bucket: Bucket) -> Matrix:
        """One of a bucket's matrices."""
        return self.matrices[bucket.matrices[0]]


def in_rounds(compute_ranks: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """Matrices of full rounds, rank by rank, and the rest."""
    of_each: list[list[int]] = [[] for _ in range(ranks)]
    for index, rank in enumerate(compute_ranks):
        of_each[rank].append(index)
    rounds = min(map(len, of_each))
    full = [index for indices in of_each for index in indices[:rounds]]
    return full, sorted(index for indices in of_each for index in indices[rounds:])
