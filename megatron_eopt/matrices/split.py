"""Which rows of a parameter make which logical matrix.

A :class:`Split` declares it; its :class:`Pattern` has all rows, :class:`LocalRows` those of one rank.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Order = Literal["interleaved", "per_shard", "concatenated"]
"""The order of the rows in the global parameter, the shards of all ranks one behind another:

- ``interleaved``: groups, each with its rows of every part; a shard may end within a group. Fused queries, keys and
  values are ``(groups, q + k + v, hidden)`` flattened.
- ``per_shard``: each shard has an equal share of every part; ``concatenated`` where the rows are not cut.
- ``concatenated``: one part behind another, wherever the parameter is cut.
"""


@dataclass(frozen=True)
class Part:
    """Rows of a fused parameter that belong together."""

    name: str  # of the logical matrix
    rows: int | None = None  # in a group if ``interleaved``, else in all; None: an equal share of what is left
    each: int | None = None  # rows of each matrix (a head) in it: ``name 0``, ``name 1`` and so on
    inside: tuple[tuple[str, int], ...] = ()  # names and rows of the matrices concatenated in it

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", tuple((name, rows) for name, rows in self.inside))


@dataclass(frozen=True)
class Split:
    """The logical matrices of a parameter, by its rows.

    Raises ``ValueError`` for an unknown order, equal names, numbers below 1, and parts that do not go with the order.
    """

    parts: tuple[Part, ...] = ()  # in the order of the rows; none for one matrix
    order: Order = "interleaved"
    stacked: int | None = None  # matrices in a three-dimensional parameter, each of which is split
    transposed: bool = False  # the parameter is (in, out): columns are split

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if self.order not in get_args(Order):
            raise ValueError(f"unknown order {self.order!r} of rows: expected one of {', '.join(get_args(Order))}")
        if self.transposed and self.stacked is not None:
            raise ValueError("a stack of matrices cannot be declared as transposed: keep them apart")
        names = [name for part in self.parts for name in ([inner for inner, _ in part.inside] or [part.name])]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two logical matrices of one parameter are called {twice[0]!r}")
        counts: list[tuple[str, int | None]] = [("stacked", self.stacked)]
        for part in self.parts:
            counts += [(f"rows of {part.name}", part.rows), (f"rows of each {part.name}", part.each)]
            counts += [(f"rows of {name}", rows) for name, rows in part.inside]
        for what, number in counts:
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number <= 0):
                raise ValueError(f"{what}: expected a positive integer, got {number!r}")
        for part in self.parts:
            name, rows, each = part.name, part.rows, part.each
            if each is not None and part.inside:
                raise ValueError(f"{name} is cut into equal matrices (each) or into named ones (inside), not into both")
            if self.order == "interleaved" and (rows is None or part.inside):
                raise ValueError(f"interleaved rows of {name} need their number in one group, and no matrices inside")
            if self.order == "interleaved" and rows is not None and each is not None and rows % each:
                raise ValueError(f"{rows} rows of {name} in one group are no multiple of the {each} of each")

    @property
    def is_whole(self) -> bool:
        """Whether the parameter is one matrix."""
        return not self.parts and self.stacked is None and not self.transposed

    def names(self, rows: int) -> list[str]:
        """Names of the logical matrices; ``[""]`` for a whole parameter."""
        names = [block.name for block in self.pattern(rows).blocks]
        if self.stacked is None:
            return names
        return [f"expert {layer} {name}".rstrip() for layer in range(self.stacked) for name in names]

    # a model has many equal parameters
    @lru_cache(maxsize=1024)  # noqa: B019
    def pattern(self, rows: int, shards: int = 1) -> "Pattern":
        """The pattern of ``rows``; ``ValueError`` if they do not fit."""
        if not self.parts:
            return Pattern((rows,), (Block("", rows),), ((0, rows),))
        repeats, sizes = self._repeats(rows, shards)
        blocks: list[Block] = []
        starts: list[tuple[int, int, Run]] = []  # with its repeat and its part
        for number, (part, size) in enumerate(zip(self.parts, sizes, strict=True)):
            part_blocks = _blocks(part, repeats * size)
            edges = list(accumulate((block.rows for block in part_blocks), initial=0))
            for start, end in pairwise(sorted({*edges, *range(0, repeats * size, size)})):
                starts.append((start // size, number, (len(blocks) + bisect_right(edges, start) - 1, end - start)))
            blocks += part_blocks
        runs = (run for _, _, run in sorted(starts, key=lambda start: start[:2]))
        return Pattern(sizes, tuple(blocks), tuple(runs))

    @lru_cache(maxsize=1024)  # noqa: B019
    def local(self, rows: int, top: int, bottom: int, shards: int = 1, padding: int = 0) -> "LocalRows":
        """The rows of one rank: see :class:`LocalRows`."""
        return LocalRows(self.pattern(rows, shards), top, bottom, self, padding)

    def in_global_order(self) -> "Split":
        """The split of a global tensor, such as a DTensor's."""
        return replace(self, order="concatenated") if self.order == "per_shard" else self

    def _repeats(self, rows: int, shards: int) -> tuple[int, tuple[int, ...]]:
        """Number of repeats, and rows of each part in one."""
        sizes = [part.rows or 0 for part in self.parts]
        declared = sum(sizes)
        if self.order == "interleaved":
            if rows % declared or not rows:
                raise ValueError(
                    f"{rows} rows over all ranks are not a multiple of the {declared} of one query group {sizes} "
                    f"(or head): pass the rows of each part in one group, or turn the split off (QKV splitting, say)"
                )
            return rows // declared, tuple(sizes)
        shares, left = sizes.count(0), rows - declared
        if (left <= 0 or left % shares) if shares else left:
            listed = ", ".join(f"{part.name} {part.rows or 'the rest'}" for part in self.parts)
            raise ValueError(f"{rows} rows over all ranks are not those declared: {listed}")
        repeats = shards if self.order == "per_shard" else 1
        sizes = [size or left // shares for size in sizes]
        for part, size in zip(self.parts, sizes, strict=True):
            if size % repeats:
                raise ValueError(f"{part.name} has {size} rows, of which {repeats} shards cannot have equal parts")
        return repeats, tuple(size // repeats for size in sizes)


WHOLE = Split()
"""A parameter that is one matrix."""


def _blocks(part: Part, rows: int) -> list["Block"]:
    if part.each is not None:
        if rows % part.each:
            raise ValueError(f"{part.name} has {rows} rows, which are no multiple of the {part.each} of each matrix")
        return [Block(f"{part.name} {i}", part.each) for i in range(rows // part.each)]
    inside = part.inside or ((part.name, rows),)
    if sum(size for _, size in inside) != rows:
        listed = ", ".join(f"{name} {size}" for name, size in inside)
        raise ValueError(f"{part.name} has {rows} rows, which are not those of the matrices inside it: {listed}")
    return [Block(name, size) for name, size in inside]


Run = tuple[int, int]  # logical matrix, number of rows


class Block(NamedTuple):
    """A logical matrix; unnamed if it is the whole parameter."""

    name: str
    rows: int


@dataclass(frozen=True, eq=False)
class Pattern:
    """How the rows of one fused matrix make logical matrices."""

    sizes: tuple[int, ...]  # rows of each part in one repeat
    blocks: tuple[Block, ...]
    runs: tuple[Run, ...]  # of all ranks in their order; those of a matrix are in the order of its rows

    # every rank asks for the rows of all ranks, for every parameter
    @lru_cache(maxsize=4096)  # noqa: B019
    def held(self, top: int, bottom: int) -> tuple[tuple[int, int], ...]:
        """Each matrix's range of rows within the fused rows ``top:bottom``."""
        starts, ends = [0] * len(self.blocks), [0] * len(self.blocks)
        for edge, counts in ((top, starts), (bottom, ends)):
            for matrix, rows in self.between(0, edge):
                counts[matrix] += rows
        return tuple(zip(starts, ends, strict=True))

    def between(self, top: int, bottom: int) -> list[Run]:
        """The runs of the fused rows ``top:bottom``."""
        places, row = [], 0
        for matrix, rows in self.runs:
            inside = min(row + rows, bottom) - max(row, top)
            if inside > 0:
                places.append((matrix, inside))
            row += rows
        return places


class LocalRows:
    """One rank's rows of a fused parameter: split and merge.

    They are rows ``top:bottom`` (columns if transposed), then ``padding`` ones, which :meth:`merge` makes zero.

    Attributes:
        padding: rows behind the shards.
        transposed: whether columns are split.
        stacked: whether the parameter has three dimensions.
    """

    def __init__(self, pattern: Pattern, top: int, bottom: int, split: Split = WHOLE, padding: int = 0) -> None:
        runs, count = pattern.between(top, bottom), len(pattern.blocks)
        layers = range(split.stacked or 1)
        self._shape = (bottom - top,) if split.stacked is None else (split.stacked, bottom - top)
        self.padding, self.transposed, self.stacked = padding, split.transposed, split.stacked is not None
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
        """This rank's rows of each logical matrix, perhaps none.

        ``x`` is (rows x cols) or (stacked x rows x cols), else ``ValueError``. Consecutive rows are a view.
        """
        x = x.mT if self.transposed else x
        if self.padding:
            x = x.narrow(-2, 0, x.size(-2) - self.padding)
        return self._split(x)

    @cached_property
    def runs(self) -> list[list[tuple[int, int, int]]]:
        """Where the rows of each logical matrix lie, in order.

        Each run is a layer of the stack, its first row there (column if transposed), and how many follow.
        """
        of_matrices, rows = [], self._shape[-1]
        if len(self._rows) == 1 and not self.stacked:
            return [[(0, 0, rows)]]
        for numbers in self._split(torch.arange(prod(self._shape)).view(*self._shape, 1)):
            numbers = numbers.flatten()
            jumps = (numbers.diff() != 1) | (numbers[1:] % max(1, rows) == 0)
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), jumps.nonzero().flatten() + 1])[: numbers.numel()]
            counts = torch.cat([starts, torch.tensor([numbers.numel()])]).diff()
            pairs = zip(numbers[starts].tolist(), counts.tolist(), strict=False)
            of_matrices.append([(*divmod(number, rows), count) for number, count in pairs])
        return of_matrices

    def _split(self, x: Tensor) -> list[Tensor]:
        if len(self._rows) == 1 and len(self._shape) == 1:
            return [x]
        if tuple(x.shape[:-1]) != self._shape:
            raise ValueError(f"a tensor of shape {tuple(x.shape)} is split, whose rows have to be {self._shape}")
        flat, cols = x.flatten(0, -2), x.size(-1)
        pieces: list[list[Tensor]] = [[] for _ in self._rows]
        for section, (repeats, runs) in zip(flat.split(self._of_section), self._sections, strict=True):
            lengths = [rows for _, rows in runs]
            if repeats == 1:
                for (matrix, _), rectangle in zip(runs, section.split(lengths), strict=True):
                    pieces[matrix].append(rectangle)
            else:
                several = section.view(repeats, sum(lengths), cols)
                for (matrix, rows), rectangle in zip(runs, several.split(lengths, 1), strict=True):
                    pieces[matrix].append(rectangle.reshape(repeats * rows, cols))
        return [torch.cat(some) if len(some) > 1 else (some or [flat[:0]])[0] for some in pieces]

    def merge(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`; ``ValueError`` for other rows."""
        merged = self._merged(matrices)
        merged = merged.mT.contiguous() if self.transposed else merged
        return torch.nn.functional.pad(merged, (0, 0, 0, self.padding)) if self.padding else merged

    def _merged(self, matrices: Sequence[Tensor]) -> Tensor:
        if len(self._rows) == 1:
            return matrices[0] if len(self._shape) == 1 else matrices[0][None]
        rows = [matrix.size(0) for matrix in matrices]
        if rows != self._rows:
            raise ValueError(f"{self._shape} rows are merged of matrices of {self._rows} rows, got {rows}")
        pairs = zip(matrices, self._of_matrix, strict=True)
        rectangles = [iter(matrix.split(of) if len(of) > 1 else (matrix,)) for matrix, of in pairs]
        sections = []
        for repeats, runs in self._sections:
            of_runs = [next(rectangles[matrix]) for matrix, _ in runs]
            if repeats == 1:
                sections += of_runs
            else:
                sections.append(torch.cat([matrix.unflatten(0, (repeats, -1)) for matrix in of_runs], 1).flatten(0, 1))
        flat = torch.cat(sections) if len(sections) > 1 else (sections or [matrices[0]])[0]
        return flat.view(*self._shape, flat.size(1))


def _sections(runs: list[Run], period: int) -> list[tuple[int, list[Run]]]:
    """Runs as sections: ``period`` runs repeated, or any runs once."""
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
