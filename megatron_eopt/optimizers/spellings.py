"""Arguments of constructors under the names that they have in other packages, for scripts written against those."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Spelling = str | tuple[str, Mapping[Any, Any]]
"""The name of an argument here; with it, where values are others too, value there -> value here."""


def also_called[**P](**spellings: Spelling) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor take arguments by keyword under further names, which its signature does not show.

    The constructor then raises a ``ValueError`` where an argument is given under both names with different values, or
    under another package's name with a value that it does not have there.

    Args:
        **spellings: further name -> the argument.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> None:
            found = {other: kwargs.pop(other) for other in spellings.keys() & kwargs.keys()}
            given = signature.bind_partial(*args, **kwargs).arguments if found else {}
            for other, value in found.items():
                spelling = spellings[other]
                name, values = (spelling, None) if isinstance(spelling, str) else spelling
                if values is not None and value not in values:
                    raise ValueError(f"{other} must be one of {', '.join(map(str, values))}, got {value!r}")
                here = value if values is None else values[value]
                if given.setdefault(name, here) != here:
                    raise ValueError(
                        f"{other}={value!r} is another name for {name}={here!r}, but {name}={given[name]!r} was given "
                        f"too: leave one of them away"
                    )
                kwargs.setdefault(name, here)
            init(*args, **kwargs)

        return accepting

    return decorate
