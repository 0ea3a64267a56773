"""Settings of single parameters: who has which, and what a value may be.

Ranges are the optimizers' own: they check them when they are built.
"""

import math
from functools import cache
from typing import Any, get_args

from torch.optim.optimizer import Optimizer

from megatron_eopt.family import SplitName
from megatron_eopt.from_config import constructor_arguments
from megatron_eopt.orthogonalize.choices import near_or_all
from megatron_eopt.registry import get_optimizer_entry, list_optimizers
from megatron_eopt.settings.other_names import meant
from megatron_eopt.settings.records import DecayMethod

SCHEDULED = ("lr", "min_lr", "lr_mult", "weight_decay", "start_wd", "end_wd", "wd_mult")
ENDS = ("start_wd", "end_wd")  # of a weight decay that is not constant
REPLACED = (
    ("weight_decay", "start_wd"),
    ("weight_decay", "end_wd"),
    ("lr", "lr_mult"),
    ("weight_decay", "wd_mult"),
    ("start_wd", "wd_mult"),
    ("end_wd", "wd_mult"),
)
"""An absolute value, and a setting that it replaces."""

OF_ALL: dict[str, Any] = {"optimizer": "adam", **dict.fromkeys(SCHEDULED, 0.0), "exclude": False}
"""Settings that hold whatever the optimizer, with a value of their type."""

# Megatron builds these two, with these arguments; optimizers in the registry are read themselves.
_MEGATRONS_OWN: dict[str, dict[str, Any]] = {"adam": {"betas": (0.9, 0.999), "eps": 1e-8}, "sgd": {"momentum": 0.9}}
_COMMON = ("params", "lr", "weight_decay")  # what every optimizer has


def optimizer_names() -> list[str]:
    """Optimizers that an entry may name."""
    return sorted({*_MEGATRONS_OWN, *list_optimizers()})


def settings_of(optimizer: str) -> dict[str, Any]:
    """Settings that an optimizer has for single parameters, with defaults."""
    if optimizer in list_optimizers():
        made_by: Any = get_optimizer_entry(optimizer).optimizer_cls
        return _read(made_by)
    return _MEGATRONS_OWN.get(optimizer, {})


def settings_of_groups(optimizer: Optimizer) -> dict[str, Any]:
    """Settings that parameter groups may have, with defaults."""
    return {key: value for key, value in optimizer.defaults.items() if key not in _COMMON}


@cache
def _read(optimizer_cls: Any) -> dict[str, Any]:
    try:
        arguments = {argument.name: argument.default for argument in constructor_arguments(optimizer_cls)}
    except (TypeError, ValueError):  # a stand-in, or a class that is not Python's
        arguments = {}
    needed = {"lr": 1e-3} if "lr" in arguments else {}
    try:
        settings = settings_of_groups(optimizer_cls([{"params": []}], **needed))
    except Exception:  # a user's constructor may need anything
        settings = dict.fromkeys(key for key in arguments if key not in _COMMON)
    return settings | ({"split": "default"} if "split_qkv" in arguments else {})


def check_setting(key: str, raw: Any, optimizer: str | None) -> Any:
    """The value of a setting, in the type of the optimizer's own default.

    ``optimizer`` is None as long as it is not known. A ValueError is for a setting that the optimizer does not have,
    and for a value of another type.
    """
    known = dict[str, Any]()
    if optimizer is not None:
        known |= settings_of(optimizer)
    else:
        for name in optimizer_names():
            known |= dict.fromkeys(settings_of(name))
    known |= OF_ALL
    if key not in known:
        what = "unknown setting" if optimizer is None else f"{optimizer} has no such setting of a parameter"
        raise ValueError(f"{what}{meant(key, known) or ': docs/overrides.md lists them'}")
    if key == "split" and isinstance(raw, bool):
        raw = "default" if raw else "none"
    value = _converted(raw, known[key])
    choices = {
        "optimizer": optimizer_names(),
        "split": get_args(SplitName),
        "weight_decay_method": get_args(DecayMethod),  # its default may be None, which says no type
    }.get(key)
    if choices is not None and value not in choices:
        raise ValueError(f"unknown {key} {value!r}{near_or_all(value, choices)}")
    if key in SCHEDULED and value < 0:
        raise ValueError(f"expected a number of at least 0, got {raw!r}")
    return value


def kind_of(default: Any) -> str:
    """What a setting with this default takes, in words."""
    match default:
        case bool():
            return "true or false"
        case int():
            return "a whole number"
        case float():
            return "a number"
        case str():
            return "a text"
        case list() | tuple():
            return f"{len(default)} numbers"
    return "a number, a text, true or false"


def _converted(raw: Any, default: Any) -> Any:
    # all values of a setting are of one type, as Megatron sorts parameter groups by them
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool) and math.isfinite(raw)
    match default:
        case bool() | str():
            if isinstance(raw, type(default)):
                return raw
        case int() | float():
            if is_number and raw == type(default)(raw):
                return type(default)(raw)
        case list() | tuple():
            if isinstance(raw, list | tuple) and len(raw) == len(default):
                return tuple(_converted(each, 0.0) for each in raw)
        case _:
            if isinstance(raw, list | tuple):
                return tuple(_converted(each, None) for each in raw)
            if isinstance(raw, str | bool) or is_number:
                return raw
    raise ValueError(f"expected {kind_of(default)}, got {raw!r}")
