"""The manifest in checkpoints and ``--optimizer-manifest-file``."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from reprlib import repr as short
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from megatron_eopt.routing.patterns import (
    LogicalMatrix,
    ManifestRow,
    Members,
    ParamPattern,
    as_tuples,
    in_order,
    merged,
)

FORMAT = 1  # counts up with every change that an older release cannot read
_KEYS = {"name": "pattern", "optimizer": "owner"}  # field of a row -> key
_KINDS = {_KEYS.get(name, name): kind for name, kind in get_type_hints(ManifestRow).items()} | {"members": Members}


def to_json(families: Iterable[ParamPattern]) -> dict[str, Any]:
    """Patterns as values that survive JSON."""
    written = []
    for family in in_order(families):
        of_row = {_KEYS.get(key, key): value for key, value in asdict(family.like).items()}
        written.append({"pattern": family.pattern, "members": family.members} | of_row)
    return json.loads(json.dumps({"format": FORMAT, "families": written}))


def write_json(families: Iterable[ParamPattern], file: str) -> None:
    """Write patterns to a file; ``ValueError`` where that fails."""
    try:
        Path(file).write_text(json.dumps(to_json(families), indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"the manifest cannot be written to {file}: {error.strerror}; give another file") from error


def from_json(manifest: Any) -> list[ParamPattern]:
    """The patterns; ``ValueError`` for what :func:`to_json` never writes."""
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if type(number) is not int:
        raise ValueError(f"no manifest: expected a dict with its format number, got {short(manifest)}")
    if number > FORMAT:
        raise ValueError(
            f"the manifest has format {number}, and this release of megatron_eopt reads up to {FORMAT}: install the "
            f"release that wrote it, or a later one"
        )
    try:
        written = manifest.get("families")
        if number < 1 or not isinstance(written, list | tuple):
            raise ValueError(f"expected format {FORMAT} and a list of families")
        families = [_family(family, index) for index, family in enumerate(written)]
        if merged([families]) != families:
            raise ValueError("its families are not in order, or one is there twice")
    except ValueError as error:
        raise ValueError(f"the manifest is damaged: {error}; take that of another checkpoint") from None
    return families


def _family(written: Any, index: int) -> ParamPattern:
    if (mistake := _mistake(written)) is None:
        values = {name: written[_KEYS.get(name, name)] for name in ManifestRow.__dataclass_fields__}
        values["matrices"] = [LogicalMatrix(**matrix) for matrix in written["matrices"]]
        family = ParamPattern(ManifestRow(**values), as_tuples(written["members"], "members"))
        if family.is_sound:
            return family
        mistake = f"'members' cannot be {short(written['members'])}"
    pattern = written.get("pattern", "") if isinstance(written, dict) else ""
    raise ValueError(f"family {index} ({pattern}): {mistake}")


def _mistake(written: Any) -> str | None:
    if not isinstance(written, dict):
        return f"expected a dict, got {short(written)}"
    for key in sorted(_KINDS.keys() ^ written.keys()):
        return f"{key!r} is {'missing' if key in _KINDS else 'unknown'}"
    wrong = (f"{key!r} cannot be {short(written[key])}" for key, kind in _KINDS.items() if not _is(written[key], kind))
    return next(wrong, None)


def _is(value: Any, kind: Any) -> bool:
    inner = get_args(kind)
    if kind is Any:
        return _is(value, str | bool | int | float | None) or _is(value, tuple[Any, ...])
    if get_origin(kind) is UnionType:
        return any(_is(value, each) for each in inner)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is(each, inner[0]) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(each, inner[1]) for each in value.values())
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return isinstance(value, dict) and value.keys() == kinds.keys() and all(_is(value[k], kinds[k]) for k in kinds)
    if kind is float:
        return _is(value, int) or (isinstance(value, float) and not math.isnan(value))
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
