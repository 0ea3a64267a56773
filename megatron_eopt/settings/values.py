"""What values of settings may be: checks, each a function of a name for errors and of a value."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from numbers import Real
from typing import Any

from torch import Tensor

from megatron_eopt.orthogonalize.choices import check_count

Scalar = float | Tensor  # a tensor of one entry, on the device of the parameters

Check = Callable[[str, Any], None]
"""``(called, value)``; a ``ValueError`` or ``TypeError`` that begins with ``called``."""


def number(expected: str, fits: Callable[[Any], bool]) -> Check:
    """A number, or a tensor of one entry; nobody waits for one on a device."""

    def check(called: str, value: Any) -> None:
        check_scalar(called, value)
        if is_readable(value) and not fits(value):
            raise ValueError(f"{called} must {expected}, got {value}")

    return check


AT_LEAST_0 = number("be a finite number of at least 0", lambda x: 0 <= x < inf)
ABOVE_0 = number("be a finite number above 0", lambda x: 0 < x < inf)
BELOW_1 = number("lie in [0, 1)", lambda x: 0 <= x < 1)
UP_TO_1 = number("lie in [0, 1]", lambda x: 0 <= x <= 1)
ABOVE_0_UP_TO_1 = number("lie in (0, 1]", lambda x: 0 < x <= 1)
BETWEEN_0_AND_1 = number("be above 0 and below 1", lambda x: 0 < x < 1)
FINITE = number("be a finite number", lambda x: -inf < x < inf)


def count(least: int, most: int | None = None) -> Check:
    """A whole number of at least ``least``, and of at most ``most``."""
    return lambda called, value: check_count(called, value, least, most)


def one_of(choices: Iterable[str], *others: object) -> Check:
    """One of some names, or of other values such as None."""
    names = tuple(choices)

    def check(called: str, value: Any) -> None:
        if value not in names and not any(value is other for other in others):
            owner, _, name = called.rpartition(": ")
            raise ValueError(f"{owner}: unknown {name} {value!r}: expected one of {', '.join(names)}")

    return check


def flag(called: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{called} must be True or False, got {value!r}")


def flag_or_none(called: str, value: Any) -> None:
    """True, False, or None."""
    if value is not None:
        flag(called, value)


def two_below_1(called: str, value: Any) -> None:
    """Two numbers in [0, 1), as betas are."""
    for each in value if isinstance(value, list | tuple) else [value]:
        check_scalar(called, each)
    pair = isinstance(value, Sequence) and len(value) == 2
    if not pair or not all(0 <= x < 1 for x in value if is_readable(x)):
        raise ValueError(f"{called} must be two numbers in [0, 1), got {value}")


def check_scalar(called: str, value: Any) -> None:
    """Refuse what is no number and no tensor of one entry."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1
    is_number = isinstance(value, Real) or getattr(value, "ndim", None) == 0  # numbers of numpy's have no dimensions
    if isinstance(value, bool) or not (is_tensor or is_number):
        raise ValueError(f"{called} must be a number, or a tensor of one entry, got {value!r}")


def is_readable(value: Any) -> bool:
    """Whether a number is known to the host."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def without_dimensions(value: Any) -> Any:
    """A tensor of one entry without dimensions; waits for nothing."""
    if isinstance(value, list | tuple) and any(hasattr(x, "ndim") for x in value):
        return type(value)(map(without_dimensions, value))
    if isinstance(value, Tensor):
        return value.reshape(()) if value.ndim else value
    return value.item() if getattr(value, "ndim", None) == 0 else value
