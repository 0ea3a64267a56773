"""The names that overrides may use: optimizers, the settings that each has for single parameters, ways to split.

Also the errors for what is wrong in an override, with the known name that is nearest to a misspelt one.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torch.optim.optimizer import Optimizer

from megatron_eopt.registry import get_optimizer_entry, list_optimizers

_Class = Callable[..., Optimizer]

SPLITS = ("none", "default", "all")
SPLIT = "split"

# Megatron builds these two from its config, with these arguments; optimizers in the registry are read themselves.
_MEGATRONS_OWN: dict[str, Callable[[], dict[str, Any]]] = {
    "adam": lambda: {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": lambda: {"momentum": 0.9},
}
# What every optimizer has, and what the table of settings has for all of them.
_OF_ALL = frozenset({"params", "lr", "weight_decay"})


class OverrideError(ValueError):
    """Overrides with mistakes: a line for each, with its source, what is wrong, and the nearest right spelling."""


class SettingError(OverrideError):
    """A setting that is unknown, or has a wrong value.

    Attributes:
        key: of the setting.
        what: what is wrong with it, without the key.
    """

    def __init__(self, key: str, what: str) -> None:
        super().__init__(key, what)  # both, so that it survives pickling
        self.key = key
        self.what = what

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


class _Lazy[T](Mapping[str, T]):
    """Something of every optimizer, found when it is looked up: finding it may build a user's optimizer."""

    def __init__(self, finders: Mapping[str, Callable[[], T]]) -> None:
        self._finders = finders

    def __getitem__(self, name: str) -> T:
        return self._finders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._finders)

    def __len__(self) -> int:
        return len(self._finders)


@dataclass(frozen=True)
class Known:
    """The names that settings may have, as keys and as values.

    Attributes:
        optimizers: name -> the settings that the optimizer has for single parameters -> their defaults.
        splits: ways to split a parameter into logical matrices.
        fixed: name -> the constructor arguments of the optimizer that are the same for all of its parameters.
    """

    optimizers: Mapping[str, Mapping[str, Any]]
    splits: tuple[str, ...] = SPLITS
    fixed: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def registered(cls, further_splits: Iterable[str] = ()) -> "Known":
        """What the registry has now, beside Megatron's adam and sgd."""
        classes: dict[str, _Class] = {name: get_optimizer_entry(name).optimizer_cls for name in list_optimizers()}
        settings = _MEGATRONS_OWN | {name: partial(_settings, classes[name]) for name in classes}
        fixed = {name: partial(_fixed, classes[name]) for name in classes}
        return cls(_Lazy(settings), (*SPLITS, *further_splits), _Lazy(fixed))

    def having(self, key: str) -> list[str]:
        """The optimizers that have a setting."""
        return sorted(name for name, settings in self.optimizers.items() if key in settings)


def settings_of_groups(optimizer: Optimizer) -> dict[str, Any]:
    """The settings that single groups of an optimizer may have: by its own method of this name, else its defaults."""
    own = getattr(optimizer, "settings_of_groups", None)
    return {key: value for key, value in (own() if own else optimizer.defaults).items() if key not in _OF_ALL}


@cache
def _settings(optimizer_cls: _Class) -> dict[str, Any]:
    """Settings of single parameters that the optimizers of a class have, with their defaults.

    Read from an optimizer without parameters. Where a class cannot be built so, its constructor's arguments stand in
    until the run's own optimizer is asked.
    """
    arguments = _arguments(optimizer_cls)
    needed = {"lr": 1e-3} if "lr" in arguments and arguments["lr"].default is inspect.Parameter.empty else {}
    try:
        found = settings_of_groups(optimizer_cls([{"params": []}], **needed))
    except Exception:  # whatever the constructor of a user's class needs, and does not find here
        found = {key: None if each.default is each.empty else each.default for key, each in arguments.items()}
    found = {key: value for key, value in found.items() if key not in _OF_ALL}
    return found | ({SPLIT: "default"} if "split_qkv" in arguments else {})


def _fixed(optimizer_cls: _Class) -> frozenset[str]:
    return frozenset(_arguments(optimizer_cls)) - _settings(optimizer_cls).keys() - _OF_ALL


def _arguments(optimizer_cls: _Class) -> dict[str, inspect.Parameter]:
    """What the constructor of a class takes by name; nothing where it has no signature."""
    try:
        found = inspect.signature(optimizer_cls).parameters
    except (TypeError, ValueError):  # a stand-in for what is not installed, or a class that is not Python's
        return {}
    return {key: each for key, each in found.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def close(name: str, known: Iterable[str]) -> list[str]:
    """The known names that are like another, at most three, the nearest first; a different case is no difference."""
    by_case = {each.lower(): each for each in known}
    wanted = name.lower()

    def likeness(each: str) -> float:
        return difflib.SequenceMatcher(None, each, wanted).ratio()

    # of those that are equally near the first by the alphabet: difflib takes the last
    found = sorted(difflib.get_close_matches(wanted, by_case), key=lambda each: (-likeness(each), each))
    return [by_case[each] for each in found]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``, did you mean 'NAME'?`` with the nearest known name; nothing where none is near."""
    found = close(name, known)
    return f", did you mean {found[0]!r}?" if found else ""


def listing(names: Iterable[str], word: str = "or") -> str:
    """Names as a sentence has them: ``a, b or c``."""
    *rest, last = names
    return f"{', '.join(rest)} {word} {last}" if rest else last


def shown(value: object) -> str:
    """A value as the file of the user has it."""
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else repr(value)
