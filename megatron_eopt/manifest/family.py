"""Families: rows that are alike but for the numbers in their names, of one rank or of all ranks together."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from megatron_eopt.manifest.members import (
    Index,
    Members,
    compressed,
    count,
    expanded,
    join_name,
    label,
    split_name,
)
from megatron_eopt.manifest.row import Row
from megatron_eopt.manifest.words import owner_in_words


@dataclass(frozen=True)
class Family:
    """Parameters of which the same is said.

    Attributes:
        like: what is said, with the pattern for a name: ``decoder.layers.*.mlp.linear_fc1.weight``.
        members: which numbers stand in the pattern, exactly.
    """

    like: Row
    members: Members

    @property
    def pattern(self) -> str:
        """The names, with ``*`` for every number."""
        return self.like.name

    @cached_property
    def count(self) -> int:
        """Number of parameters."""
        return count(self.members)

    @cached_property
    def label(self) -> str:
        """The names with ranges of numbers, as ``decoder.layers.{0-3}.mlp.linear_fc1.weight``."""
        return label(self.pattern, self.members)

    @property
    def named(self) -> str:
        """The label, and how many parameters these are."""
        return self.label if self.count == 1 else f"{self.label} ({self.count:,} parameters)"


def families(rows: Iterable[Row]) -> list[Family]:
    """Rows in their short form, by name and then by number; :func:`rows` is its inverse.

    Args:
        rows: in any order. Two rows of one name may differ, as those of two owners do.

    Raises:
        ValueError: for a name with a ``*``, and for two rows that are equal: one parameter was collected twice.
    """
    found: dict[Row, list[Index]] = {}
    for row in rows:
        pattern, index = split_name(row.name)
        found.setdefault(replace(row, name=pattern), []).append(index)
    for like, indices in found.items():
        index, times = Counter(indices).most_common(1)[0]
        if times > 1:
            raise _listed_twice(like, index)
    return in_order(Family(like, compressed(indices)) for like, indices in found.items())


def rows(families: Iterable[Family]) -> list[Row]:
    """Every parameter by itself, by name; numbers in names count as numbers, so layer 2 comes before layer 10."""
    found = [
        replace(family.like, name=join_name(family.pattern, index))
        for family in families
        for index in expanded(family.members)
    ]
    return sorted(found, key=lambda row: _by_numbers(row.name))


def as_families(found: Iterable[Family] | Iterable[Row]) -> list[Family]:
    """Families as they are, and those of rows."""
    listed = list(found)
    singles = [each for each in listed if isinstance(each, Row)]
    return [*(each for each in listed if isinstance(each, Family)), *families(singles)]


def merged(lists: Iterable[Sequence[Family]]) -> list[Family]:
    """The families of all ranks together: the same for every order of the ranks.

    Families that several ranks have alike are looked at once, so the cost grows with what the ranks have of their own.

    Args:
        lists: of each rank, in the order of the ranks.

    Raises:
        ValueError: for a parameter of which two ranks say different things, with both.
    """
    known: dict[Row, Row] = {}
    seen: set[frozenset[Family]] = set()
    said: dict[str, dict[Index, tuple[int, frozenset[Row]]]] = {}
    for rank, each in enumerate(lists):
        for pattern, group in by_pattern(each).items():
            if (alike := frozenset(group)) in seen:
                continue
            seen.add(alike)
            # one object for equal rows, so that comparing them per parameter is cheap
            group = [Family(known.setdefault(family.like, family.like), family.members) for family in group]
            of_pattern = said.setdefault(pattern, {})
            for index, likes in by_index(group).items():
                first, before = of_pattern.setdefault(index, (rank, likes))
                if before != likes:
                    raise _disagreement(join_name(pattern, index), first, before, rank, likes)
    found: dict[Row, list[Index]] = {}
    for of_pattern in said.values():
        for index, (_, likes) in of_pattern.items():
            for like in likes:
                found.setdefault(like, []).append(index)
    return in_order(Family(like, compressed(indices)) for like, indices in found.items())


def by_pattern(found: Iterable[Family]) -> dict[str, list[Family]]:
    """Families whose names differ by their numbers only, together."""
    groups: dict[str, list[Family]] = {}
    for family in found:
        groups.setdefault(family.pattern, []).append(family)
    return groups


def by_index(group: Iterable[Family]) -> dict[Index, frozenset[Row]]:
    """What families of one pattern say of each parameter: one thing, unless it has two owners.

    Raises:
        ValueError: if two families say the same of one parameter.
    """
    said: dict[Index, frozenset[Row]] = {}
    for family in group:
        alone = frozenset([family.like])
        for index in expanded(family.members):
            before = said.setdefault(index, alone)
            if before is not alone:
                if family.like in before:
                    raise _listed_twice(family.like, index)
                said[index] = before | alone
    return said


def in_order(found: Iterable[Family]) -> list[Family]:
    """The one order that families are listed in."""
    return sorted(found, key=lambda family: (_by_numbers(family.pattern), family.members, repr(family.like)))


def _by_numbers(name: str) -> tuple[str | int, ...]:
    return tuple(int(piece) if place % 2 else piece for place, piece in enumerate(re.split(r"([0-9]+)", name)))


def _listed_twice(like: Row, index: Index) -> ValueError:
    return ValueError(
        f"{join_name(like.name, index)} is listed twice, both times owned by {owner_in_words(like.owner)}: expected "
        f"every parameter in one group of one optimizer; give each optimizer its own parameters"
    )


def _disagreement(name: str, rank: int, said: frozenset[Row], other: int, otherwise: frozenset[Row]) -> ValueError:
    if len(said) == len(otherwise) == 1:
        (a,), (b,) = said, otherwise
        pairs = {field.name: (getattr(a, field.name), getattr(b, field.name)) for field in fields(Row)}
        differing: Mapping[str, tuple[object, object]] = {
            key: pair for key, pair in pairs.items() if pair[0] != pair[1]
        }
    else:
        differing = {"owners": (_owners(said), _owners(otherwise))}
    first, second = (", ".join(f"{key} {pair[side]!r}" for key, pair in differing.items()) for side in (0, 1))
    return ValueError(
        f"ranks disagree about {name}: rank {rank} says {first}, and rank {other} says {second}; expected the same on "
        f"all ranks: start them with the same flags, overrides and release"
    )


def _owners(likes: Iterable[Row]) -> list[str]:
    return sorted(owner_in_words(like.owner) for like in likes)
