"""A line of the manifest: everything that is known of one parameter, also as plain values."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_NUMBER = re.compile(r"\s*\b[0-9]+\b")
# Fields that have another key among plain values.
_KEYS = {"name": "pattern", "optimizer": "owner"}


@dataclass(frozen=True)
class LogicalMatrix:
    """A matrix that an update is orthogonalized as.

    Attributes:
        name: within its parameter, as ``q`` or ``expert 3 gate``; empty for a parameter that is one matrix.
        rows: of the global matrix (outputs).
        cols: its columns (inputs).
        scheme: how it is orthogonalized: local, duplicated, owner, ...
        scale: factor from the orthogonal factor to the update.
    """

    name: str
    rows: int
    cols: int
    scheme: str
    scale: float


@dataclass(frozen=True)
class ManifestRow:
    """One parameter. Lists given for tuples become tuples, and dicts are put in the order of their keys.

    Attributes:
        name: global and unwrapped, as in ``decoder.layers.3.mlp.linear_fc1.weight``.
        shape: of the global parameter.
        dtype: of the parameter, as in ``bfloat16``.
        optimizer: name of the one that updates it; None where none does. Files have it under the key ``owner``.
        reason: for this optimizer, as in ``overrides.yaml:9``.
        layout: how ranks share it: ``whole``, ``rows over tp 2``, ...
        matrices: the logical ones; none for a parameter that is not orthogonalized.
        update_rms: predicted RMS of the entries of the first update, before the learning rate; None if not known.
        lr: the largest learning rate of the schedule.
        min_lr: the smallest.
        weight_decay: as it is applied.
        settings: further ones that are not the defaults: texts, numbers, bools, None and tuples of these.
        sources: setting -> the file and line, or the flag, that set it.
        overruled: settings of this parameter from other sources, which did not win, a line each.
        state_bytes: of its optimizer state, over all tensor-parallel ranks of one replica.
        tied_to: name of the parameter that this one is to equal.
        excluded: left without an optimizer on purpose.

    Raises:
        TypeError: for a setting that is no such value, and for a rate or size that is no number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: str | None
    reason: str
    layout: str
    matrices: tuple[LogicalMatrix, ...]
    update_rms: float | None
    lr: float
    min_lr: float
    weight_decay: float
    # dicts have no hash; two rows that differ in these only are still unequal
    settings: dict[str, Any] = field(hash=False)
    sources: dict[str, str] = field(hash=False)
    overruled: tuple[str, ...]
    state_bytes: int
    tied_to: str | None
    excluded: bool

    def __post_init__(self) -> None:
        for key in ("lr", "min_lr", "weight_decay", "state_bytes"):
            value = getattr(self, key)
            if not isinstance(value, int | float):
                raise TypeError(f"{key} of {self.name} is {value!r} ({type(value).__name__}): expected a number")
        for key in ("shape", "matrices", "overruled"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        settings = {key: _plain(key, value, self.name) for key, value in self.settings.items()}
        object.__setattr__(self, "settings", dict(sorted(settings.items())))
        object.__setattr__(self, "sources", dict(sorted(self.sources.items())))

    @property
    def sizes(self) -> str:
        """Names and sizes of the logical matrices: ``q 64x64, k 32x64``, and ``8 q 16x64`` for 8 heads of one size."""
        named = (f"{_NUMBER.sub('', each.name).strip()} {each.rows}x{each.cols}".strip() for each in self.matrices)
        return ", ".join(size if number == 1 else f"{number:,} {size}" for size, number in Counter(named).items())


def _plain(key: str, value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(key, each, name) for each in value)
    if isinstance(value, str | bool | int | float | None):
        return value
    raise TypeError(
        f"setting {key!r} of {name} holds {value!r} ({type(value).__name__}): expected text, a number, a bool, None or "
        f"a tuple of these; give its name instead"
    )


def to_plain(row: ManifestRow) -> dict[str, Any]:
    """Dicts, lists, texts, numbers, bools and None by key: what ``json`` gives back as it was."""
    return {_KEYS.get(key, key): as_lists(value) for key, value in asdict(row).items()}


def from_plain(written: Mapping[str, Any]) -> ManifestRow:
    """The row that went into :func:`to_plain`.

    Raises:
        ValueError: for a key that is missing or unknown, and for a value that is not of its field's type.
    """
    kinds = {_KEYS.get(name, name): kind for name, kind in get_type_hints(ManifestRow).items()}
    for key in sorted(kinds.keys() ^ written.keys()):
        raise ValueError(f"{key!r} is {'missing' if key in kinds else 'unknown'}")
    for key, kind in kinds.items():
        if not _is(written[key], kind):
            raise ValueError(f"{key!r} cannot be {short(written[key])}")
    values = {name: written[_KEYS.get(name, name)] for name in ManifestRow.__dataclass_fields__}
    return ManifestRow(**values | {"matrices": [LogicalMatrix(**each) for each in written["matrices"]]})


def _is(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a type, as the fields of :class:`ManifestRow` declare theirs."""
    inner = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_is(value, each) for each in inner)
    if kind is Any and not isinstance(value, list | tuple):
        return any(_is(value, each) for each in (type(None), bool, str, int, float))
    if kind is Any or get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is(each, inner[0] if inner else Any) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(k, inner[0]) and _is(v, inner[1]) for k, v in value.items())
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return isinstance(value, dict) and value.keys() == kinds.keys() and all(_is(value[k], kinds[k]) for k in kinds)
    if kind is float:
        return _is(value, int) or (isinstance(value, float) and not math.isnan(value))
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def as_lists(value: Any) -> Any:
    """Tuples as lists, as json gives them back."""
    if isinstance(value, dict):
        return {key: as_lists(inner) for key, inner in value.items()}
    return [as_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def short(value: Any) -> str:
    """A value as an error shows it."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
