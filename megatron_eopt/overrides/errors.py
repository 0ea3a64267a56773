"""What is wrong with an override, and the nearest right spelling."""

import difflib
from collections.abc import Iterable


class OverrideError(ValueError):
    """Overrides that cannot be meant: the message says where, what, and what is near; a line for each mistake."""


class SettingError(OverrideError):
    """A setting that cannot be meant.

    Attributes:
        key: of the setting.
        what: what is wrong with it, without the key.
    """

    def __init__(self, key: str, what: str) -> None:
        super().__init__(key, what)  # both, so that it survives pickling
        self.key = key
        self.what = what

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def close(name: str, known: Iterable[str]) -> list[str]:
    """The known names that are like another, at most three, the nearest first; a different case is no difference."""
    by_case = {each.lower(): each for each in known}
    asked = name.lower()
    found = difflib.get_close_matches(asked, by_case)
    # of those that are equally near the first by the alphabet: difflib takes the last
    return [by_case[each] for each in sorted(found, key=lambda each: (-_likeness(each, asked), each))]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like another, if one is."""
    return next(iter(close(name, known)), None)


def _likeness(known: str, asked: str) -> float:
    return difflib.SequenceMatcher(None, known, asked).ratio()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``, did you mean 'NAME'?`` with the nearest known name; nothing where none is near."""
    found = nearest(name, known)
    return "" if found is None else f", did you mean {found!r}?"


def listing(names: Iterable[str], word: str = "or") -> str:
    """Names as a sentence has them: ``a, b or c``."""
    *rest, last = names
    return f"{', '.join(rest)} {word} {last}" if rest else last


def shown(value: object) -> str:
    """A value as the file of the user has it."""
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else repr(value)
