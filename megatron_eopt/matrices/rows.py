"""Rows of a fused parameter: which of them are whose, and the split and merge that follow.

Everything goes by runs: consecutive rows of one logical matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Run = tuple[int, int]
"""Which logical matrix, and how many of its rows."""


class Block(NamedTuple):
    """A logical matrix: its name, empty where the parameter is one matrix, and its rows on all ranks."""

    name: str
    rows: int


@dataclass(frozen=True, eq=False)
class Pattern:
    """How the rows of one fused matrix, those of all ranks in their order, make logical matrices."""

    sizes: tuple[int, ...]  # rows of each part in one repeat of the pattern
    blocks: tuple[Block, ...]
    runs: tuple[Run, ...]  # all rows in their order; those of one logical matrix follow one another in it

    # every rank asks for the rows of all ranks, for every parameter
    @lru_cache(maxsize=4096)  # noqa: B019
    def held(self, top: int, bottom: int) -> tuple[tuple[int, int], ...]:
        """Start and end of the rows of each logical matrix that lie in the fused rows from ``top`` to ``bottom``.

        The rows of a matrix in them are consecutive; a matrix with none has an empty range at its start or its end.
        """
        starts, ends = [0] * len(self.blocks), [0] * len(self.blocks)
        for edge, counts in ((top, starts), (bottom, ends)):
            for matrix, rows in self.between(0, edge):
                counts[matrix] += rows
        return tuple(zip(starts, ends, strict=True))

    def between(self, top: int, bottom: int) -> list[Run]:
        """The runs of the fused rows from ``top`` to ``bottom``."""
        found, row = [], 0
        for matrix, rows in self.runs:
            inside = min(row + rows, bottom) - max(row, top)
            if inside > 0:
                found.append((matrix, inside))
            row += rows
        return found


class LocalRows:
    """One rank's rows of a fused parameter, as its rows of each logical matrix; split and merge are exact inverses.

    Args:
        pattern: of the fused matrix.
        top: first row of this rank.
        bottom: the row after the last one.
        stacked: so many such matrices lie behind one another in a leading dimension; None for a parameter without.
        padding: rows of this rank that follow, and belong to no matrix: :meth:`split` leaves them out, and
            :meth:`merge` makes them zero.
    """

    def __init__(self, pattern: Pattern, top: int, bottom: int, stacked: int | None = None, padding: int = 0) -> None:
        runs, count = pattern.between(top, bottom), len(pattern.blocks)
        layers = range(stacked or 1)
        self._shape = (bottom - top,) if stacked is None else (stacked, bottom - top)
        self._padding = padding
        self._rows = [end - start for start, end in pattern.held(top, bottom)] * len(layers)
        self._sections = _sections(
            [(layer * count + matrix, rows) for layer in layers for matrix, rows in runs], len(pattern.sizes)
        )
        self._of_section = [repeats * sum(rows for _, rows in runs) for repeats, runs in self._sections]
        self._of_matrix: list[list[int]] = [[] for _ in self._rows]
        for repeats, runs in self._sections:
            for matrix, rows in runs:
                self._of_matrix[matrix].append(repeats * rows)

    def split(self, x: Tensor) -> list[Tensor]:
        """This rank's rows of each logical matrix, of its part (rows x cols) or (stacked x rows x cols) of a parameter.

        A matrix may have no rows here. It is a view where no rows have to be brought together, else one copy.

        Raises:
            ValueError: if ``x`` has another shape.
        """
        if self._padding:
            x = x.narrow(-2, 0, x.size(-2) - self._padding)
        if len(self._rows) == 1 and len(self._shape) == 1:
            return [x]
        if tuple(x.shape[:-1]) != self._shape:
            raise ValueError(f"a tensor of shape {tuple(x.shape)} is split, whose rows have to be {self._shape}")
        flat, cols = x.flatten(0, -2), x.size(-1)
        found: list[list[Tensor]] = [[] for _ in self._rows]
        for section, (repeats, runs) in zip(flat.split(self._of_section), self._sections, strict=True):
            lengths = [rows for _, rows in runs]
            if repeats == 1:
                for (matrix, _), rectangle in zip(runs, section.split(lengths), strict=True):
                    found[matrix].append(rectangle)
            else:
                several = section.view(repeats, sum(lengths), cols)
                for (matrix, rows), rectangle in zip(runs, several.split(lengths, 1), strict=True):
                    found[matrix].append(rectangle.reshape(repeats * rows, cols))
        return [torch.cat(rectangles) if len(rectangles) > 1 else (rectangles or [flat[:0]])[0] for rectangles in found]

    def merge(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`: one copy, and another one where there is padding or a repeat is cut.

        Raises:
            ValueError: if the matrices have other rows than those of :meth:`split`.
        """
        merged = self._merged(matrices)
        return torch.nn.functional.pad(merged, (0, 0, 0, self._padding)) if self._padding else merged

    def _merged(self, matrices: Sequence[Tensor]) -> Tensor:
        if len(self._rows) == 1:
            return matrices[0] if len(self._shape) == 1 else matrices[0][None]
        found = [matrix.size(0) for matrix in matrices]
        if found != self._rows:
            raise ValueError(f"{self._shape} rows are merged of matrices of {self._rows} rows, got {found}")
        rectangles = [
            iter(matrix.split(of) if len(of) > 1 else (matrix,))
            for matrix, of in zip(matrices, self._of_matrix, strict=True)
        ]
        sections = []
        for repeats, runs in self._sections:
            of_runs = [next(rectangles[matrix]) for matrix, _ in runs]
            if repeats == 1:
                sections += of_runs
            else:
                sections.append(torch.cat([each.unflatten(0, (repeats, -1)) for each in of_runs], 1).flatten(0, 1))
        flat = torch.cat(sections) if len(sections) > 1 else (sections or [matrices[0]])[0]
        return flat.view(*self._shape, flat.size(1))


def _sections(runs: list[Run], period: int) -> list[tuple[int, list[Run]]]:
    """Runs as sections, each of which repeats: ``period`` runs several times, or any number of them once."""
    sections: list[tuple[int, list[Run]]] = []
    start = 0
    while start < len(runs):
        group, repeats = runs[start : start + period], 1
        while runs[start + repeats * period : start + (repeats + 1) * period] == group:
            repeats += 1
        if repeats > 1:
            sections.append((repeats, group))
            start += repeats * period
            continue
        if not sections or sections[-1][0] > 1:
            sections.append((1, []))
        sections[-1][1].append(runs[start])
        start += 1
    return sections
