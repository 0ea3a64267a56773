"""What is declared of a parameter: which logical matrices its rows make, whatever the number of ranks."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, get_args

from megatron_eopt.matrices.rows import Block, LocalRows, Pattern, Run

Order = Literal["interleaved", "per_shard", "concatenated"]
"""How the rows of the parts follow one another in the global parameter, the shards of all ranks in their order:

- ``interleaved``: a group has its rows of each part, the groups follow one another; a shard may end within a group.
  Fused queries, keys and values are such: rows are ``(groups, q + k + v, hidden)`` flattened.
- ``per_shard``: each shard has an equal share of every part, so the order depends on the number of shards. Where the
  parameter is not cut along its rows this is ``concatenated``.
- ``concatenated``: the parts follow one another, wherever the parameter is cut.
"""


@dataclass(frozen=True)
class Part:
    """Rows of a fused parameter that belong together.

    Attributes:
        name: of the logical matrix.
        rows: in one group where parts are ``interleaved``, else in the global parameter; None for an equal share of
            those that the other parts leave.
        each: so many rows are a matrix of their own (a head): ``name 0``, ``name 1`` and so on.
        inside: names and rows of the matrices that the part itself is the concatenation of, all shards together.
    """

    name: str
    rows: int | None = None
    each: int | None = None
    inside: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", tuple((name, rows) for name, rows in self.inside))


@dataclass(frozen=True)
class Split:
    """The logical matrices of a parameter, by its rows.

    Attributes:
        parts: in the order of the rows; none for a parameter that is one matrix.
        order: see :data:`Order`.
        stacked: a parameter of three dimensions is a stack of so many matrices (experts), each of which is split.

    Raises:
        ValueError: for an unknown order, two matrices of one name, numbers that are not positive integers, and parts
            that do not go with the order.
    """

    parts: tuple[Part, ...] = ()
    order: Order = "interleaved"
    stacked: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if self.order not in get_args(Order):
            raise ValueError(f"unknown order {self.order!r} of rows: expected one of {', '.join(get_args(Order))}")
        names = [name for part in self.parts for name in ([each for each, _ in part.inside] or [part.name])]
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
        """True for a parameter that is one matrix."""
        return not self.parts and self.stacked is None

    def names(self, rows: int) -> list[str]:
        """Names of the logical matrices, the same at every number of ranks; one empty name for a whole parameter."""
        names = [block.name for block in self.pattern(rows).blocks]
        if self.stacked is None:
            return names
        return [f"expert {layer} {name}".rstrip() for layer in range(self.stacked) for name in names]

    # a model has many equal parameters
    @lru_cache(maxsize=1024)  # noqa: B019
    def pattern(self, rows: int, shards: int = 1) -> Pattern:
        """Which rows are whose, of ``rows`` of the global parameter (or of each of a stack), cut into so many shards.

        Raises:
            ValueError: for another number of rows than was declared, and for parts that cannot be cut so.
        """
        if not self.parts:
            return Pattern((rows,), (Block("", rows),), ((0, rows),))
        of_parts = self._rows(rows)
        if self.order == "interleaved":
            repeats = rows // self._declared
        else:
            repeats = shards if self.order == "per_shard" else 1
        for part, of_part in zip(self.parts, of_parts, strict=True):
            if of_part % repeats:
                raise ValueError(f"{part.name} has {of_part} rows, of which {repeats} shards cannot have equal parts")
        sizes = tuple(of_part // repeats for of_part in of_parts)
        blocks: list[Block] = []
        found: list[tuple[int, int, Run]] = []  # with its repeat and its part
        for number, (part, of_part, size) in enumerate(zip(self.parts, of_parts, sizes, strict=True)):
            own = _blocks(part, of_part)
            edges = list(accumulate((block.rows for block in own), initial=0))
            for start, end in pairwise(sorted({*edges, *range(0, of_part, size)})):
                found.append((start // size, number, (len(blocks) + bisect_right(edges, start) - 1, end - start)))
            blocks += own
        runs = (run for _, _, run in sorted(found, key=lambda each: each[:2]))
        return Pattern(sizes, tuple(blocks), tuple(runs))

    @lru_cache(maxsize=1024)  # noqa: B019
    def local(self, rows: int, top: int, bottom: int, shards: int = 1, padding: int = 0) -> LocalRows:
        """What splits and merges the rows of one rank: see :meth:`pattern` and :class:`LocalRows`."""
        return LocalRows(self.pattern(rows, shards), top, bottom, self.stacked, padding)

    def in_global_order(self) -> "Split":
        """For a parameter whose global tensor is what one rank would hold, as that of a DTensor is."""
        return replace(self, order="concatenated") if self.order == "per_shard" else self

    @property
    def _declared(self) -> int:
        """Rows that the parts name: of one group where they are ``interleaved``."""
        return sum(part.rows or 0 for part in self.parts)

    def _rows(self, rows: int) -> list[int]:
        """Rows of each part in the global parameter."""
        sizes = [part.rows for part in self.parts]
        if self.order == "interleaved":
            if rows % self._declared or not rows:
                raise ValueError(
                    f"{rows} rows over all ranks are not a multiple of the {self._declared} of one query group {sizes} "
                    f"(or head): pass the rows of each part in one group, or turn the split off (QKV splitting, say)"
                )
            return [rows // self._declared * (size or 0) for size in sizes]
        shares = sizes.count(None)
        left = rows - self._declared
        if (left <= 0 or left % shares) if shares else left:
            declared = ", ".join(f"{part.name} {part.rows or 'the rest'}" for part in self.parts)
            raise ValueError(f"{rows} rows over all ranks are not those declared: {declared}")
        return [left // shares if size is None else size for size in sizes]


def _blocks(part: Part, rows: int) -> list[Block]:
    """The logical matrices of one part."""
    if part.each is not None:
        if rows % part.each:
            raise ValueError(f"{part.name} has {rows} rows, which are no multiple of the {part.each} of each matrix")
        return [Block(f"{part.name} {i}", part.each) for i in range(rows // part.each)]
    inside = part.inside or ((part.name, rows),)
    if sum(size for _, size in inside) != rows:
        listed = ", ".join(f"{name} {size}" for name, size in inside)
        raise ValueError(f"{part.name} has {rows} rows, which are not those of the matrices inside it: {listed}")
    return [Block(name, size) for name, size in inside]
