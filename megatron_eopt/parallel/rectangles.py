"""Rectangles of a matrix: what each rank holds of it, in pure Python."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

Shape = tuple[int, int]


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
        if dim == 0:
            shards.append(Rectangle(start, end, 0, cols))
        else:
            shards.append(Rectangle(0, rows, start, end))
    return tuple(shards)


@lru_cache
def copies(shape: Shape, rectangles: tuple[Rectangle, ...]) -> int:
    """How often ranks hold a matrix; 1 without entries."""
    entries = max(1, shape[0] * shape[1])
    return max(1, sum(rectangle.numel for rectangle in rectangles) // entries)


@lru_cache
def shapes(rectangles: tuple[Rectangle, ...]) -> frozenset[Shape]:
    """Shapes of shards."""
    return frozenset(rectangle.shape for rectangle in rectangles)


@lru_cache
def held(rectangles: tuple[Rectangle, ...]) -> tuple[tuple[int, int], ...]:
    """Ranks that hold entries, ascending, each with their number."""
    return tuple((rank, rectangle.numel) for rank, rectangle in enumerate(rectangles) if rectangle.numel)


@lru_cache
def cut_dimension(shape: Shape, rectangles: tuple[Rectangle, ...]) -> int | None:
    """The only cut dimension, if ranks are in its order."""
    for dim in (0, 1):
        if shape[dim] == 0:
            continue
        starts = [rectangle.left if dim else rectangle.top for rectangle in rectangles]
        in_order = rectangles == cut_at(shape, dim, [*starts, shape[dim]])
        if in_order and starts[0] == 0 and len(rectangles) > 1:
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
