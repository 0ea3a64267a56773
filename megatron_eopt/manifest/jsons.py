"""The manifest as plain values, for a file and for the common state of a checkpoint."""

import math
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron_eopt.manifest.families import Family, compressed, expanded, in_order, join_name, merged, split_name
from megatron_eopt.manifest.row import LogicalMatrix, ManifestRow

FORMAT = 1
"""Counts up with every change that an older release cannot read."""

_KEYS = {"name": "pattern", "optimizer": "owner"}
"""Fields of a row that have another key in a file."""

# The keys of a family with the types of their values. What is there of members is checked when they are expanded.
_TYPES = {_KEYS.get(name, name): kind for name, kind in get_type_hints(ManifestRow).items()} | {"members": tuple}
_ADVICE = "take that of another checkpoint"


def to_json(families: Iterable[Family]) -> dict[str, Any]:
    """Dicts, lists, texts, numbers, bools and None: what ``json`` gives back as it was.

    Args:
        families: as :func:`~megatron_eopt.manifest.families.families` or ``merged`` returns them.
    """
    return {"format": FORMAT, "families": [_written(family) for family in in_order(families)]}


def from_json(manifest: Any) -> list[Family]:
    """The families, equal to those that went in.

    Raises:
        ValueError: for a newer format, and for anything that :func:`to_json` does not write.
    """
    if not isinstance(manifest, dict) or not _is(manifest.get("format"), int):
        raise ValueError(f"no manifest: expected a dict with its format number, got {_short(manifest)}")
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"the manifest has format {manifest['format']}, and this release of megatron_eopt reads up to {FORMAT}: "
            f"install the release that wrote it, or a later one"
        )
    written = manifest.get("families")
    if manifest["format"] < 1 or not isinstance(written, list | tuple):
        raise ValueError(f"the manifest is damaged: expected format {FORMAT} and a list of families; {_ADVICE}")
    found = [_family(each, index) for index, each in enumerate(written)]
    try:
        sound = merged([found]) == found
    except ValueError as error:
        raise ValueError(f"the manifest is damaged: {error}; {_ADVICE}") from error
    if not sound:
        raise ValueError(f"the manifest is damaged: its families are not in order, or one is there twice; {_ADVICE}")
    return found


def _written(family: Family) -> dict[str, Any]:
    row = {_KEYS.get(key, key): _lists(value) for key, value in asdict(family.like).items()}
    return {"pattern": row.pop("pattern"), "members": _lists(family.members), **row}


def _lists(value: Any) -> Any:
    """Tuples as lists, as json gives them back."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list | tuple) else value


def _family(written: Any, index: int) -> Family:
    """One family, checked.

    Raises:
        ValueError: naming the family and what is wrong with it.
    """

    def damaged(what: str) -> ValueError:
        pattern = written.get("pattern", "") if isinstance(written, dict) else ""
        return ValueError(f"the manifest is damaged: family {index} ({pattern}): {what}; {_ADVICE}")

    if not isinstance(written, dict):
        raise damaged(f"expected a dict, got {_short(written)}")
    for key in sorted(_TYPES.keys() ^ written.keys()):
        raise damaged(f"{key!r} is {'missing' if key in _TYPES else 'unknown'}")
    for key, kind in _TYPES.items():
        if not _is(written[key], kind):
            raise damaged(f"{key!r} cannot be {_short(written[key])}")
    row = {key: written[_KEYS.get(key, key)] for key in ManifestRow.__dataclass_fields__}
    row["matrices"] = [LogicalMatrix(**matrix) for matrix in row["matrices"]]
    family = Family(ManifestRow(**row), _tuples(written["members"]))
    if not _fits(family):
        raise damaged(f"'members' cannot be {_short(written['members'])}")
    return family


def _is(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a type, as the fields of :class:`ManifestRow` declare theirs."""
    inner = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_is(value, each) for each in inner)
    if kind is Any and not isinstance(value, list | tuple):
        return any(_is(value, each) for each in (type(None), bool, str, int, float))
    if kind in (Any, tuple) or get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is(each, inner[0] if inner else Any) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(k, inner[0]) and _is(v, inner[1]) for k, v in value.items())
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return isinstance(value, dict) and value.keys() == kinds.keys() and all(_is(value[k], kinds[k]) for k in kinds)
    if kind is float:
        return _is(value, int) or (isinstance(value, float) and not math.isnan(value))
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def _fits(family: Family) -> bool:
    """Whether these are the members of a pattern, in the form that :func:`compressed` gives them."""
    try:
        indices = expanded(family.members)
        name = join_name(family.pattern, indices[0])
        return split_name(name) == (family.pattern, indices[0]) and compressed(indices) == family.members
    except (TypeError, ValueError, IndexError):
        return False


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
