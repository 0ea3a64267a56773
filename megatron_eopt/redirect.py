"""Replace attributes of other packages' modules and classes, as one thing that can be undone.

Two rooms need it: :mod:`megatron_eopt.cpu` (torch.cuda answered by the CPU) and :mod:`megatron_eopt.megatron`
(Megatron's registry and parser know our optimizers). Each replacement carries its reason, so that what was changed in
a process can be printed.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Redirection:
    """One attribute to replace.

    Attributes:
        owner: module or class that holds the attribute; the dotted name of a module, or ``module:Class``, imported only
            when the redirection is installed; or a mapping such as ``os.environ``, whose item ``name`` is replaced.
        name: name of the attribute; it need not exist.
        make: builds the replacement from the original (``None`` where the attribute did not exist).
        reason: why, in one line, for the user.
        follow: replace it also where another module imported it by name (see :class:`Redirections`). False for a
            replacement that lives under a name of its own, which undoing must not rename.
        required: False leaves it out where ``owner``, given by its dotted name, cannot be imported.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    reason: str
    follow: bool = field(default=True, kw_only=True)
    required: bool = field(default=True, kw_only=True)

    @property
    def what(self) -> str:
        """What is replaced, in words."""
        if isinstance(self.owner, MutableMapping):
            return f"{'environment variable' if self.owner is os.environ else 'entry'} {self.name}"
        return f"{str(getattr(self.owner, '__name__', self.owner)).replace(':', '.')}.{self.name}"

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def answer(value: Callable[[], Any] | None = None) -> Callable[[Any], Any]:
    """A ``make`` whose replacement ignores its arguments and returns ``value()``, or None.

    Each call makes a new function: torch._dynamo refuses one function object under two names.
    """
    return lambda original: named_as(original, lambda *args, **kwargs: None if value is None else value())


def becomes(replacement: Any) -> Callable[[Any], Any]:
    """A ``make`` that puts ``replacement`` there as it is; a class, above all, which must not be wrapped."""
    return lambda original: replacement


def call(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """A ``make`` that puts the function ``replacement`` there, under the original's name."""
    return lambda original: named_as(original, replacement)


def named_as(original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` under the name and documentation of ``original``, so that tracebacks and pickle find it."""
    return functools.wraps(original)(replacement) if callable(original) else replacement


@dataclass(frozen=True)
class _Done:
    """What was replaced: ``original`` is what ``holder`` itself held, ``seen`` what a reader got from it."""

    holder: Any
    name: str
    original: Any
    seen: Any
    replacement: Any
    follow: bool


class Redirections:
    """A set of redirections that is installed and undone as one thing; both calls are idempotent.

    If one of them cannot be installed, those before it are undone and the error is raised.

    Args:
        redirections: what to replace, in this order.
        importers: packages whose modules may hold an original under a name of their own (``from torch.cuda import
            _lazy_init``). Those names are replaced as well, and put back as well: also in modules that are imported
            after :meth:`install` and so never saw the original. Not reached are defaults of arguments, closures,
            containers and attributes of objects.
    """

    def __init__(self, redirections: Sequence[Redirection], importers: Sequence[str] = ()) -> None:
        self.redirections = tuple(redirections)
        self.importers = tuple(importers)
        self._done: list[_Done] = []

    @property
    def installed(self) -> bool:
        """True between :meth:`install` and :meth:`undo`."""
        return bool(self._done)

    def install(self) -> None:
        """Replace every attribute; nothing happens where they are replaced already."""
        if self.installed:
            return
        try:
            for redirection in self.redirections:
                if redirection.required or _importable(redirection.owner):
                    self._done.append(_replace(redirection))
            self._rename({id(done.seen): done.replacement for done in self._done if _followed(done)})
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put every original back, the last replaced first."""
        originals = {id(done.replacement): done.seen for done in self._done if _followed(done)}
        undone = []  # keeps the replacements alive, and with them their ids, until the names are put back
        while self._done:
            done = self._done.pop()
            undone.append(done)
            _put_back(done)
        self._rename(originals)

    def _rename(self, new_of_id: dict[int, Any]) -> None:
        """Point the names that modules of ``importers`` hold at other objects; ``new_of_id`` is keyed by identity."""
        if not new_of_id:
            return
        prefixes = tuple(f"{package}." for package in self.importers)
        for module_name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or not (
                module_name in self.importers or module_name.startswith(prefixes)
            ):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in new_of_id:
                    setattr(module, name, new_of_id[id(value)])


def _importable(owner: Any) -> bool:
    try:
        if isinstance(owner, str):
            _imported(owner)
    except ImportError:
        return False
    return True


def _imported(owner: str) -> Any:
    module, _, attribute = owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def _followed(done: _Done) -> bool:
    # What can be imported by name and be told apart by identity: functions and classes, not numbers or tuples.
    return done.follow and callable(done.seen) and callable(done.replacement)


def _replace(redirection: Redirection) -> _Done:
    holder, name = redirection.owner, redirection.name
    if isinstance(holder, str):
        holder = _imported(holder)
    if isinstance(holder, MutableMapping):
        original = holder.get(name, _MISSING)
        seen = None if original is _MISSING else original
    else:
        # vars(), not getattr: an inherited attribute or a bound classmethod must not be written back on undo
        original = vars(holder).get(name, _MISSING)
        seen = getattr(holder, name, None)
    replacement = redirection.make(seen)
    if isinstance(holder, MutableMapping):
        holder[name] = replacement
    else:
        setattr(holder, name, replacement)
    return _Done(holder, name, original, seen, replacement, redirection.follow)


def _put_back(done: _Done) -> None:
    missing = done.original is _MISSING
    if isinstance(done.holder, MutableMapping):
        if missing:
            done.holder.pop(done.name, None)
        else:
            done.holder[done.name] = done.original
    elif missing:
        delattr(done.holder, done.name)
    else:
        setattr(done.holder, done.name, done.original)
