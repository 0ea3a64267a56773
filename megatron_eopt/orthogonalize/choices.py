"""One message for every setting that is one of a few names, and one for every count."""

from collections.abc import Iterable


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise ``ValueError``, naming the choices, unless a setting has one of them."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}: expected one of {', '.join(known)}")


def check_count(what: str, value: object, least: int = 1) -> None:
    """Raise ``ValueError`` unless a setting is a whole number, which True is not, and large enough."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} must be a whole number of at least {least}, got {value!r}")
