"""What overrides may name: the optimizers, the settings that each has for single parameters, and the ways to split."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer

from megatron_eopt.registry import get_optimizer_entry, list_optimizers

_Class = Callable[..., Optimizer]

SPLITS = ("none", "default", "all")
SPLIT = "split"

# Megatron builds these two from its config, with these arguments; those in the registry say themselves what they have.
_MEGATRONS_OWN: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"momentum": 0.9},
}
# What every optimizer has, and what the table of settings has for all of them.
_OF_ALL = frozenset({"params", "lr", "weight_decay"})


@dataclass(frozen=True)
class Known:
    """The names that settings may have, as keys and as values.

    Attributes:
        optimizers: name -> the settings that the optimizer has for single parameters -> what they are where nobody
            sets them.
        splits: ways to split a parameter into logical matrices.
        fixed: name -> the constructor arguments of the optimizer that are the same for all of its parameters.
    """

    optimizers: Mapping[str, Mapping[str, Any]]
    splits: tuple[str, ...] = SPLITS
    fixed: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def registered(cls, further_splits: Iterable[str] = ()) -> "Known":
        """What the registry has now, beside Megatron's adam and sgd."""
        classes = {name: get_optimizer_entry(name).optimizer_cls for name in list_optimizers()}
        return cls(
            _WhenAsked(_settings, classes, _MEGATRONS_OWN),
            (*SPLITS, *further_splits),
            _WhenAsked(_fixed, classes),
        )


class _WhenAsked[T](Mapping[str, T]):
    """Something of every optimizer, found when it is asked for: finding it may build a user's optimizer."""

    def __init__(
        self,
        find: Callable[[_Class], T],
        classes: Mapping[str, _Class],
        known: Mapping[str, T] | None = None,
    ) -> None:
        self._find, self._classes, self._known = find, classes, dict(known or {})

    def __getitem__(self, name: str) -> T:
        return self._find(self._classes[name]) if name in self._classes else self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._known, *self._classes)))

    def __len__(self) -> int:
        return len({*self._known, *self._classes})


def settings_of_groups(optimizer: Optimizer) -> dict[str, Any]:
    """The settings that single groups of an optimizer may have: what it says itself, else all that groups have."""
    said = getattr(optimizer, "settings_of_groups", None)
    return {key: value for key, value in (said() if said else optimizer.defaults).items() if key not in _OF_ALL}


@cache
def _settings(optimizer_cls: _Class) -> dict[str, Any]:
    """Settings of single parameters that the optimizers of a class have -> their values where nobody sets them.

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
    """What the constructor of a class takes by name; nothing of one that does not say it."""
    try:
        found = inspect.signature(optimizer_cls).parameters
    except (TypeError, ValueError):  # a stand-in for what is not installed, or a class that is not Python's
        return {}
    return {key: each for key, each in found.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
