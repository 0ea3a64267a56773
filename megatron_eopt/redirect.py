"""Replace attributes of other packages, and undo that.

:mod:`megatron_eopt.tools.cpu` lets the CPU answer torch.cuda. :mod:`megatron_eopt.megatron` adds our optimizers to
Megatron's registry and parser. Each replacement carries its reason, so that what was changed in a process can be
printed.
"""

import contextlib
import functools
import os
import pkgutil
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Original = Callable[..., Any]  # a function that is replaced


@dataclass(frozen=True)
class Redirection:
    """One attribute to replace."""

    # A module or class; ``module`` or ``module:Class`` by name, imported when installed; or a mapping such as
    # ``os.environ``, whose item is replaced.
    target: Any
    name: str  # of the attribute, which need not exist
    make: Callable[[Any], Any]  # original, or None where the attribute did not exist -> replacement
    reason: str  # one line, for the user
    # Replace it in importing modules, too. False for a replacement with a name of its own, which undoing must keep.
    follow: bool = field(default=True, kw_only=True)
    required: bool = field(default=True, kw_only=True)  # False: left out where a target given by name is not there

    @property
    def what(self) -> str:
        """What is replaced, in words."""
        if self.target is os.environ:
            return f"environment variable {self.name}"
        if isinstance(self.target, MutableMapping):
            return f"entry {self.name}"
        target = getattr(self.target, "__name__", None) or getattr(self.target, "name", self.target)  # of a logger
        return f"{str(target).replace(':', '.')}.{self.name}"

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def answer(value: Callable[[], Any] | None = None) -> Callable[[Any], Any]:
    """A ``make`` whose replacement ignores arguments and returns ``value()``."""
    # a new function for each call: torch._dynamo refuses one function under two names
    return around(lambda original, *args, **kwargs: None if value is None else value())


def becomes(replacement: Any) -> Callable[[Any], Any]:
    """A ``make`` whose replacement is not wrapped, as for classes."""
    return lambda original: replacement


def around(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """A ``make`` from a function of original and arguments."""

    def make(original: Any) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        # with the original's name, for tracebacks and pickle
        return functools.wraps(original)(replaced) if callable(original) else replaced

    return make


class Redirections:
    """Redirections that are installed and undone together, all or none.

    Modules of the packages ``importers`` may hold an original by name (``from torch.cuda import _lazy_init``). These
    names are replaced and put back, too, also in modules imported after :meth:`install`. Defaults of arguments,
    closures, containers and attributes of objects are not.
    """

    def __init__(self, redirections: Sequence[Redirection], importers: Sequence[str] = ()) -> None:
        self.redirections = tuple(redirections)
        self._importers = tuple(importers)
        self._undoing = contextlib.ExitStack()

    def install(self) -> None:
        """Replace every attribute."""
        with contextlib.ExitStack() as undoing:
            followed: list[tuple[Any, Any]] = []  # (original, replacement): keeps them, and so their ids, alive
            undoing.callback(lambda: self._rename({id(new): old for old, new in followed}))
            for redirection in self.redirections:
                target = redirection.target
                try:
                    if isinstance(target, str):  # with a colon a module has to be one, not an attribute of its package
                        target = pkgutil.resolve_name(target if ":" in target else f"{target}:")
                except ImportError:
                    if redirection.required:
                        raise
                    continue
                old, new = _replace(target, redirection.name, redirection.make, undoing)
                if redirection.follow and callable(old) and callable(new):  # numbers have no identity
                    followed.append((old, new))
            self._rename({id(old): new for old, new in followed})
            self._undoing = undoing.pop_all()

    def undo(self) -> None:
        """Put every original back, last replaced first."""
        self._undoing.close()

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *error: object) -> None:
        self.undo()

    def _rename(self, new_of_id: dict[int, Any]) -> None:
        prefixes = tuple(f"{package}." for package in self._importers)
        for module_name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and f"{module_name}.".startswith(prefixes):
                for name, value in list(vars(module).items()):
                    if id(value) in new_of_id:
                        setattr(module, name, new_of_id[id(value)])


def _replace(target: Any, name: str, make: Callable[[Any], Any], undoing: contextlib.ExitStack) -> tuple[Any, Any]:
    partial = functools.partial
    if isinstance(target, MutableMapping):
        seen = target.get(name)
        put = target.__setitem__
        put_back = partial(put, name, seen) if name in target else partial(target.pop, name, None)
    else:
        seen = getattr(target, name, None)
        put = partial(setattr, target)
        # not what was seen: it may be a bound classmethod, or inherited
        put_back = partial(put, name, vars(target)[name]) if name in vars(target) else partial(delattr, target, name)
    replacement = make(seen)
    put(name, replacement)
    undoing.callback(put_back)
    return seen, replacement
