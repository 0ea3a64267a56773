"""Rows of a fused parameter as repeats of a pattern: which rows are whose, and split and merge by them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_eopt.matrices.qkv import merge_piece, part_rows, split_piece


@dataclass(frozen=True)
class Block:
    """A logical matrix: consecutive rows of one part of a pattern, the part's rows of all repeats taken together.

    Attributes:
        name: empty where the parameter is one matrix.
        part: which part of the pattern.
        start: first row, among those of the part.
        end: the row after the last one.
    """

    name: str
    part: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.end - self.start


@dataclass(frozen=True)
class Pattern:
    """How the rows of one fused matrix, those of all ranks in their order, make logical matrices.

    Attributes:
        sizes: rows of each part in one repeat.
        blocks: the logical matrices; those of a part are consecutive and tile it.
    """

    sizes: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def joined(self) -> bool:
        """Whether each part is one matrix."""
        return len(self.blocks) == len(self.sizes)

    def held(self, top: int, bottom: int) -> list[tuple[int, int]]:
        """Which rows of each logical matrix lie in the fused rows from ``top`` to ``bottom``, ends excluded.

        They are consecutive. A matrix that lies elsewhere altogether has an empty range at its start or its end.
        """
        if len(self.blocks) == 1:
            return [(top, bottom)]
        ranges = part_rows(top, bottom, self.sizes)
        return [
            (_clipped(ranges[block.part][0], block), _clipped(ranges[block.part][1], block)) for block in self.blocks
        ]

    def runs(self, top: int, bottom: int) -> list[tuple[int, int]]:
        """The fused rows from ``top`` to ``bottom`` in their order: (which logical matrix, how many rows) by turns."""
        before = [0, *accumulate(self.sizes)]
        of_part = [[i for i, block in enumerate(self.blocks) if block.part == part] for part in range(len(self.sizes))]
        starts = [[self.blocks[i].start for i in places] for places in of_part]
        runs, row = [], top
        while row < bottom:
            repeat, inside = divmod(row, before[-1])
            part = bisect_right(before, inside) - 1
            at = repeat * self.sizes[part] + inside - before[part]
            place = of_part[part][bisect_right(starts[part], at) - 1]
            rows = min(bottom - row, before[part + 1] - inside, self.blocks[place].end - at)
            runs.append((place, rows))
            row += rows
        return runs


class LocalRows:
    """What one rank holds of a fused parameter, as its pieces of the logical matrices; split and merge are inverses.

    Args:
        pattern: of the fused matrix.
        top: first of the rows that this rank holds, and
        bottom: the row after the last one.
        stacked: so many such matrices lie behind one another in a leading dimension; None for a parameter without.
        padding: rows of this rank that follow, and belong to no matrix: :meth:`split` leaves them out, and
            :meth:`merge` makes them zero.
    """

    def __init__(self, pattern: Pattern, top: int, bottom: int, stacked: int | None = None, padding: int = 0) -> None:
        self._pattern, self._top, self._bottom, self._stacked = pattern, top, bottom, stacked
        self._padding = padding
        self._rows = [end - start for start, end in pattern.held(top, bottom)] * (1 if stacked is None else stacked)
        self._runs: list[tuple[int, int]] = []
        if stacked is not None or not pattern.joined:
            count = len(pattern.blocks)
            runs = [(0, bottom - top)] if count == 1 else pattern.runs(top, bottom)
            self._runs = [(layer * count + place, rows) for layer in range(stacked or 1) for place, rows in runs]

    def split(self, x: Tensor) -> list[Tensor]:
        """This rank's pieces of the logical matrices, from its part of the parameter.

        Args:
            x: (rows x cols), or (stacked x rows x cols).

        Returns:
            One piece (its rows x cols) for each matrix, some perhaps without rows; views where no rows have to be
            brought together, else one copy.

        Raises:
            ValueError: if ``x`` has another shape.
        """
        if self._padding:
            x = x.narrow(-2, 0, x.size(-2) - self._padding)
        if len(self._rows) == 1 and self._stacked is None:
            return [x]
        if tuple(x.shape[:-1]) != self._leading:
            raise ValueError(f"a tensor of shape {tuple(x.shape)} is split, whose rows have to be {self._leading}")
        if not self._runs:
            return split_piece(x, self._top, self._pattern.sizes)
        flat = x.reshape(-1, x.size(-1))
        found: list[list[Tensor]] = [[] for _ in self._rows]
        for (place, _), run in zip(self._runs, flat.split([rows for _, rows in self._runs]), strict=True):
            found[place].append(run)
        return [torch.cat(runs) if len(runs) > 1 else (runs or [flat[:0]])[0] for runs in found]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`, with at most one copy, and another one where there is padding.

        Raises:
            ValueError: if the pieces are others than those of :meth:`split`.
        """
        merged = self._merged(parts)
        return torch.nn.functional.pad(merged, (0, 0, 0, self._padding)) if self._padding else merged

    def _merged(self, parts: Sequence[Tensor]) -> Tensor:
        if [part.size(0) for part in parts] != self._rows and len(self._rows) > 1:
            raise ValueError(
                f"rows {self._top} to {self._bottom} are pieces of {self._rows} rows, got pieces of "
                f"{[part.size(0) for part in parts]}"
            )
        if len(self._rows) == 1:
            return parts[0] if self._stacked is None else parts[0][None]
        if not self._runs:
            return merge_piece(parts, self._top, self._bottom - self._top, self._pattern.sizes)
        lengths: list[list[int]] = [[] for _ in self._rows]
        for place, rows in self._runs:
            lengths[place].append(rows)
        runs = [iter(part.split(of_part)) for part, of_part in zip(parts, lengths, strict=True)]
        return torch.cat([next(runs[place]) for place, _ in self._runs]).view(*self._leading, parts[0].size(1))

    @property
    def _leading(self) -> tuple[int, ...]:
        rows = self._bottom - self._top
        return (rows,) if self._stacked is None else (self._stacked, rows)


def _clipped(edge: int, block: Block) -> int:
    """Where a row of the part lies in the block."""
    return min(max(edge - block.start, 0), block.rows)
