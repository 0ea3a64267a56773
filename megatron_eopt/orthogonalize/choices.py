"""Checks of settings, and suggestions for misspelt names."""

import difflib
from collections.abc import Iterable

LIKE = 0.7  # how like a name its misspelling is, by difflib; max_lr is not that like min_lr
MISSPELT = 0.85  # the same where other names are likely, too; max_momentum is not that like momentum


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of the choices."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}: expected one of {', '.join(known)}")


def check_count(
    what: str,
    value: object,
    least: int = 1,
    most: int | None = None,
) -> None:
    """Raise ``ValueError`` unless an integer within bounds; True is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"at least {least} and at most {most}"
        raise ValueError(f"{what} must be a whole number of {bounds}, got {value!r}")


def close(name: str, known: Iterable[str], likeness: float = LIKE) -> list[str]:
    """At most three similar known names, nearest first, ignoring case."""
    by_case = {known_name.lower(): known_name for known_name in known}
    return [by_case[near] for near in difflib.get_close_matches(name.lower(), by_case, cutoff=likeness)]


def did_you_mean(name: str, known: Iterable[str], likeness: float = LIKE) -> str:
    """``, did you mean 'NAME'?`` if a name is near."""
    for near in close(name, known, likeness):
        return f", did you mean {near!r}?"
    return ""


def near_or_all(name: object, known: Iterable[str]) -> str:
    """As :func:`did_you_mean`, else ``: expected`` and all names."""
    names = list(known)
    near = did_you_mean(name, names) if isinstance(name, str) else ""
    return near or f": expected {listing(names)}"


def listing(names: Iterable[str], word: str = "or") -> str:
    """Names as a sentence has them: ``a, b or c``."""
    *rest, last = names
    if not rest:
        return last
    return f"{', '.join(rest)} {word} {last}"
