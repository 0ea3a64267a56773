"""The numbers in parameters' names: a pattern, and a short exact form of the numbers that stand in it."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import prod

Index = tuple[int, ...]
"""The numbers of one name, from left to right: of the layer, of the expert."""

Runs = tuple[tuple[int, int], ...]
"""Whole numbers, as runs ``(first, last + 1)``."""

Members = tuple[tuple[Runs, ...], ...]
"""A set of indices as boxes: a box holds every combination of the numbers of its runs, one choice for each place."""

_DIGITS = r"(?:0|[1-9][0-9]*)"
# Between dots, as layers and experts are numbered, and behind the names that grouped experts' parameters have.
_NUMBER = re.compile(rf"(?<![^.]){_DIGITS}(?![^.])|(?:(?<=\.weight)|(?<=\.bias)){_DIGITS}\Z")
_SHOWN_BOXES = 3


def split_name(name: str) -> tuple[str, Index]:
    """A name as pattern, with ``*`` for every number, and the numbers.

    Raises:
        ValueError: for a name with a ``*`` of its own.
    """
    if "*" in name:
        raise ValueError(f"the parameter name {name!r} has a '*', which stands for numbers here: rename the module")
    return _NUMBER.sub("*", name), tuple(map(int, _NUMBER.findall(name)))


def join_name(pattern: str, numbers: Iterable[object]) -> str:
    """A pattern with numbers, or what is to be shown for them, in the places of its stars."""
    first, *rest = pattern.split("*")
    return first + "".join(f"{number}{piece}" for number, piece in zip(numbers, rest, strict=True))


def compressed(indices: Iterable[Index]) -> Members:
    """The short form of a set of indices of one length: the same for every order of them, so sets can be compared."""
    return tuple(_boxes(sorted(set(indices))))


def _boxes(indices: Sequence[Index]) -> tuple[tuple[Runs, ...], ...]:
    if not indices or not indices[0]:
        return ((),) if indices else ()
    behind: dict[int, list[Index]] = {}
    for first, *rest in indices:
        behind.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[Runs, ...], ...], list[int]] = {}
    for first, rests in behind.items():
        alike.setdefault(_boxes(rests), []).append(first)
    return tuple((_runs(firsts), *box) for boxes, firsts in alike.items() for box in boxes)


def _runs(numbers: Sequence[int]) -> Runs:
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    return tuple((numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise(edges))


def expanded(members: Members) -> list[Index]:
    """All indices, in ascending order."""
    places = (product(*([n for run in runs for n in range(*run)] for runs in box)) for box in members)
    return sorted(index for box in places for index in box)


def count(members: Members) -> int:
    """Number of indices."""
    return sum(prod(sum(end - first for first, end in runs) for runs in box) for box in members)


def contains(members: Members, index: Index) -> bool:
    """Whether an index is among them."""
    return any(
        len(box) == len(index)
        and all(any(first <= n < end for first, end in runs) for runs, n in zip(box, index, strict=True))
        for box in members
    )


def label(pattern: str, members: Members) -> str:
    """The names for people: ``decoder.layers.{0-3}.mlp.linear_fc1.weight``."""
    shown = [join_name(pattern, map(_ranges, box)) for box in members[:_SHOWN_BOXES]]
    more = [f"{len(members) - _SHOWN_BOXES} more such blocks"] if len(members) > _SHOWN_BOXES else []
    return " and ".join([*shown, *more])


def _ranges(runs: Runs) -> str:
    shown = ",".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in runs)
    return shown if shown.isdecimal() else f"{{{shown}}}"
