"""One message for every setting that is one of a few names."""

from collections.abc import Iterable


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise ``ValueError``, naming the choices, unless a setting has one of them."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}: expected one of {', '.join(known)}")
