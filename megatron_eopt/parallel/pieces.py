"""Which rectangle of a matrix each rank holds: pure Python, without tensors and process groups."""

from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, int]


@dataclass(frozen=True, order=True)
class Piece:
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


def whole(shape: Shape) -> Piece:
    """The piece of a rank that holds everything."""
    return Piece(0, shape[0], 0, shape[1])


def cut(shape: Shape, dim: int, ranks: int) -> tuple[Piece, ...]:
    """Pieces of equal size along ``dim``, as tensor parallelism cuts.

    Raises:
        ValueError: if the dimension is no multiple of the number of ranks.
    """
    if shape[dim] % ranks:
        raise ValueError(f"dimension {dim} of a matrix {shape} cannot be cut into {ranks} equal parts")
    size = shape[dim] // ranks
    return cut_at(shape, dim, [rank * size for rank in range(ranks + 1)])


def cut_at(shape: Shape, dim: int, edges: list[int]) -> tuple[Piece, ...]:
    """Pieces between consecutive ``edges`` along ``dim``; equal edges make an empty piece."""
    rows, cols = shape
    if dim == 0:
        return tuple(Piece(start, end, 0, cols) for start, end in pairwise(edges))
    return tuple(Piece(0, rows, start, end) for start, end in pairwise(edges))


def cut_twice(
    held: Shape, dim: int, ranks: int, again: int, padding: int = 0
) -> tuple[Shape, tuple[tuple[Piece, ...], ...]]:
    """A matrix that is cut along ``dim``, and whose shards are each cut along the rows a second time.

    Args:
        held: rows, with padding, and columns that every rank has.
        dim: of the first cut.
        ranks: over so many, 1 for a matrix that is cut along the rows alone.
        again: ranks of the second cut.
        padding: rows behind those of each shard of the first cut, which fill up the last ranks of the second.

    Returns:
        The shape of the matrix without padding, and the pieces by the rank in the first cut and in the second. A piece
        has fewer rows than ``held`` where padding follows, perhaps none.

    Raises:
        ValueError: for more padding than there are rows.
    """
    rows, cols = held
    of_shard = rows * again - padding
    if padding < 0 or of_shard < 0:
        raise ValueError(f"padding of {again} shards of {rows} rows is from 0 to {rows * again} rows, got {padding}")
    shape = (of_shard * ranks, cols) if dim == 0 else (of_shard, cols * ranks)
    return shape, tuple(_cut_rows(shard, rows, again) for shard in cut(shape, dim, ranks))


def _cut_rows(piece: Piece, rows: int, ranks: int) -> tuple[Piece, ...]:
    """Pieces of a piece, of so many rows each but for the last ones, which what is left of it does not fill."""
    edges = [min(piece.top + rank * rows, piece.bottom) for rank in range(ranks + 1)]
    return tuple(Piece(top, bottom, piece.left, piece.right) for top, bottom in pairwise(edges))


def cut_dimension(shape: Shape, pieces: tuple[Piece, ...]) -> int | None:
    """The one dimension along which the pieces tile the matrix in the order of the ranks.

    None where every rank holds everything, and where both dimensions are cut or the order is another.
    """
    for dim in (0, 1):
        if shape[dim] == 0:
            continue
        starts = [(piece.top, piece.left)[dim] for piece in pieces]
        if pieces == cut_at(shape, dim, [*starts, shape[dim]]) and starts[0] == 0 and len(pieces) > 1:
            return dim
    return None
