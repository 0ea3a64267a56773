"""The settings that a parameter can have of its own: which optimizers have them, and what is said of wrong ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from megatron_eopt.orthogonalize.coefficients import get_coefficients, get_supported_coefficient_types
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.overrides.errors import OverrideError, SettingError, close, listing, nearest
from megatron_eopt.overrides.known import SPLITS, Known
from megatron_eopt.overrides.values import Betas, Check, Choice, Number, Value, YesNo, check_like


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: its name.
        check: makes its value from what was written, or raises ``ValueError``.
        meaning: a line for the documentation.
        of_all: whether every optimizer has it; else those have it that say so themselves.
    """

    key: str
    check: Check
    meaning: str
    of_all: bool = True

    def optimizers(self, known: Known) -> list[str]:
        """Those that have it."""
        return sorted(known.optimizers) if self.of_all else _having(self.key, known)


_TABLE = (
    Setting(
        "optimizer",
        Choice("optimizer", "adam, sgd or a registered name", lambda known: sorted(known.optimizers)),
        "the owner",
    ),
    Setting("lr", Number(), "the largest learning rate of the schedule"),
    Setting("min_lr", Number(), "the smallest learning rate of the schedule"),
    Setting("lr_mult", Number(), "multiplies lr, and min_lr where no entry sets it"),
    Setting("weight_decay", Number(), "weight decay"),
    Setting("start_wd", Number(), "weight decay at the start of Megatron's schedule of it"),
    Setting("end_wd", Number(), "weight decay at the end of that schedule"),
    Setting("wd_mult", Number(), "multiplies the weight decay"),
    Setting("betas", Betas(), "decay rates of the moments", of_all=False),
    Setting("eps", Number(above=True), "added to the root of the second moment", of_all=False),
    Setting("momentum", Number(high=1), "decay rate of the momentum", of_all=False),
    Setting("num_ns_steps", Number(low=1, whole=True), "Newton-Schulz steps", of_all=False),
    Setting(
        "coefficient_type",
        Choice(
            "coefficient type",
            listing(get_supported_coefficient_types()),
            lambda known: get_supported_coefficient_types(),
        ),
        "the Newton-Schulz coefficients",
        of_all=False,
    ),
    Setting(
        "scale_mode",
        Choice("scale mode", listing(get_args(ScaleMode)), lambda known: get_args(ScaleMode)),
        "how the size of an update follows from the shape",
        of_all=False,
    ),
    Setting("extra_scale_factor", Number(above=True), "multiplies the update", of_all=False),
    Setting("rank", Number(low=1, whole=True), "of the factors that a weight becomes", of_all=False),
    Setting(
        "split",
        Choice("split", listing(SPLITS), lambda known: known.splits, ("none", "default")),
        "the logical matrices; false is none, true is default",
        of_all=False,
    ),
    Setting("exclude", YesNo(), "no optimizer owns the parameter, and it keeps its value"),
)
SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _TABLE}
"""Settings whose values have a range that is known here. Optimizers have further ones: see :func:`further_settings`."""

OF_ALL = frozenset(setting.key for setting in _TABLE if setting.of_all)
"""Those that Megatron or this package obeys, whatever the optimizer."""

# An absolute value, and what multiplies it.
MULTIPLIERS = {"lr": "lr_mult", "weight_decay": "wd_mult", "start_wd": "wd_mult", "end_wd": "wd_mult"}

WEIGHT_DECAY, ENDS = "weight_decay", ("start_wd", "end_wd")
"""A weight decay that is constant, and the two ends of one that is not."""


def further_settings(known: Known) -> list[tuple[str, str, list[str]]]:
    """Settings that single optimizers have beside those of :data:`SETTINGS`: key, what a value is, the optimizers."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(known.optimizers):
        for key in known.optimizers[name].keys() - SETTINGS:
            found.setdefault((key, check_of(key, name, known).expected), []).append(name)
    return [(key, expected, names) for (key, expected), names in sorted(found.items())]


def check_of(key: str, optimizer: str | None, known: Known) -> Check:
    """What a value of a setting is checked by, for the parameters of an optimizer that has it.

    That of the table, unless the optimizer's own default would not pass it: then values are to be like that.
    """
    if key in OF_ALL or optimizer is None or optimizer not in known.optimizers:
        return SETTINGS[key].check if key in SETTINGS else check_like(None)
    default = known.optimizers[optimizer][key]
    if key not in SETTINGS:
        return check_like(default)
    try:
        SETTINGS[key].check(default, known)
    except ValueError:
        return check_like(default)
    return SETTINGS[key].check


def check_setting(key: object, raw: object, known: Known, optimizer: str | None = None) -> Value:
    """The value of one setting, of the type that it always has.

    Args:
        key: of the setting.
        raw: what was written.
        known: names that settings may have.
        optimizer: of the parameters, where that is known; else the setting of any is taken.

    Raises:
        SettingError: for a key that the optimizer has not, and for a value out of range, with what is near.
    """
    if not isinstance(key, str) or not (key in SETTINGS or _having(key, known)):
        raise _unknown(str(key), known, optimizer)
    if optimizer is not None and foreign([key], optimizer, known):
        raise does_not_apply(key, optimizer, known)
    owners = _having(key, known) if optimizer is None or optimizer not in known.optimizers else [optimizer]
    checks = [check_of(key, owner, known) for owner in owners] or [check_of(key, None, known)]
    wrong = []
    for check in dict.fromkeys(checks):
        try:
            return check(raw, known)
        except ValueError as error:
            wrong.append(error)
    raise SettingError(key, str(wrong[0])) from None


def conflicts(settings: Mapping[str, Value]) -> list[SettingError]:
    """What cannot stand together in the settings of one entry; the later one of two is to blame."""
    found = []
    order = list(settings)
    for absolute, other in (*MULTIPLIERS.items(), *((WEIGHT_DECAY, end) for end in ENDS)):
        if absolute in settings and other in settings:
            later, earlier = sorted((absolute, other), key=order.index, reverse=True)
            found.append(SettingError(later, f"cannot stand beside {earlier}: keep one of the two"))
    others = [key for key in order if key != "exclude"]
    if settings.get("exclude") and others:
        found.append(SettingError("exclude", f"an excluded parameter has no settings: remove {' and '.join(others)}"))
    found.extend(inconsistent(settings))
    return found


def inconsistent(settings: Mapping[str, Value]) -> list[SettingError]:
    """Values that are right by themselves and not together."""
    found = []
    if (low := settings.get("min_lr")) is not None and (high := settings.get("lr")) is not None and low > high:
        found.append(SettingError("min_lr", f"{low:g} is above lr, which is {high:g}"))
    steps, coefficients = settings.get("num_ns_steps"), settings.get("coefficient_type")
    if steps is not None and coefficients is not None:
        try:
            get_coefficients(coefficients, steps)
        except ValueError as error:
            found.append(SettingError("num_ns_steps", str(error)))
    return found


def foreign(settings: Iterable[str], optimizer: str, known: Known) -> list[str]:
    """Settings that an optimizer has not; one that nobody knows is not judged."""
    has = known.optimizers.get(optimizer)
    return [] if has is None else [key for key in settings if key not in OF_ALL and key not in has]


def does_not_apply(key: str, optimizer: str, known: Known) -> SettingError:
    """The error for a setting that an optimizer has not, with the nearest that it has."""
    if key in known.fixed.get(optimizer, ()):
        return SettingError(key, f"{optimizer} has one {key} for all its parameters, which is set for the run alone")
    owners = _having(key, known)
    hint = f": it is a setting of {listing(owners, 'and')}" if owners else ""
    near = nearest(key, [*OF_ALL, *known.optimizers.get(optimizer, ())])
    return SettingError(key, f"{optimizer} has no {key}{hint}" + (f"; did you mean its {near!r}?" if near else ""))


def _having(key: str, known: Known) -> list[str]:
    return sorted(name for name, has in known.optimizers.items() if key in has)


def _unknown(key: str, known: Known, optimizer: str | None) -> SettingError:
    """The error for a key that no optimizer has, with what is near among those that the parameter can have."""
    if optimizer is not None and optimizer in known.optimizers:
        if key in known.fixed.get(optimizer, ()):
            return does_not_apply(key, optimizer, known)
        has = [*(each for each in SETTINGS if each in OF_ALL), *sorted(known.optimizers[optimizer])]
        near = nearest(key, has)
        hint = f", did you mean {near!r}?" if near else f": {optimizer} has {listing(has, 'and')}"
        return SettingError(key, f"unknown setting{hint}")
    fixed = sorted(name for name, arguments in known.fixed.items() if key in arguments)
    if fixed:
        have, their = ("have", "their") if len(fixed) > 1 else ("has", "its")
        what = f"{have} one {key} for all {their} parameters, which is set for the run alone"
        return SettingError(key, f"{listing(fixed, 'and')} {what}")
    found = close(key, {*SETTINGS, *(each for has in known.optimizers.values() for each in has)})
    if not found:
        return SettingError(
            key, f"unknown setting: expected {listing(SETTINGS)}, or another of the optimizer of the parameter"
        )
    if found[0] in OF_ALL:
        return SettingError(key, f"unknown setting, did you mean {found[0]!r}?")
    of = [repr(each) if each in OF_ALL else f"{each!r} of {listing(_having(each, known), 'and')}" for each in found]
    return SettingError(key, f"unknown setting, did you mean {'; or '.join(of)}?")


def named_optimizer(written: object, selected: str | None) -> str | None:
    """The optimizer of the parameters of an entry, from what it sets and from what it selects by; None for any."""
    return written if isinstance(written, str) else selected


def check_settings(raw: Mapping[str, Any], known: Known, optimizer: str | None = None) -> dict[str, Value]:
    """The settings of one entry.

    Args:
        raw: what was written.
        known: names that settings may have.
        optimizer: the one that the entry selects by; one that it sets comes before.

    Raises:
        OverrideError: for what is wrong, each with its key, a line for each.
    """
    values, wrong = {}, []
    optimizer = named_optimizer(raw.get("optimizer"), optimizer)
    for key, value in raw.items():
        try:
            values[key] = check_setting(key, value, known, optimizer)
        except SettingError as error:
            wrong.append(error)
    wrong += conflicts(values)
    if wrong:
        raise OverrideError("\n".join(map(str, wrong)))
    if not values:
        raise OverrideError(f"no settings: expected one or more of {', '.join(SETTINGS)}")
    return values
