"""An entry: settings for the parameters that a selector takes, and how both are written in Python."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from megatron_eopt.overrides.known import Known, OverrideError
from megatron_eopt.overrides.selectors import Kind, ParameterInfo, Selector, Specificity
from megatron_eopt.overrides.settings import check_settings

Layer = IntEnum("Layer", ["DEFAULTS", "PYTHON", "FILE", "FLAGS"], start=0)
"""Where entries come from; of two that are equally specific the later one wins."""

Order = tuple[Specificity, Layer, Specificity]


@dataclass(frozen=True)
class Entry:
    """Settings for the parameters that a selector takes."""

    selector: Selector
    settings: Mapping[str, Any] = field(hash=False)  # checked
    layer: Layer  # an entry of the defaults may select nothing
    source: str  # the file and line, the flag or the dict that it stands in, as in ``overrides.yaml:3``

    def order(self, info: ParameterInfo) -> Order:
        """Its rank for a parameter that it selects: of two entries the higher one wins."""
        own = self.selector.specificity(info)
        return min(own, ((Kind.SHAPE, 0),)) if self.layer == Layer.DEFAULTS else own, self.layer, own


def make_entry(
    selector: object,
    settings: Mapping[str, Any],
    layer: Layer = Layer.PYTHON,
    source: str = "overrides",
    known: Known | None = None,
) -> Entry:
    """One checked entry.

    Args:
        selector: as :meth:`Selector.parse` takes it.
        settings: key -> value.
        layer: where it comes from.
        source: what errors name.
        known: names that settings may have; those registered if None.

    Raises:
        OverrideError: for what is wrong with the selector or a setting; a line for each, which begins with the source.
    """
    try:
        parsed = Selector.parse(selector)
    except OverrideError as error:
        raise OverrideError(f"{source}: select: {error}") from None
    if not isinstance(settings, Mapping):
        raise OverrideError(f"{source}: expected a mapping of settings, got {settings!r}")
    try:
        return Entry(parsed, check_settings(settings, known or Known.registered(), parsed.optimizer), layer, source)
    except OverrideError as error:
        raise OverrideError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from None


def entries_from_dict(
    overrides: Mapping[Any, Mapping[str, Any]],
    layer: Layer = Layer.PYTHON,
    source: str = "overrides",
    known: Known | None = None,
) -> list[Entry]:
    """Entries from ``{selector: settings}``; a selector may be a ``ParamKey`` and a setting Megatron's ``max_lr``.

    Raises:
        OverrideError: for everything that is wrong with them, a line for each, with the selector.
    """
    known = known or Known.registered()
    entries, wrong = [], []
    for selector, settings in overrides.items():
        shown = repr(selector)
        try:
            if not isinstance(selector, str):
                shown = f"'{Selector.parse(selector)}'"
        except OverrideError:
            pass  # make_entry says what is wrong
        own_source = f"{source}[{shown}]"
        try:
            entries.append(make_entry(selector, _renamed(settings, own_source), layer, own_source, known))
        except OverrideError as error:
            wrong.append(str(error))
    if wrong:
        raise OverrideError("\n".join(wrong))
    return entries


def _renamed(settings: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Settings with our names for Megatron's, whose scheduler takes its largest learning rate from ``max_lr``."""
    if not isinstance(settings, Mapping):
        return settings
    if {"lr", "max_lr"} <= settings.keys():
        raise OverrideError(f"{source}: lr: max_lr is the same: keep one of the two")
    renamed = {"lr" if key == "max_lr" else key: value for key, value in settings.items()}
    if "weight_decay" not in renamed and renamed.get("start_wd") == renamed.get("end_wd") is not None:
        renamed["weight_decay"] = renamed.pop("start_wd")
        del renamed["end_wd"]
    return renamed
