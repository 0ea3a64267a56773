"""Which rows of a parameter make which logical matrix.

A :class:`Split` declares it; its :class:`Pattern` has all rows, :class:`LocalRows` those of one rank.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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


@dataclass(frozen=True)
class Split:
    """The logical matrices of a parameter, by its rows.

    Raises ``ValueError`` for an unknown order, numbers below 1, parts that do not go with the order, and a flattened
    stack.
    """

    parts: tuple[Part, ...] = ()  # in the order of the rows; none for one matrix
    order: Order = "interleaved"
    stacked: int | None = None  # matrices in a three-dimensional parameter, each of which is split
    transposed: bool = False  # the parameter is (in, out), of a stack each matrix: columns are split
    flattened: bool = False  # the parameter is read as the first dimension times the rest, as a convolution's

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if self.order not in get_args(Order):
            raise ValueError(f"unknown order {self.order!r} of rows: expected one of {', '.join(get_args(Order))}")
        counts = [("stacked", self.stacked)]
        for part in self.parts:
            counts.append((f"rows of {part.name}", part.rows))
            counts.append((f"rows of each {part.name}", part.each))
            if self.order == "interleaved" and (part.rows is None or part.inside or part.rows % (part.each or 1)):
                raise ValueError(
                    f"interleaved rows of {part.name} need their number in one group, which is a multiple of each, "
                    f"and no matrices inside"
                )
        for what, number in counts:
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{what}: expected a positive integer, got {number!r}")
        if self.flattened and self.stacked is not None:
            raise ValueError(f"a parameter is a stack of {self.stacked} matrices or flattened to one, not both")

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
        waiting: list[deque[RowRun]] = []  # of each part: its matrices, with the rows that are left of them
        for part, size in zip(self.parts, sizes, strict=True):
            of_part = _blocks(part, repeats * size)
            waiting.append(deque((len(blocks) + i, block.rows) for i, block in enumerate(of_part)))
            blocks += of_part
        runs: list[RowRun] = []
        for _ in range(repeats):
            for size, matrices in zip(sizes, waiting, strict=True):
                left = size
                while left:
                    matrix, rows = matrices.popleft()
                    taken = min(rows, left)
                    runs.append((matrix, taken))
                    left -= taken
                    if taken < rows:
                        matrices.appendleft((matrix, rows - taken))
        return Pattern(sizes, tuple(blocks), tuple(runs))

    @lru_cache(maxsize=1024)  # noqa: B019
    def local(
        self,
        rows: int,
        top: int,
        bottom: int,
        shards: int = 1,
        layers: tuple[int, int] | None = None,
    ) -> "LocalRows":
        """The rows of one rank: see :class:`LocalRows`."""
        return LocalRows(self.pattern(rows, shards), top, bottom, self, layers)

    def in_global_order(self) -> "Split":
        """The split of a global tensor, such as a DTensor's."""
        return replace(self, order="concatenated") if self.order == "per_shard" else self

    def _repeats(self, rows: int, shards: int) -> tuple[int, tuple[int, ...]]:
        """Number of repeats, and rows of each part in one."""
        sizes = [part.rows or 0 for part in self.parts]
        left = rows - sum(sizes)
        if self.order == "interleaved":
            repeats, more = divmod(rows, sum(sizes))
            if more or not rows:
                raise ValueError(
                    f"{rows} rows over all ranks are not a multiple of the {sum(sizes)} of one query group {sizes} "
                    f"(or head): pass the rows of each part in one group, or turn the split off (QKV splitting, say)"
                )
            return repeats, tuple(sizes)
        shares = sizes.count(0)
        share = left // shares if shares else 0
        if left != share * shares or (shares and share <= 0):
            listed = ", ".join(f"{part.name} {part.rows or 'the rest'}" for part in self.parts)
            raise ValueError(f"{rows} rows over all ranks are not those declared: {listed}")
        repeats = shards if self.order == "per_shard" else 1
        for i, part in enumerate(self.parts):
            size = sizes[i] or share
            if size % repeats:
                raise ValueError(f"{part.name} has {size} rows, of which {repeats} shards cannot have equal parts")
            sizes[i] = size // repeats
        return repeats, tuple(sizes)


WHOLE = Split()
"""A parameter that is one matrix."""


def _blocks(part: Part, rows: int) -> list["Block"]:
    if part.each is not None:
        blocks = [Block(f"{part.name} {i}", part.each) for i in range(rows // part.each)]
    else:
        blocks = [Block(name, size) for name, size in part.inside or ((part.name, rows),)]
    if sum(block.rows for block in blocks) != rows:
        listed = ", ".join(f"{name} {size}" for name, size in blocks)
        raise ValueError(f"{part.name} has {rows} rows, which are not those of the matrices inside it: {listed}")
    return blocks


RowRun = tuple[int, int]  # logical matrix, number of rows


class Block(NamedTuple):
    """A logical matrix; unnamed if it is the whole parameter."""

    name: str
    rows: int


@dataclass(frozen=True, eq=False)
class Pattern:
    """How the rows of one fused matrix make logical matrices."""

    sizes: tuple[int, ...]  # rows of each part in one repeat
    blocks: tuple[Block, ...]
    runs: tuple[RowRun, ...]  # of all ranks in their order; those of a matrix are in the order of its rows

    # every rank asks for the rows of all ranks, for every parameter
    @lru_cache(maxsize=4096)  # noqa: B019
    def held(self, top: int, bottom: int) -> tuple[tuple[int, int], ...]:
        """Each matrix's range of rows within the fused rows ``top:bottom``."""
        starts = [0] * len(self.blocks)
        for matrix, rows in self.between(0, top):
            starts[matrix] += rows
        ends = [*starts]
        for matrix, rows in self.between(top, bottom):
            ends[matrix] += rows
        return tuple(zip(starts, ends, strict=True))

    def between(self, top: int, bottom: int) -> list[RowRun]:
        """The runs of the fused rows ``top:bottom``."""
        found = []
        row = 0
        for matrix, rows in self.runs:
            inside = min(row + rows, bottom) - max(row, top)
            if inside > 0:
                found.append((matrix, inside))
            row += rows
        return found


class LocalRows:
    """One rank's rows of a fused parameter: split and merge.

    They are rows ``top:bottom`` (columns if transposed). Of a stack, ``layers`` are the first matrix that the rank has
    and the one behind its last; by default it has all.

    Attributes:
        is_whole: whether the parameter is one matrix, so that there is nothing to split.
        transposed: whether columns are split.
        stacked: whether the parameter has three dimensions.
    """

    def __init__(
        self,
        pattern: Pattern,
        top: int,
        bottom: int,
        split: Split = WHOLE,
        layers: tuple[int, int] | None = None,
    ) -> None:
        self.is_whole = split.is_whole
        self.transposed = split.transposed
        self.stacked = split.stacked is not None
        count = len(pattern.blocks)
        in_all = split.stacked or 1
        here = range(*(layers or (0, in_all)))
        self._shape = (len(here), bottom - top) if self.stacked else (bottom - top,)
        local_runs = pattern.between(top, bottom)
        self._runs: list[RowRun] = []
        for layer in here:
            self._runs += [(layer * count + matrix, rows) for matrix, rows in local_runs]
        self._sections = _sections(self._runs, len(pattern.sizes))
        self._of_section = [0] * len(self._sections)  # rows
        self._of_matrix: list[list[int]] = [[] for _ in range(count * in_all)]
        for number, (repeats, some) in enumerate(self._sections):
            for matrix, rows in some:
                self._of_section[number] += repeats * rows
                self._of_matrix[matrix].append(repeats * rows)

    def split(self, x: Tensor) -> list[Tensor]:
        """This rank's rows of each logical matrix, perhaps none.

        ``x`` is (rows x cols) or (stacked x rows x cols). Consecutive rows are a view.
        """
        x = x.mT if self.transposed else x
        if len(self._of_matrix) == 1 and not self.stacked:
            return [x]
        flat = x.flatten(0, -2)
        pieces: list[list[Tensor]] = [[] for _ in self._of_matrix]
        for section, (repeats, runs) in zip(flat.split(self._of_section), self._sections, strict=True):
            of_runs = section.unflatten(0, (repeats, -1)).split([rows for _, rows in runs], 1)
            for (matrix, _), rows in zip(runs, of_runs, strict=True):
                pieces[matrix].append(rows.flatten(0, 1))
        return [_joined(some or [flat[:0]]) for some in pieces]

    @cached_property
    def runs(self) -> list[list[tuple[int, int, int, int]]]:
        """Where the rows of each logical matrix lie, in order.

        Each run is a layer of the stack that is here, its first row there (column if transposed), how many there are,
        and the distance from one to the next.
        """
        of_matrices: list[list[tuple[int, int, int, int]]] = [[] for _ in self._of_matrix]
        done = 0
        for matrix, rows in self._runs:
            layer, first = divmod(done, self._shape[-1])
            done += rows
            step = 1
            found = of_matrices[matrix]
            if found and found[-1][0] == layer:
                _, start, before, distance = found[-1]
                if before == 1:
                    distance = first - start
                goes_on = first == start + before * distance
                if goes_on and (distance == 1 or rows == 1):
                    found.pop()
                    first = start
                    rows += before
                    step = distance
            found.append((layer, first, rows, step))
        return of_matrices

    def merge(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        merged = self._merged(matrices)
        return merged.mT.contiguous() if self.transposed else merged

    def _merged(self, matrices: Sequence[Tensor]) -> Tensor:
        if len(self._of_matrix) == 1 and not self.stacked:
            return matrices[0]
        pieces = [iter(matrix.split(of)) for matrix, of in zip(matrices, self._of_matrix, strict=True)]
        sections = []
        for repeats, runs in self._sections:
            of_runs = [next(pieces[matrix]) for matrix, _ in runs]
            if repeats > 1:
                repeated = [rows.unflatten(0, (repeats, -1)) for rows in of_runs]
                of_runs = [torch.cat(repeated, 1).flatten(0, 1)]
            sections += of_runs
        flat = _joined(sections or [matrices[0]])
        return flat.view(*self._shape, flat.size(1))


def _joined(rows: list[Tensor]) -> Tensor:
    """Tensors as one; of one itself, without a copy."""
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _sections(runs: list[RowRun], period: int) -> list[tuple[int, list[RowRun]]]:
    """Runs as sections: ``period`` runs repeated, or any runs once."""
    sections: list[tuple[int, list[RowRun]]] = []
    start = 0
    while start < len(runs):
        group = runs[start : start + period]
        repeats = 1
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
