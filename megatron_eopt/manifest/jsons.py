"""The manifest as plain values, for a file and for the common state of a checkpoint."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

from megatron_eopt.manifest.family import Family, in_order, merged
from megatron_eopt.manifest.members import Members, compressed, expanded, join_name, split_name
from megatron_eopt.manifest.row import LogicalMatrix, Row

FORMAT = 1
"""Counts up with every change that an older release cannot read."""


def to_json(families: Iterable[Family]) -> dict[str, Any]:
    """Dicts, lists, texts, numbers, bools and None: what ``json`` gives back as it was.

    Args:
        families: as :func:`~megatron_eopt.manifest.family.families` or ``merged`` returns them.
    """
    return {"format": FORMAT, "families": [_said(family) for family in in_order(families)]}


def from_json(manifest: Any) -> list[Family]:
    """The families, equal to those that went in.

    Raises:
        ValueError: for a newer format, and for anything that :func:`to_json` does not write.
    """
    if not isinstance(manifest, dict) or not _whole(manifest.get("format")):
        raise ValueError(f"no manifest: expected a dict with its format number, got {_short(manifest)}")
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"the manifest has format {manifest['format']}, and this release of megatron_eopt reads up to {FORMAT}: "
            f"install the release that wrote it, or a later one"
        )
    said = manifest.get("families")
    if manifest["format"] < 1 or not isinstance(said, list | tuple):
        raise ValueError(f"the manifest is damaged: expected format {FORMAT} and a list of families; {_ADVICE}")
    found = [_family(each, place) for place, each in enumerate(said)]
    try:
        sound = merged([found]) == found
    except ValueError as error:
        raise ValueError(f"the manifest is damaged: {error}; {_ADVICE}") from error
    if not sound:
        raise ValueError(f"the manifest is damaged: its families are not in order, or one is there twice; {_ADVICE}")
    return found


_ADVICE = "take that of another checkpoint"


def _said(family: Family) -> dict[str, Any]:
    said = asdict(family.like)
    del said["name"]
    return {"pattern": family.pattern, "members": _lists(family.members), **_lists(said)}


def _lists(value: Any) -> Any:
    """Tuples as lists, as json gives them back."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list | tuple) else value


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and not math.isnan(value))


def _wholes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_whole, value))


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_text, value))


def _simple(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_simple, value))
    return value is None or isinstance(value, bool) or _text(value) or _number(value)


def _dict_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and _texts(list(value)) and all(map(check, value.values()))


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _matrices(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, dict)
        and each.keys() == _OF_A_MATRIX.keys()
        and all(check(each[key]) for key, check in _OF_A_MATRIX.items())
        for each in value
    )


_OF_A_MATRIX: dict[str, Callable[[Any], bool]] = {
    "name": _text,
    "rows": _whole,
    "cols": _whole,
    "scheme": _text,
    "scale": _number,
}

_OF_A_FAMILY: dict[str, Callable[[Any], bool]] = {
    "pattern": _text,
    "members": _simple,
    "shape": _wholes,
    "dtype": _text,
    "owner": _or_none(_text),
    "reason": _text,
    "layout": _text,
    "matrices": _matrices,
    "update_rms": _or_none(_number),
    "lr": _number,
    "min_lr": _number,
    "weight_decay": _number,
    "settings": _dict_of(_simple),
    "sources": _dict_of(_text),
    "overruled": _texts,
    "state_bytes": _whole,
    "tied_to": _or_none(_text),
    "excluded": lambda value: isinstance(value, bool),
}


def _family(said: Any, place: int) -> Family:
    """One family, checked.

    Raises:
        ValueError: naming the family and what is wrong with it.
    """
    if not isinstance(said, dict):
        raise _damaged(place, {}, f"expected a dict, got {_short(said)}")
    for key in sorted(_OF_A_FAMILY.keys() ^ said.keys()):
        raise _damaged(place, said, f"{key!r} is {'missing' if key in _OF_A_FAMILY else 'unknown'}")
    for key, check in _OF_A_FAMILY.items():
        if not check(said[key]):
            raise _damaged(place, said, f"{key!r} cannot be {_short(said[key])}")
    matrices = tuple(LogicalMatrix(**matrix) for matrix in said["matrices"])
    others = {field.name: said[field.name] for field in fields(Row) if field.name not in ("name", "matrices")}
    family = Family(Row(name=said["pattern"], matrices=matrices, **others), _tuples(said["members"]))
    if not _fit(family.pattern, family.members):
        raise _damaged(place, said, f"'members' cannot be {_short(said['members'])}")
    return family


def _fit(pattern: str, members: Members) -> bool:
    """Whether these are the members of a pattern, in the form that :func:`compressed` gives them."""
    try:
        indices = expanded(members)
        return split_name(join_name(pattern, indices[0])) == (pattern, indices[0]) and compressed(indices) == members
    except (TypeError, ValueError, IndexError):
        return False


def _damaged(place: int, said: dict[str, Any], what: str) -> ValueError:
    name = said.get("pattern", "")
    return ValueError(f"the manifest is damaged: family {place} ({name}): {what}; {_ADVICE}")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
