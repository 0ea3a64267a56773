"""The settings that a parameter can have of its own: their types, their ranges, and which optimizers have them."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, get_args

from megatron_eopt.orthogonalize.coefficients import get_coefficients, get_supported_coefficient_types
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.overrides.errors import OverrideError, SettingError, did_you_mean, listing, shown
from megatron_eopt.registry import get_optimizer_entry, list_optimizers

# A bool, an int, a float, a text or a tuple of floats; all values of one setting are of one type, as Megatron sorts
# parameter groups by them.
Value = Any

SPLITS = ("none", "default", "all")

# Arguments of Megatron's own optimizers; those in the registry say themselves what they take.
_MEGATRONS_OWN = {"adam": frozenset({"betas", "eps"}), "sgd": frozenset({"momentum"})}


@dataclass(frozen=True)
class Known:
    """The names that settings may have as values.

    Attributes:
        optimizers: name -> the constructor arguments of the optimizer.
        splits: ways to split a parameter into logical matrices.
    """

    optimizers: Mapping[str, frozenset[str]]
    splits: tuple[str, ...] = SPLITS

    @classmethod
    def registered(cls, further_splits: Iterable[str] = ()) -> "Known":
        """What the registry has now, beside Megatron's adam and sgd."""
        optimizers = dict(_MEGATRONS_OWN)
        for name in list_optimizers():
            signature = inspect.signature(get_optimizer_entry(name).optimizer_cls)
            optimizers[name] = frozenset(signature.parameters)
        return cls(optimizers, (*SPLITS, *further_splits))


@dataclass(frozen=True)
class Number:
    """A number from ``low`` to below ``high``; ``low`` itself is allowed unless ``above``."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    whole: bool = False

    @property
    def expected(self) -> str:
        """The range in words."""
        noun = "a whole number" if self.whole else "a number"
        if self.high < math.inf:
            return f"{noun} in [{self.low:g}, {self.high:g})"
        return f"{noun} {'above' if self.above else 'of at least'} {self.low:g}"

    def __call__(self, raw: object, known: Known) -> Value:
        """The number, as an int if it is whole and else as a float."""
        if isinstance(raw, str) and _is_number(raw):
            raise ValueError(f"expected {self.expected}, got the text {raw!r}: write it without quotes")
        if not self._holds(raw):
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return int(raw) if self.whole else float(raw)  # type: ignore[call-overload, arg-type]

    def _holds(self, raw: object) -> bool:
        if not isinstance(raw, Real) or isinstance(raw, bool):
            return False
        value = float(raw)
        return (
            self.low <= value < self.high and not (self.above and value == self.low) and not (self.whole and value % 1)
        )


@dataclass(frozen=True)
class Betas:
    """Two numbers, each in [0, 1), as a tuple."""

    expected = "two numbers in [0, 1), as [0.9, 0.95]"

    def __call__(self, raw: object, known: Known) -> Value:
        """The two as a tuple, which can be hashed."""
        if not isinstance(raw, list | tuple) or len(raw) != 2:
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        try:
            first, second = (Number(high=1)(each, known) for each in raw)
        except ValueError:
            raise ValueError(f"expected {self.expected}, got {shown(raw)}") from None
        return float(first), float(second)


@dataclass(frozen=True)
class Choice:
    """One of a few names; true and false may stand for two of them."""

    what: str
    expected: str
    names: Callable[[Known], Iterable[str]]
    booleans: tuple[str, str] | None = None

    def __call__(self, raw: object, known: Known) -> Value:
        """The name."""
        if isinstance(raw, bool) and self.booleans:
            return self.booleans[raw]
        names = list(self.names(known))
        if raw not in names:
            near = did_you_mean(raw, names) if isinstance(raw, str) else ""
            raise ValueError(f"unknown {self.what} {shown(raw)}{near or f': expected {listing(names)}'}")
        return str(raw)


@dataclass(frozen=True)
class YesNo:
    """True or false."""

    expected = "true or false"

    def __call__(self, raw: object, known: Known) -> Value:
        """The same."""
        if not isinstance(raw, bool):
            raise ValueError(f"expected {self.expected}, got {shown(raw)}")
        return raw


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: its name.
        check: makes its value from what was written, or raises ``ValueError``.
        meaning: a line for the documentation.
        argument: which constructor argument an optimizer has that can be set so; None for what every one has.
    """

    key: str
    check: Number | Betas | Choice | YesNo
    meaning: str
    argument: str | None = field(default=None)

    def applies_to(self, optimizer: str, known: Known) -> bool:
        """Whether an optimizer has this setting; one that nobody knows is not judged."""
        arguments = known.optimizers.get(optimizer)
        return self.argument is None or arguments is None or self.argument in arguments

    def optimizers(self, known: Known) -> list[str]:
        """Those that have it."""
        return sorted(name for name in known.optimizers if self.applies_to(name, known))


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
    Setting("wd_mult", Number(), "multiplies the weight decay"),
    Setting("betas", Betas(), "decay rates of the moments", "betas"),
    Setting("eps", Number(above=True), "added to the root of the second moment", "eps"),
    Setting("momentum", Number(high=1), "decay rate of the momentum", "momentum"),
    Setting("num_ns_steps", Number(low=1, whole=True), "Newton-Schulz steps", "num_ns_steps"),
    Setting(
        "coefficient_type",
        Choice(
            "coefficient type",
            listing(get_supported_coefficient_types()),
            lambda known: get_supported_coefficient_types(),
        ),
        "the Newton-Schulz coefficients",
        "coefficient_type",
    ),
    Setting(
        "scale_mode",
        Choice("scale mode", listing(get_args(ScaleMode)), lambda known: get_args(ScaleMode)),
        "how the size of an update follows from the shape",
        "scale_mode",
    ),
    Setting("extra_scale_factor", Number(above=True), "multiplies the update", "extra_scale_factor"),
    Setting("rank", Number(low=1, whole=True), "of the factors that a weight becomes", "rank"),
    Setting(
        "split",
        Choice("split", listing(SPLITS), lambda known: known.splits, ("none", "default")),
        "the logical matrices; false is none, true is default",
        "split_qkv",
    ),
    Setting("exclude", YesNo(), "no optimizer owns the parameter, and it keeps its value"),
)
SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _TABLE}

# An absolute value, and what multiplies it.
MULTIPLIERS = {"lr": "lr_mult", "weight_decay": "wd_mult"}


def check_setting(key: object, raw: object, known: Known) -> Value:
    """The value of one setting, of the type that it always has.

    Raises:
        SettingError: for an unknown key and for a value out of range, with the nearest right spelling.
    """
    if not isinstance(key, str) or key not in SETTINGS:
        near = did_you_mean(str(key), SETTINGS) or f": expected {listing(SETTINGS)}"
        raise SettingError(str(key), f"unknown setting{near}")
    try:
        return SETTINGS[key].check(raw, known)
    except ValueError as error:
        raise SettingError(key, str(error)) from None


def conflicts(settings: Mapping[str, Value], known: Known) -> list[SettingError]:
    """What cannot stand together in the settings of one entry; the later one of two is to blame."""
    found = []
    order = list(settings)
    for absolute, multiplier in MULTIPLIERS.items():
        if absolute in settings and multiplier in settings:
            later, earlier = sorted((absolute, multiplier), key=order.index, reverse=True)
            found.append(SettingError(later, f"cannot stand beside {earlier}: keep one of the two"))
    others = [key for key in order if key != "exclude"]
    if settings.get("exclude") and others:
        found.append(SettingError("exclude", f"an excluded parameter has no settings: remove {' and '.join(others)}"))
    found.extend(inconsistent(settings))
    if (optimizer := settings.get("optimizer")) is not None:
        found.extend(does_not_apply(key, str(optimizer), known) for key in foreign(settings, str(optimizer), known))
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
    """Settings that an optimizer has not."""
    return [key for key in settings if not SETTINGS[key].applies_to(optimizer, known)]


def does_not_apply(key: str, optimizer: str, known: Known) -> SettingError:
    """The error for a setting that an optimizer has not."""
    owners = SETTINGS[key].optimizers(known)
    hint = f": it is a setting of {listing(owners, 'and')}" if owners else ""
    return SettingError(key, f"{optimizer} has no {key}{hint}")


def check_settings(raw: Mapping[str, Any], known: Known) -> dict[str, Value]:
    """The settings of one entry.

    Raises:
        OverrideError: for what is wrong, each with its key, a line for each.
    """
    values, wrong = {}, []
    for key, value in raw.items():
        try:
            values[key] = check_setting(key, value, known)
        except SettingError as error:
            wrong.append(error)
    wrong += conflicts(values, known)
    if wrong:
        raise OverrideError("\n".join(map(str, wrong)))
    if not values:
        raise OverrideError(f"no settings: expected one or more of {', '.join(SETTINGS)}")
    return values


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
