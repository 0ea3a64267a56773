"""Values of single parameters' settings, and which optimizers have them."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, get_args

from megatron_eopt.orthogonalize.choices import close, listing, near_or_all
from megatron_eopt.orthogonalize.coefficients import MAX_STEPS, get_coefficients, get_supported_coefficient_types
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.routing.known import SPLITS, Known, SettingError, shown


@dataclass(frozen=True)
class Check:
    """What a value may be; ``expected`` tells checks apart.

    A value is a bool, an int, a float, a text or a tuple of floats. All values of one setting are of one type, as
    Megatron sorts parameter groups by them.
    """

    expected: str  # in words
    # what was written -> the value, or None if it is none; a ``ValueError`` says more
    convert: Callable[[Any, Known], Any] = field(compare=False)

    def __call__(self, raw: object, known: Known) -> Any:
        """The value; ``ValueError`` for what is none."""
        value = self.convert(raw, known)
        if value is None:
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return value


def _number(where: str = "", inside: Callable[[float], bool] = math.isfinite, whole: bool = False) -> Check:
    expected = ("a whole number" if whole else "a number") + where

    def convert(raw: Any, known: Known) -> Any:
        if isinstance(raw, str) and re.fullmatch(r"[-+]?\.?\d[\d.]*([eE][-+]?\d+)?", raw):
            raise ValueError(f"expected {expected}, got the text {shown(raw)}: write it without quotes")
        if not isinstance(raw, Real) or isinstance(raw, bool):
            return None
        with suppress(OverflowError):  # an integer larger than any float
            value = float(raw)
            if math.isfinite(value) and inside(value) and not (whole and value % 1):
                return int(value) if whole else value
        return None

    return Check(expected, convert)


def _numbers(count: int, check: Check, expected: str) -> Check:

    def convert(raw: Any, known: Known) -> Any:
        if not isinstance(raw, list | tuple) or len(raw) != count:
            return None
        try:
            return tuple(check(value, known) for value in raw)
        except ValueError:
            return None

    return Check(expected, convert)


def _choice(
    what: str, expected: str, names: Callable[[Known], Iterable[str]], booleans: tuple[str, str] | None = None
) -> Check:

    def convert(raw: Any, known: Known) -> Any:
        if isinstance(raw, bool) and booleans:
            return booleans[raw]
        choices = list(names(known))
        if raw not in choices:
            raise ValueError(f"unknown {what} {shown(raw)}{near_or_all(raw, choices)}")
        return str(raw)

    return Check(expected, convert)


def _of_type(kind: Any, expected: str) -> Check:
    return Check(expected, lambda raw, known: raw if isinstance(raw, kind) else None)


_COEFFICIENTS, _SCALES = get_supported_coefficient_types(), get_args(ScaleMode)
_BOOL = _of_type(bool, "true or false")
_RATES = ("lr", "min_lr", "lr_mult", "weight_decay", "start_wd", "end_wd", "wd_mult")
_ABOVE_0 = _number(" above 0", lambda value: value > 0)
_FRACTION = _number(" in [0, 1)", lambda value: 0 <= value < 1)

SETTINGS: dict[str, Check] = {
    "optimizer": _choice("optimizer", "adam, sgd or a registered name", lambda known: sorted(known.optimizers)),
    **dict.fromkeys(_RATES, _number(" of at least 0", lambda value: value >= 0)),
    "betas": _numbers(2, _FRACTION, "two numbers in [0, 1), as [0.9, 0.95]"),
    "eps": _ABOVE_0,
    "momentum": _FRACTION,
    "num_ns_steps": _number(f" in [1, {MAX_STEPS}]", lambda value: 1 <= value <= MAX_STEPS, whole=True),
    "coefficient_type": _choice("coefficient type", listing(_COEFFICIENTS), lambda known: _COEFFICIENTS),
    "scale_mode": _choice("scale mode", listing(_SCALES), lambda known: _SCALES),
    "extra_scale_factor": _ABOVE_0,
    "rank": _number(" of at least 1", lambda value: value >= 1, whole=True),
    "split": _choice("split", listing(SPLITS), lambda known: known.splits, ("none", "default")),
    "exclude": _BOOL,
}
"""Settings with known ranges, explained in docs/reference/overrides.md; optimizers have further ones."""

OF_ALL = frozenset(["optimizer", *_RATES, "exclude"])
"""Settings that hold whatever the optimizer."""

ENDS = ("start_wd", "end_wd")  # of a weight decay that is not constant
REPLACED = (
    *(("weight_decay", end) for end in ENDS),
    ("lr", "lr_mult"),
    *((each, "wd_mult") for each in ("weight_decay", *ENDS)),
)
"""An absolute value, and a setting that it replaces: an entry has one of the two."""

NO_SETTINGS = f"no settings: expected one or more of {', '.join(SETTINGS)}"


def check_of(key: str, optimizer: str | None, known: Known) -> Check:
    """The check of an optimizer's setting.

    By the table, or the optimizer's own choices for a choice in it, unless the optimizer's own default would not pass:
    then by that default's type, and the optimizer checks the range when it is built.
    """
    check, own = SETTINGS.get(key), known.optimizers.get(optimizer or "")
    if check is not None and (names := known.choices.get(optimizer or "", {}).get(key)):
        check = _choice(key.replace("_", " "), listing(names), lambda known: names)
    default: Any = None
    if own is not None and key not in OF_ALL:
        default = own[key]
        try:
            if check is not None:
                check(default, known)
        except ValueError:
            check = None
    if check is not None:
        return check
    match default:
        case bool():
            return _BOOL
        case Real():
            return _number(whole=isinstance(default, int))
        case str():
            return _of_type(str, "a text")
        case [*several] if all(isinstance(each, Real) for each in several):
            return _numbers(len(several), _number(), f"{len(several)} numbers")
    return _of_type(str | bool | Real, "a number, a text, true or false")


def check_setting(key: object, raw: object, known: Known, optimizer: str | None = None) -> Any:
    """The checked value, or a :class:`SettingError`; None is any optimizer."""
    if not isinstance(key, str) or not (key in SETTINGS or known.having(key)) or foreign([key], optimizer, known):
        raise refusal(str(key), optimizer, known)
    optimizers = [optimizer] if optimizer in known.optimizers else known.having(key)
    wrong = []
    for check in dict.fromkeys(check_of(key, name, known) for name in optimizers or [None]):
        try:
            return check(raw, known)
        except ValueError as error:
            wrong.append(error)
    raise SettingError(key, str(wrong[0])) from None


def foreign(settings: Iterable[str], optimizer: str | None, known: Known) -> list[str]:
    """Settings that a known optimizer has not."""
    own = known.optimizers.get(optimizer or "")
    return [] if own is None else [key for key in settings if key not in OF_ALL and key not in own]


def refusal(key: str, optimizer: str | None, known: Known) -> SettingError:
    """The error for a setting that an optimizer has not."""
    own = known.optimizers.get(optimizer or "")
    names = sorted(known.fixed) if own is None else [str(optimizer)]
    if fixed := [name for name in names if key in known.fixed.get(name, ())]:
        have, their = ("have", "their") if len(fixed) > 1 else ("has", "its")
        what = f"{have} one {key} for all {their} parameters, which is set for the run alone"
        return SettingError(key, f"{listing(fixed, 'and')} {what}")
    others = known.having(key)
    if own is not None:
        has = [*(setting for setting in SETTINGS if setting in OF_ALL), *sorted(own)]
        near = close(key, has)
        if key not in SETTINGS and not others:
            hint = f", did you mean {near[0]!r}?" if near else f": {optimizer} has {listing(has, 'and')}"
            return SettingError(key, f"unknown setting{hint}")
        hint = f": it is a setting of {listing(others, 'and')}" if others else ""
        return SettingError(key, f"{optimizer} has no {key}{hint}{f'; did you mean its {near[0]!r}?' if near else ''}")
    near = close(key, {*SETTINGS, *(setting for has in known.optimizers.values() for setting in has)})
    if not near:
        expected = f"{listing(SETTINGS)}, or another of the optimizer of the parameter"
        return SettingError(key, f"unknown setting: expected {expected}")
    if near[0] in OF_ALL:
        near = near[:1]
    of = [repr(x) if x in OF_ALL else f"{x!r} of {listing(known.having(x), 'and')}" for x in near]
    return SettingError(key, f"unknown setting, did you mean {'; or '.join(of)}?")


def inconsistent(settings: Mapping[str, Any]) -> list[SettingError]:
    """Errors of values that do not go together."""
    wrong = []
    if (low := settings.get("min_lr")) is not None and (high := settings.get("lr")) is not None and low > high:
        wrong.append(SettingError("min_lr", f"{low:g} is above lr, which is {high:g}"))
    steps, coefficients = settings.get("num_ns_steps"), settings.get("coefficient_type")
    if steps is not None and coefficients is not None:
        try:
            get_coefficients(coefficients, steps)
        except ValueError as error:
            wrong.append(SettingError("num_ns_steps", str(error)))
    return wrong


def checked(raw: Mapping[Any, Any], known: Known, optimizer: str | None) -> tuple[dict[str, Any], list[SettingError]]:
    """An entry's right settings, and errors of the others."""
    values, wrong = dict[str, Any](), list[SettingError]()
    given = raw.get("optimizer")
    for key, value in raw.items():
        try:
            values[key] = check_setting(key, value, known, given if isinstance(given, str) else optimizer)
        except SettingError as error:
            wrong.append(error)
    order = list(values)
    for pair in REPLACED:
        if values.keys() >= set(pair):
            earlier, later = sorted(pair, key=order.index)
            wrong.append(SettingError(later, f"cannot stand beside {earlier}: keep one of the two"))
    others = [key for key in order if key != "exclude"]
    if values.get("exclude") and others:
        wrong.append(SettingError("exclude", f"an excluded parameter has no settings: remove {' and '.join(others)}"))
    return values, wrong + inconsistent(values)
