"""A line of the manifest: everything that is known of one parameter."""

import re
from collections import Counter
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
        settings = {key: as_tuples(value, f"setting {key!r} of {self.name}") for key, value in self.settings.items()}
        object.__setattr__(self, "settings", dict(sorted(settings.items())))
        object.__setattr__(self, "sources", dict(sorted(self.sources.items())))

    @property
    def sizes(self) -> str:
        """Names and sizes of the logical matrices: ``q 64x64, k 32x64``, and ``8 q 16x64`` for 8 heads of one size."""
        unnumbered = ((re.sub(r"\s*\b[0-9]+\b", "", each.name).strip(), each) for each in self.matrices)
        named = (f"{name} {each.rows}x{each.cols}".strip() for name, each in unnumbered)
        return ", ".join(size if number == 1 else f"{number:,} {size}" for size, number in Counter(named).items())


def as_tuples(value: Any, what: str) -> Any:
    """Lists as tuples, all the way down; a ``TypeError`` that names ``what`` for other values than JSON has."""
    if isinstance(value, list | tuple):
        return tuple(as_tuples(each, what) for each in value)
    if isinstance(value, str | bool | int | float | None):
        return value
    raise TypeError(
        f"{what} holds {value!r} ({type(value).__name__}): expected text, a number, a bool, None or a tuple of these; "
        f"give its name instead"
    )
