"""Entries from Python: our own dicts, and Megatron's."""

from collections.abc import Mapping
from typing import Any

from megatron_eopt.overrides.errors import OverrideError, SettingError
from megatron_eopt.overrides.known import Known
from megatron_eopt.overrides.rules import Entry, Layer
from megatron_eopt.overrides.selectors import Selector
from megatron_eopt.overrides.settings import WEIGHT_DECAY, check_settings

# Megatron's scheduler takes its largest learning rate from a group's max_lr.
_MEGATRONS_NAMES = {"max_lr": "lr"}


def make_entry(
    selector: object,
    settings: Mapping[str, Any],
    layer: Layer = Layer.PYTHON,
    source: str = "overrides",
    known: Known | None = None,
) -> Entry:
    """One checked entry.

    Args:
        selector: as :meth:`~megatron_eopt.overrides.selectors.Selector.parse` takes it.
        settings: key -> value.
        layer: where it comes from.
        source: the place that errors name.
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
        try:
            place = f"{source}[{_shown(selector)}]"
            entries.append(make_entry(selector, _renamed(settings, place), layer, place, known))
        except OverrideError as error:
            wrong.append(str(error))
    if wrong:
        raise OverrideError("\n".join(wrong))
    return entries


def entries_from_megatron(
    overrides: Mapping[Any, Mapping[str, Any]] | None,
    layer: Layer = Layer.PYTHON,
    source: str = "config_overrides",
    known: Known | None = None,
) -> list[Entry]:
    """Entries from Megatron's ``{ParamKey: ParamGroupOverride}``, None for none.

    Raises:
        OverrideError: as :func:`entries_from_dict`.
    """
    return entries_from_dict(overrides or {}, layer, source, known)


def _renamed(settings: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Settings with our names for Megatron's."""
    if not isinstance(settings, Mapping):
        return settings
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        if (ours := _MEGATRONS_NAMES.get(key, key)) in renamed:
            raise OverrideError(f"{place}: {SettingError(ours, 'max_lr is the same: keep one of the two')}")
        renamed[ours] = value
    if WEIGHT_DECAY not in renamed and renamed.get("start_wd") == renamed.get("end_wd") is not None:
        renamed[WEIGHT_DECAY] = renamed.pop("start_wd")
        del renamed["end_wd"]
    return renamed


def _shown(selector: object) -> str:
    if isinstance(selector, str):
        return repr(selector)
    try:
        return f"'{Selector.parse(selector)}'"
    except OverrideError:
        return repr(selector)
