"""Replace attributes of other packages, and undo that.

Two rooms need it: :mod:`megatron_eopt.cpu` (torch.cuda answered by the CPU) and :mod:`megatron_eopt.megatron`
(Megatron's registry and parser know our optimizers). Each replacement carries its reason, so that what was changed in
a process can be printed.
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


@dataclass(frozen=True)
class Redirection:
    """One attribute to replace."""

    # A module or class; ``module`` or ``module:Class`` by name, imported only when the redirection is installed; or a
    # mapping such as ``os.environ``, whose item is replaced.
    target: Any
    name: str  # of the attribute, which need not exist
    make: Callable[[Any], Any]  # builds the replacement from the original, None where the attribute did not exist
    reason: str  # why, in one line, for the user
    # Replace it also where another module imported it by name. False for a replacement that lives under a name of its
    # own, which undoing must not rename.
    follow: bool = field(default=True, kw_only=True)
    required: bool = field(default=True, kw_only=True)  # False: left out where a target given by name is not there

    @property
    def what(self) -> str:
        """What is replaced, in words."""
        if isinstance(self.target, MutableMapping):
            return f"{'environment variable' if self.target is os.environ else 'entry'} {self.name}"
        target = getattr(self.target, "__name__", None) or getattr(self.target, "name", self.target)  # of a logger
        return f"{str(target).replace(':', '.')}.{self.name}"

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def answer(value: Callable[[], Any] | None = None) -> Callable[[Any], Any]:
    """A ``make`` whose replacement ignores its arguments and returns ``value()``, or None.

    Each call makes a new function: torch._dynamo refuses one function object under two names.
    """
    return around(lambda original, *args, **kwargs: None if value is None else value())


def becomes(replacement: Any) -> Callable[[Any], Any]:
    """A ``make`` that puts ``replacement`` there as it is; a class, above all, which must not be wrapped."""
    return lambda original: replacement


def around(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """A ``make`` from a function that is called with the original, and then with the original's arguments.

    What it makes has the name and documentation of the original, so that tracebacks and pickle find it.
    """

    def make(original: Any) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return functools.wraps(original)(replaced) if callable(original) else replaced

    return make


class Redirections:
    """Redirections that are installed and undone together, all or none.

    Modules of the ``importers``, packages, may hold an original under a name of their own (``from torch.cuda import
    _lazy_init``). Those names are replaced as well, and put back as well: also in modules that are imported after
    :meth:`install` and so never saw the original. Not reached are defaults of arguments, closures, containers and
    attributes of objects.
    """

    def __init__(self, redirections: Sequence[Redirection], importers: Sequence[str] = ()) -> None:
        self.redirections = tuple(redirections)
        self._importers = tuple(importers)
        self._undoing = contextlib.ExitStack()

    def install(self) -> None:
        """Replace every attribute."""
        with contextlib.ExitStack() as undoing:
            # originals and replacements; keeps them alive, and with them their ids
            followed: list[tuple[Any, Any]] = []
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
                # functions and classes can be imported by name and be told apart by identity, numbers cannot
                if redirection.follow and callable(old) and callable(new):
                    followed.append((old, new))
            self._rename({id(old): new for old, new in followed})
            self._undoing = undoing.pop_all()

    def undo(self) -> None:
        """Put every original back, the last replaced first."""
        self._undoing.close()

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *error: object) -> None:
        self.undo()

    def _rename(self, new_of_id: dict[int, Any]) -> None:
        """Rebind the importers' names of objects, which are keyed by identity."""
        prefixes = tuple(f"{package}." for package in self._importers)
        for module_name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and f"{module_name}.".startswith(prefixes):
                for name, value in list(vars(module).items()):
                    if id(value) in new_of_id:
                        setattr(module, name, new_of_id[id(value)])


def _replace(target: Any, name: str, make: Callable[[Any], Any], undoing: contextlib.ExitStack) -> tuple[Any, Any]:
    """Replace one attribute; what was read there, and is from now on."""
    partial = functools.partial
    if isinstance(target, MutableMapping):
        seen, put = target.get(name), target.__setitem__
        put_back = partial(put, name, seen) if name in target else partial(target.pop, name, None)
    else:
        seen, put = getattr(target, name, None), partial(setattr, target)
        # not what was seen: a bound classmethod must not be written back, nor an inherited attribute
        put_back = partial(put, name, vars(target)[name]) if name in vars(target) else partial(delattr, target, name)
    replacement = make(seen)
    put(name, replacement)
    undoing.callback(put_back)
    return seen, replacement
