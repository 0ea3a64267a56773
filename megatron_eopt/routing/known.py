"""Optimizers, settings and splits that overrides may name; their errors."""

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin

from torch.optim.optimizer import Optimizer

from megatron_eopt.from_config import constructor_arguments
from megatron_eopt.registry import get_optimizer_entry, list_optimizers
from megatron_eopt.routing.limits import MAX_TEXT

SPLITS = ("none", "default", "all")

# Megatron builds these two, with these arguments; optimizers in the registry are read themselves.
_MEGATRONS_OWN: dict[str, Any] = {
    "adam": lambda: ({"betas": (0.9, 0.999), "eps": 1e-8}, frozenset(), {}),
    "sgd": lambda: ({"momentum": 0.9}, frozenset(), {}),
}
# What every optimizer has.
_COMMON = frozenset({"params", "lr", "weight_decay"})


class OverrideError(ValueError):
    """Mistakes in overrides, a line each, with the source."""


class SettingError(OverrideError):
    """A setting that is unknown or has a wrong value."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(key, what)  # both, for pickle
        self.key, self.what = key, what

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


class _Lazy(UserDict[str, Any]):
    """Values by calls when looked up: they may build optimizers."""

    def __init__(self, calls: Mapping[str, Callable[[], Any]], part: int) -> None:
        super().__init__(calls)
        self.part = part

    def __getitem__(self, name: str) -> Any:
        return self.data[name]()[self.part]


@dataclass(frozen=True)
class Known:
    """Names that settings may have as keys and values."""

    optimizers: Mapping[str, Mapping[str, Any]]  # name -> settings of single parameters -> defaults
    splits: tuple[str, ...] = SPLITS
    fixed: Mapping[str, frozenset[str]] = field(default_factory=dict)  # name -> arguments for all of its parameters
    choices: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)  # name -> settings -> values

    @classmethod
    def registered(cls, further_splits: Iterable[str] = ()) -> "Known":
        """What the registry has now, and Megatron's adam and sgd."""
        classes: dict[str, Any] = {name: get_optimizer_entry(name).optimizer_cls for name in list_optimizers()}
        calls = _MEGATRONS_OWN | {name: partial(_read, each) for name, each in classes.items()}
        return cls(_Lazy(calls, 0), (*SPLITS, *further_splits), _Lazy(calls, 1), _Lazy(calls, 2))

    def having(self, key: str) -> list[str]:
        """The optimizers that have a setting."""
        return sorted(name for name, settings in self.optimizers.items() if key in settings)


def settings_of_groups(optimizer: Optimizer) -> dict[str, Any]:
    """Settings that parameter groups may have, with defaults."""
    own = getattr(optimizer, "settings_of_groups", None)
    return {key: value for key, value in (own() if own else optimizer.defaults).items() if key not in _COMMON}


@cache
def _read(optimizer_cls: Any) -> tuple[dict[str, Any], frozenset[str], dict[str, tuple[str, ...]]]:
    """Settings of a class's groups, its other arguments, and values of those that are choices."""
    try:
        taken = constructor_arguments(optimizer_cls)
    except (TypeError, ValueError):  # a stand-in, or a class that is not Python's
        taken = []
    named = [argument for argument in taken if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)]
    own = {argument.name: None if argument.default is argument.empty else argument.default for argument in named}
    needed = {"lr": 1e-3} if "lr" in own else {}
    own = {key: default for key, default in own.items() if key not in _COMMON}
    try:
        settings = settings_of_groups(optimizer_cls([{"params": []}], **needed))
    except Exception:  # a user's constructor may need anything
        settings = own
    if "split_qkv" in own:
        settings = settings | {"split": "default"}
    choices = {x.name: get_args(x.annotation) for x in named if get_origin(x.annotation) is Literal}
    return settings, frozenset(own.keys() - settings.keys()), choices


def shown(value: object) -> str:
    """A value as the file of the user has it."""
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else f"{value!r:.200}"


def unfit(text: str) -> str:
    """Why a selector, key or value is refused, if so."""
    if len(text) > MAX_TEXT:
        return f"{text[:20]!r}... has {len(text):,} characters, and may have {MAX_TEXT}"
    return "" if text.isprintable() else f"{text!r} has characters that cannot be printed"
