"""One line of the manifest: all that is said of one parameter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
class Row:
    """One parameter. Lists given for tuples become tuples, and dicts are put in the order of their keys.

    Attributes:
        name: global and unwrapped, as in ``decoder.layers.3.mlp.linear_fc1.weight``.
        shape: of the global parameter.
        dtype: of the parameter, as in ``bfloat16``.
        owner: name of the optimizer; None where nobody owns it.
        reason: for this owner, as in ``overrides.yaml:9``.
        layout: where it lies: ``whole``, ``rows over tp 2``, ...
        matrices: the logical ones; none for a parameter that is not orthogonalized.
        update_rms: predicted RMS of the entries of the first update, before the learning rate; None if not known.
        lr: the largest learning rate of the schedule.
        min_lr: the smallest.
        weight_decay: as it is applied.
        settings: further ones that are not the defaults: texts, numbers, bools, None and tuples of these.
        sources: setting -> place that it comes from.
        overruled: what other places say of this parameter, a line each.
        state_bytes: of its optimizer state, over all tensor-parallel ranks of one replica.
        tied_to: name of the parameter that this one is to equal.
        excluded: left without owner on purpose.

    Raises:
        TypeError: for a setting that is no such value, and for a rate or size that is no number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    owner: str | None
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
        settings = {key: _plain(key, value, self.name) for key, value in self.settings.items()}
        plain = {
            "shape": tuple(self.shape),
            "matrices": tuple(self.matrices),
            "settings": _in_order(settings),
            "sources": _in_order(self.sources),
            "overruled": tuple(self.overruled),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def _in_order(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in sorted(found)}


def _plain(key: str, value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(key, each, name) for each in value)
    if isinstance(value, str | bool | int | float | None):
        return value
    raise TypeError(
        f"setting {key!r} of {name} holds {value!r} ({type(value).__name__}): expected text, a number, a bool, None or "
        f"a tuple of these; give its name instead"
    )
