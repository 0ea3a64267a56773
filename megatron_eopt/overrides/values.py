"""What a value of a setting may be: checks that make a value of one type, or say what was expected."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from megatron_eopt.overrides.errors import did_you_mean, listing, shown
from megatron_eopt.overrides.known import Known

# A bool, an int, a float, a text or a tuple of floats; all values of one setting are of one type, as Megatron sorts
# parameter groups by them.
Value = Any


class Check(Protocol):
    """Makes the value of a setting from what was written."""

    @property
    def expected(self) -> str:
        """What a value has to be, in words."""

    def __call__(self, raw: object, known: Known) -> Value:
        """The value; ``ValueError`` for what is none."""


@dataclass(frozen=True)
class Number:
    """A number from ``low`` to below ``high``; ``low`` itself is allowed unless ``above``."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    whole: bool = False

    @property
    def expected(self) -> str:
        """The range in words."""
        noun = "a whole number" if self.whole else "a number"
        if self.low == -math.inf:
            return noun
        if self.high < math.inf:
            return f"{noun} in [{self.low:g}, {self.high:g})"
        return f"{noun} {'above' if self.above else 'of at least'} {self.low:g}"

    def __call__(self, raw: object, known: Known) -> Value:
        """The number, as an int if it is whole and else as a float."""
        if isinstance(raw, str) and _is_number(raw):
            raise ValueError(f"expected {self.expected}, got the text {raw!r}: write it without quotes")
        if not self._holds(raw):
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return int(raw) if self.whole else float(raw)  # type: ignore[call-overload, arg-type]

    def _holds(self, raw: object) -> bool:
        if not isinstance(raw, Real) or isinstance(raw, bool):
            return False
        value = float(raw)
        return (
            math.isfinite(value)
            and self.low <= value < self.high
            and not (self.above and value == self.low)
            and not (self.whole and value % 1)
        )


@dataclass(frozen=True)
class Betas:
    """Two numbers, each in [0, 1), as a tuple."""

    expected = "two numbers in [0, 1), as [0.9, 0.95]"

    def __call__(self, raw: object, known: Known) -> Value:
        """The two as a tuple, which can be hashed."""
        if not isinstance(raw, list | tuple) or len(raw) != 2:
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        try:
            first, second = (Number(high=1)(each, known) for each in raw)
        except ValueError:
            raise ValueError(f"expected {self.expected}, got {shown(raw)}") from None
        return float(first), float(second)


@dataclass(frozen=True)
class Choice:
    """One of a few names; true and false may stand for two of them."""

    what: str
    expected: str
    names: Callable[[Known], Iterable[str]]
    booleans: tuple[str, str] | None = None

    def __call__(self, raw: object, known: Known) -> Value:
        """The name."""
        if isinstance(raw, bool) and self.booleans:
            return self.booleans[raw]
        names = list(self.names(known))
        if raw not in names:
            near = did_you_mean(raw, names) if isinstance(raw, str) else ""
            raise ValueError(f"unknown {self.what} {shown(raw)}{near or f': expected {listing(names)}'}")
        return str(raw)


@dataclass(frozen=True)
class YesNo:
    """True or false."""

    expected = "true or false"

    def __call__(self, raw: object, known: Known) -> Value:
        """The same."""
        if not isinstance(raw, bool):
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return raw


@dataclass(frozen=True)
class Numbers:
    """So many numbers, as a tuple."""

    count: int

    @property
    def expected(self) -> str:
        """How many."""
        return f"{self.count} numbers"

    def __call__(self, raw: object, known: Known) -> Value:
        """The numbers as a tuple, which can be hashed."""
        if not isinstance(raw, list | tuple) or len(raw) != self.count:
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return tuple(Number(low=-math.inf)(each, known) for each in raw)


@dataclass(frozen=True)
class Text:
    """A text."""

    expected = "a text"

    def __call__(self, raw: object, known: Known) -> Value:
        """The same."""
        if not isinstance(raw, str):
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return raw


@dataclass(frozen=True)
class Plain:
    """Whatever can be written in one word or number, for a setting whose default says nothing of its type."""

    expected = "a number, a text, true or false"

    def __call__(self, raw: object, known: Known) -> Value:
        """The same."""
        if not isinstance(raw, str | bool | Real):
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return raw


def check_like(default: object) -> Check:
    """The check of values of the type of a default; the optimizer itself checks their range, when it is built."""
    if isinstance(default, bool):
        return YesNo()
    if isinstance(default, Real):
        return Number(low=-math.inf, whole=isinstance(default, int))
    if isinstance(default, str):
        return Text()
    if isinstance(default, list | tuple) and all(isinstance(each, Real) for each in default):
        return Numbers(len(default))
    return Plain()


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
