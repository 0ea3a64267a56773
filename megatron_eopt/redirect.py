"""Replace attributes of other packages' modules and classes, as one thing that can be undone.

Two places need it: :mod:`megatron_eopt.cpu` (torch.cuda answered by the CPU) and :mod:`megatron_eopt.megatron`
(Megatron's registry and parser know our optimizers). Each replacement carries its reason, so that what was changed in
a process can be printed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Redirection:
    """One attribute to replace.

    Attributes:
        owner: module or class that holds the attribute.
        name: name of the attribute; it need not exist.
        make: builds the replacement from the original (``None`` where the attribute did not exist).
        reason: why, in one line, for the user.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    reason: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}: {self.reason}"


class Redirections:
    """A set of redirections that is installed and undone as one thing; both calls are idempotent.

    If one of them cannot be installed, those before it are undone and the error is raised.
    """

    def __init__(self, redirections: Sequence[Redirection]) -> None:
        self.redirections = tuple(redirections)
        self._originals: list[tuple[Redirection, Any]] = []

    @property
    def installed(self) -> bool:
        """True between :meth:`install` and :meth:`undo`."""
        return bool(self._originals)

    def install(self) -> None:
        """Replace every attribute; nothing happens where they are replaced already."""
        if self.installed:
            return
        try:
            for redirection in self.redirections:
                # vars(), not getattr: an inherited attribute or a bound classmethod must not be written back on undo
                original = vars(redirection.owner).get(redirection.name, _MISSING)
                seen = getattr(redirection.owner, redirection.name, None)
                setattr(redirection.owner, redirection.name, redirection.make(seen))
                self._originals.append((redirection, original))
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put every original back, the last replaced first."""
        while self._originals:
            redirection, original = self._originals.pop()
            if original is _MISSING:
                delattr(redirection.owner, redirection.name)
            else:
                setattr(redirection.owner, redirection.name, original)
