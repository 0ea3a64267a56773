"""Rows of parameters, and patterns of rows.

A name is a pattern with ``*`` for every number, and an index: its numbers. Boxes are a short, exact form of a set of
indices.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, pairwise, product
from typing import Any

Index = tuple[int, ...]  # numbers of a name from left to right: layer, expert
Runs = tuple[tuple[int, int], ...]  # ``(first, last + 1)``
Members = tuple[tuple[Runs, ...], ...]  # boxes: runs for each star, in every combination

_DIGITS = r"(?:0|[1-9][0-9]*)"
# Between dots, as layers and experts are numbered, and behind the names of grouped experts' parameters.
_NUMBER = re.compile(rf"(?<![^.]){_DIGITS}(?![^.])|(?:(?<=\.weight)|(?<=\.bias)){_DIGITS}\Z")
_SHOWN_BOXES = 3


@dataclass(frozen=True)
class LogicalMatrix:
    """A logical matrix of a parameter."""

    name: str  # within its parameter, as ``q`` or ``expert 3 gate``; empty for a parameter that is one matrix
    rows: int  # outputs of the global matrix
    cols: int  # inputs
    scheme: str  # how it is orthogonalized: local, duplicated, owner, ...
    scale: float  # factor from the orthogonal factor to the update


@dataclass(frozen=True)
class ManifestRow:
    """One parameter.

    Lists become tuples, and dicts are sorted by key. A ``TypeError`` is for a setting that is no text, number, bool,
    None or tuple of these, and a rate that is no number.
    """

    name: str  # global and unwrapped, as in ``decoder.layers.3.mlp.linear_fc1.weight``
    shape: tuple[int, ...]  # of the global parameter
    dtype: str  # as in ``bfloat16``
    optimizer: str | None  # that updates it; ``owner`` in files
    reason: str  # for this optimizer, as in ``overrides.yaml:9``
    layout: str  # how ranks share it: ``whole``, ``rows over tp 2``, ...
    matrices: tuple[LogicalMatrix, ...]  # none for a parameter that is not orthogonalized
    update_rms: float | None  # predicted, of the first update before the learning rate; None if not known
    lr: float  # the largest learning rate of the schedule
    min_lr: float  # the smallest, which is the largest where the schedule is constant
    weight_decay: float  # as it is applied
    settings: dict[str, Any] = field(hash=False)  # further ones that are not the defaults
    sources: dict[str, str] = field(hash=False)  # setting -> file and line, or flag
    overruled: tuple[str, ...]  # settings from other sources that did not win, a line each
    state_bytes: int  # of its optimizer state, over all tensor-parallel ranks of one replica
    tied_to: str | None  # name of the parameter that it is to equal
    excluded: bool  # left without an optimizer on purpose

    def __post_init__(self) -> None:
        for key in ("lr", "min_lr", "weight_decay", "state_bytes"):
            value = getattr(self, key)
            if not isinstance(value, int | float):
                raise TypeError(f"{key} of {self.name} is {value!r} ({type(value).__name__}): expected a number")
        for key in ("shape", "matrices", "overruled"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        settings = {key: as_tuples(value, f"setting {key!r} of {self.name}") for key, value in self.settings.items()}
        object.__setattr__(self, "settings", dict(sorted(settings.items())))
        object.__setattr__(self, "sources", dict(sorted(self.sources.items())))

    @property
    def sizes(self) -> str:
        """Logical matrices: ``q 64x64, k 32x64``, or ``8 q 16x64``."""
        unnumbered = ((re.sub(r"\s*\b[0-9]+\b", "", matrix.name).strip(), matrix) for matrix in self.matrices)
        named = (f"{name} {matrix.rows}x{matrix.cols}".strip() for name, matrix in unnumbered)
        return ", ".join(size if number == 1 else f"{number:,} {size}" for size, number in Counter(named).items())


def as_tuples(value: Any, what: str) -> Any:
    """Lists as nested tuples; ``TypeError`` for what JSON has not."""
    if isinstance(value, list | tuple):
        return tuple(as_tuples(item, what) for item in value)
    if isinstance(value, str | bool | int | float | None):
        return value
    raise TypeError(
        f"{what} holds {value!r} ({type(value).__name__}): expected text, a number, a bool, None or a tuple of these; "
        f"give its name instead"
    )


@dataclass(frozen=True)
class ParamPattern:
    """Parameters whose rows are alike."""

    like: ManifestRow  # named by the pattern: ``decoder.layers.*.mlp.linear_fc1.weight``
    members: Members  # the numbers that the stars stand for

    @property
    def pattern(self) -> str:
        """The names, with ``*`` for every number."""
        return self.like.name

    @cached_property
    def count(self) -> int:
        """Number of parameters."""
        return len(expanded(self.members))

    @cached_property
    def label(self) -> str:
        """The names with ranges, as ``decoder.layers.{0-3}.mlp.linear_fc1.weight``."""
        shown = [join_name(self.pattern, map(_ranges, box)) for box in self.members[:_SHOWN_BOXES]]
        more = len(self.members) - _SHOWN_BOXES
        return " and ".join([*shown, f"{more} more such blocks"] if more > 0 else shown)

    @property
    def is_sound(self) -> bool:
        """Whether the members fit the pattern and are :func:`compressed`."""
        try:
            indices = expanded(self.members)
            name = join_name(self.pattern, indices[0])
            return split_name(name) == (self.pattern, indices[0]) and compressed(indices) == self.members
        except (TypeError, ValueError, IndexError):
            return False

    @property
    def named(self) -> str:
        """The label and the number of parameters."""
        return self.label if self.count == 1 else f"{self.label} ({self.count:,} parameters)"


Likes = frozenset[ManifestRow]  # of one parameter: two where two optimizers have it


def families(rows: Iterable[ManifestRow]) -> list[ParamPattern]:
    """Rows as patterns; :func:`rows` is the inverse.

    Two rows of one name may differ, as those of two optimizers do. Two equal rows and a name with ``*`` are a
    ``ValueError``.
    """
    indices_of: dict[ManifestRow, set[Index]] = defaultdict(set)
    for row in rows:
        pattern, index = split_name(row.name)
        like = replace(row, name=pattern)
        if index in indices_of[like]:
            raise _listed_twice(like, index)
        indices_of[like].add(index)
    return in_order(ParamPattern(like, compressed(indices)) for like, indices in indices_of.items())


def rows(families: Iterable[ParamPattern]) -> list[ManifestRow]:
    """A row for each parameter, layer 2 before layer 10."""
    indices = ((family, index) for family in families for index in expanded(family.members))
    found = [replace(family.like, name=join_name(family.pattern, index)) for family, index in indices]
    return sorted(found, key=lambda row: _by_numbers(row.name))


def merged(lists: Iterable[Sequence[ParamPattern]], ranks: Sequence[int] | None = None) -> list[ParamPattern]:
    """The patterns of all ranks together, whatever their order.

    Families that several ranks have alike cost nothing more. Ranks (``ranks``, by default the positions of lists) that
    disagree about a parameter are a ``ValueError`` with both rows.
    """
    known: dict[ManifestRow, ManifestRow] = {}
    seen: set[frozenset[ParamPattern]] = set()
    together: dict[tuple[str, Index], tuple[int, Likes]] = {}
    for rank, families in zip(count() if ranks is None else ranks, lists, strict=False):
        for pattern, group in by_pattern(families).items():
            if (alike := frozenset(group)) in seen:
                continue
            seen.add(alike)
            # one object for equal rows, so that comparing them is cheap
            group = [ParamPattern(known.setdefault(family.like, family.like), family.members) for family in group]
            for index, likes in by_index(group).items():
                first, before = together.setdefault((pattern, index), (rank, likes))
                if before != likes:
                    raise _disagreement(join_name(pattern, index), first, before, rank, likes)
    indices_of: dict[ManifestRow, list[Index]] = defaultdict(list)
    for (_, index), (_, likes) in together.items():
        for like in likes:
            indices_of[like].append(index)
    return in_order(ParamPattern(like, compressed(indices)) for like, indices in indices_of.items())


def by_pattern(families: Iterable[ParamPattern]) -> dict[str, list[ParamPattern]]:
    """Families by their pattern."""
    groups: dict[str, list[ParamPattern]] = {}
    for family in families:
        groups.setdefault(family.pattern, []).append(family)
    return groups


def by_index(group: Iterable[ParamPattern]) -> dict[Index, Likes]:
    """Rows of each parameter: two where two optimizers have it."""
    rows: dict[Index, Likes] = {}
    for family in group:
        alone = frozenset([family.like])
        for index in expanded(family.members):
            before = rows.setdefault(index, alone)
            if before is not alone:
                if family.like in before:
                    raise _listed_twice(family.like, index)
                rows[index] = before | alone
    return rows


def in_order(families: Iterable[ParamPattern]) -> list[ParamPattern]:
    """Families in the order in which they are listed."""
    return sorted(families, key=lambda family: (_by_numbers(family.pattern), family.members, repr(family.like)))


def split_name(name: str) -> tuple[str, Index]:
    """A name as pattern and index."""
    if "*" in name:
        raise ValueError(f"the parameter name {name!r} has a '*', which stands for numbers here: rename the module")
    return _NUMBER.sub("*", name), tuple(map(int, _NUMBER.findall(name)))


def join_name(pattern: str, numbers: Iterable[object]) -> str:
    """A pattern with numbers, or texts, for its stars."""
    first, *rest = pattern.split("*")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, rest, strict=True))


def compressed(indices: Iterable[Index]) -> Members:
    """Boxes of a set of indices; equal for equal sets."""
    indices = set(indices)
    if not all(indices):  # of a name without numbers
        return ((),)
    behind: dict[int, set[Index]] = defaultdict(set)
    for first, *rest in sorted(indices):
        behind[first].add(tuple(rest))
    alike: dict[Members, list[int]] = defaultdict(list)
    for first, rests in behind.items():
        alike[compressed(rests)].append(first)
    found: list[tuple[Runs, ...]] = []
    for boxes, firsts in alike.items():
        ends = [0, *(i for i, (a, b) in enumerate(pairwise(firsts), 1) if b != a + 1), len(firsts)]
        runs = tuple((firsts[start], firsts[stop - 1] + 1) for start, stop in pairwise(ends))
        found += [(runs, *box) for box in boxes]
    return tuple(found)


def expanded(members: Members) -> list[Index]:
    """All indices, in ascending order."""
    combined = (product(*([n for run in runs for n in range(*run)] for runs in box)) for box in members)
    return sorted(index for box in combined for index in box)


def _ranges(runs: Runs) -> str:
    shown = ",".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in runs)
    return shown if shown.isdecimal() else f"{{{shown}}}"


def _by_numbers(name: str) -> tuple[str | int, ...]:
    return tuple(int(text) if index % 2 else text for index, text in enumerate(re.split(r"([0-9]+)", name)))


def _listed_twice(like: ManifestRow, index: Index) -> ValueError:
    return ValueError(
        f"{join_name(like.name, index)} is listed twice, both times for the optimizer {like.optimizer or 'none'}: "
        f"expected every parameter in one group of one optimizer; give each optimizer its own parameters"
    )


def _disagreement(name: str, rank: int, likes: Likes, other: int, others: Likes) -> ValueError:
    if len(likes) == len(others) == 1:
        (one,), (another,) = likes, others
        pair = [vars(row) | {f"the setting {key}": x for key, x in row.settings.items()} for row in (one, another)]
        names = [key for key in pair[0] | pair[1] if key != "settings" and pair[0].get(key) != pair[1].get(key)]
        first, second = (", ".join(f"{key} {said.get(key)!r}" for key in names) for said in pair)
    else:
        first, second = (f"optimizers {sorted(row.optimizer or 'none' for row in rows)}" for rows in (likes, others))
    return ValueError(
        f"ranks disagree about {name}: rank {rank} says {first}, and rank {other} says {second}; expected the same "
        f"on all ranks: start them with the same flags, overrides and release"
    )
