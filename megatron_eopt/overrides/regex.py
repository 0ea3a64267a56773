"""Regular expressions, searched for in linear time.

Python's ``re`` backtracks: ``(a+)+$`` takes twice as long for each further letter. Here all positions that a match may
have reached are advanced together, each once.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from re import _compiler, _parser  # type: ignore[attr-defined]  # re has no public name for its parser
from typing import Any

from megatron_eopt.overrides.known import OverrideError
from megatron_eopt.overrides.limits import MAX_LEAST

_Items = tuple[Any, ...]  # matchers of one character, or (least, most, options), each option being _Items


@lru_cache
def parsed(text: str) -> _Items:
    """Parse a regular expression; an :class:`OverrideError` refuses it."""
    try:
        return tuple(_items(text, _parser.parse(text), repeated=False))
    except (re.error, OverflowError, RecursionError) as error:
        raise OverrideError(f"{text!r} is no regular expression: {error}") from None


def _items(text: str, pattern: Any, repeated: bool) -> Iterator[Any]:
    for operation, arguments in pattern:
        match str(operation), arguments:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT", _:
                yield _compiler.compile(_parser.SubPattern(pattern.state, [(operation, arguments)])).match
            case "SUBPATTERN", (_, 0, 0, group):
                yield from _items(text, group, repeated)
            case "BRANCH", (_, options):
                yield 1, 1, [tuple(_items(text, option, repeated)) for option in options]
            case "MAX_REPEAT" | "MIN_REPEAT", (least, most, group) if not repeated and least <= MAX_LEAST:
                yield least, most, [tuple(_items(text, group, most > 1))]
            case name, _:
                what = (
                    f"nested quantifiers or counts above {MAX_LEAST}" if "REPEAT" in name else "lookaround or the like"
                )
                raise OverrideError(f"{text!r} has {what}, which can take too long to search for: write it without")


@lru_cache(2**16)
def is_found(text: str, name: str) -> bool:
    """Whether an expression is found anywhere in a name."""
    return bool(_ends(parsed(text), name, set(range(len(name) + 1))))


def _ends(items: _Items, name: str, starts: set[int]) -> set[int]:
    """Where matches end that begin at any of ``starts``."""
    for item in items:
        if callable(item):
            starts = {found.end() for start in starts if (found := item(name, start))}
            continue
        new, (least, most, options) = starts, item
        for count in range(most):
            before, ends = starts, {end for option in options for end in _ends(option, name, new)}
            starts, new = (ends, ends) if count < least else (starts | ends, ends - starts)
            if starts == before:  # at the latest after a round for each character: no match goes back
                break
    return starts
