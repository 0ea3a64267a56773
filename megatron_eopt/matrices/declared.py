"""Which logical matrices a parameter is declared to have: by its attribute, or by a pattern of its name."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from megatron_eopt.matrices.split import Split

ATTRIBUTE = "logical_matrices"
"""Attribute of a parameter that holds its :class:`~megatron_eopt.matrices.split.Split`."""

_by_name: dict[str, Split] = {}


def declare(pattern: str, split: Split) -> None:
    """Declare the logical matrices of all parameters whose name matches.

    For example ``declare("*.mixer.in_proj.weight", per_shard(z=2048, x=2048, B=128, C=128, dt=32))``. It comes into
    force where :func:`tag_declared` is called, for the parameters that are named to it.

    Args:
        pattern: a glob (fnmatch, case-sensitive) on the whole name.
        split: the logical matrices.

    Raises:
        TypeError: if ``split`` is none.
        ValueError: if the pattern was declared otherwise before.
    """
    if not isinstance(split, Split):
        raise TypeError(f"the logical matrices of {pattern!r} are declared by a Split, got {type(split).__name__}")
    if _by_name.setdefault(pattern, split) != split:
        raise ValueError(f"{pattern!r} is declared already, otherwise: {_by_name[pattern]}")


def undeclare(pattern: str) -> None:
    """Take a declaration back; a pattern that was never declared is passed over."""
    _by_name.pop(pattern, None)


def declared_for(name: str) -> Split | None:
    """What was declared for a parameter of this name, None for nothing.

    Raises:
        ValueError: if two patterns match that say different things.
    """
    found = {pattern: split for pattern, split in _by_name.items() if fnmatchcase(name, pattern)}
    if len(set(found.values())) > 1:
        raise ValueError(f"{name} is declared twice, differently: by {' and by '.join(map(repr, found))}")
    return next(iter(found.values()), None)


def tag_declared(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Set the attribute of all parameters for which something was declared; one that has it already keeps it.

    Args:
        named_parameters: as ``model.named_parameters()`` gives them; the patterns see these names.

    Returns:
        The names of those that were tagged.

    Raises:
        ValueError: as :func:`declared_for`; then none is tagged.
    """
    found = [(name, parameter, declared_for(name)) for name, parameter in named_parameters]
    tagged = []
    for name, parameter, split in found:
        if split is not None and getattr(parameter, ATTRIBUTE, None) is None:
            setattr(parameter, ATTRIBUTE, split)
            tagged.append(name)
    return tagged


def declared_split(parameter: Tensor) -> Split | None:
    """What a parameter's attribute declares, None without one.

    Raises:
        ValueError: if it is something else than a Split.
    """
    split: Any = getattr(parameter, ATTRIBUTE, None)
    if split is not None and not isinstance(split, Split):
        raise ValueError(
            f"{ATTRIBUTE} of a parameter of shape {tuple(parameter.shape)} has to be a Split, got "
            f"{type(split).__name__}: see megatron_eopt.matrices"
        )
    return split
