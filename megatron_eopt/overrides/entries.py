"""An entry: settings for the parameters that a selector takes, and how both are written in Python."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from megatron_eopt.overrides.conditions import (
    AnyOf,
    Attribute,
    Condition,
    Kind,
    Name,
    OfOptimizer,
    ParameterInfo,
    Predicate,
    Rank,
    Regex,
    Shape,
)
from megatron_eopt.overrides.known import Known, OverrideError, SettingError, did_you_mean, listing, shown
from megatron_eopt.overrides.settings import WEIGHT_DECAY, Value, check_settings

Specificity = tuple[Rank, ...]

_WRITTEN: dict[str, Callable[[str], Condition]] = {
    "name": Name,
    "regex": Regex,
    "attr": Attribute,
    "shape": Shape,
    "optimizer": OfOptimizer,
}
_PREFIXES = {"re": Regex, **_WRITTEN}
_PYTHON_ONLY = "predicate"
# Megatron's scheduler takes its largest learning rate from a group's max_lr.
_MEGATRONS_NAMES = {"max_lr": "lr"}


@dataclass(frozen=True)
class Selector:
    """Parameters for which all conditions hold. (Megatron's ``ParamKey`` takes those for which any does.)"""

    conditions: tuple[Condition, ...]

    def __post_init__(self) -> None:
        if not self.conditions:
            raise OverrideError("a selector without conditions: write '*' for every parameter")

    def __str__(self) -> str:
        return " and ".join(map(str, self.conditions))

    @property
    def optimizer(self) -> str | None:
        """The optimizer whose parameters it takes; None if it takes those of any."""
        return next((each.text for each in self.conditions if isinstance(each, OfOptimizer)), None)

    def matches(self, info: ParameterInfo) -> bool:
        """Whether all conditions hold."""
        return all(each.matches(info) for each in self.conditions)

    def specificity(self, info: ParameterInfo) -> Specificity:
        """How specific it is for a parameter that it takes; compare two with ``<``.

        The ranks of its conditions, the most specific first: so two selectors are compared by the most specific
        condition of each, then by the next one, and one that has a further condition comes before one that has not.
        """
        ranks = [each.rank(info) for each in self.conditions]
        return tuple(sorted((rank for rank in ranks if rank[0] != Kind.EVERYTHING), reverse=True))

    @classmethod
    def parse(cls, written: object) -> "Selector":
        """A selector from how it is written.

        Args:
            written: a glob on the name; ``re:``, ``attr:``, ``shape:`` or ``optimizer:`` with what follows; a mapping
                of ``name``, ``regex``, ``attr``, ``shape`` and ``optimizer``, each with one or a list, which all have
                to hold; and from Python also a selector, a condition, a function of :class:`ParameterInfo` with a name,
                or Megatron's ``ParamKey``.

        Raises:
            OverrideError: for anything else, a misspelt kind or shape class, and no regular expression.
        """
        if isinstance(written, Selector):
            return written
        if isinstance(written, Condition):
            return cls((written,))
        if isinstance(written, str):
            return cls((_from_text(written),))
        if isinstance(written, Mapping):
            return cls(tuple(_from_mapping(written)))
        if hasattr(written, "with_name_predicate"):
            return cls((_from_param_key(written),))
        if callable(written):
            return cls((_predicate(written),))
        raise OverrideError(f"expected a glob, or a mapping of {listing(_WRITTEN)}, got {shown(written)}")


def _from_text(written: str) -> Condition:
    match = re.match(r"\s*(\w+)\s*:\s*(.*?)\s*$", written, re.DOTALL)
    if match is None:
        return Name(written.strip())
    kind, text = match.groups()
    return _kind(kind, f" in {written!r}")(text)


def _from_mapping(written: Mapping[Any, Any]) -> Iterator[Condition]:
    for kind, value in written.items():
        if kind == _PYTHON_ONLY and not isinstance(value, str):
            yield from map(_predicate, _several(value))
            continue
        made = _kind(str(kind))
        if value is None or value == []:
            raise OverrideError(f"{kind} has no value")
        for each in _several(value):
            if not isinstance(each, str):
                raise OverrideError(f"expected text for {kind}, got {shown(each)}")
            yield made(each)


def _kind(name: str, where: str = "") -> Callable[[str], Condition]:
    if name == _PYTHON_ONLY:
        raise OverrideError("a predicate is a Python function: it cannot be written as text")
    if name not in _PREFIXES:
        near = did_you_mean(name, _PREFIXES) or f": expected {listing(_PREFIXES)}"
        raise OverrideError(f"unknown kind of selector {name!r}{where}{near}")
    return _PREFIXES[name]


def _from_param_key(key: Any) -> Condition:
    """A condition that holds where any field of a ``ParamKey`` does; predicates need ``ParameterInfo.parameter``."""
    conditions: list[Condition] = [
        *map(Name, _several(key.name)),
        *map(Attribute, _several(key.attr)),
        *(Predicate(each.name, _OfParameter(each, False)) for each in _several(key.predicate)),
        *(Predicate(each.name, _OfParameter(each, True)) for each in _several(key.with_name_predicate)),
    ]
    if not conditions:
        raise OverrideError(f"{key!r} selects nothing: set its name, attr, predicate or with_name_predicate")
    return conditions[0] if len(conditions) == 1 else AnyOf(" or ".join(map(str, conditions)), tuple(conditions))


@dataclass(frozen=True)
class _OfParameter:
    """A predicate of Megatron's, which gets the parameter itself; a class, so that it pickles as well as that does."""

    predicate: Any
    with_name: bool

    def __call__(self, info: ParameterInfo) -> bool:
        if info.parameter is None:
            raise OverrideError(f"predicate {self.predicate.name} needs the parameter {info.name} itself")
        return bool(self.predicate(info.parameter, info.name) if self.with_name else self.predicate(info.parameter))


def _predicate(function: Any) -> Predicate:
    if isinstance(function, Predicate):
        return function
    name = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        raise OverrideError(
            "a predicate needs a name, by which errors call it: use def, or Predicate('NAME', function)"
        )
    return Predicate(name, function)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


class Layer(IntEnum):
    """Where entries come from; of two that are equally specific the later one wins."""

    DEFAULTS = 0
    PYTHON = 1
    FILE = 2
    FLAGS = 3


Order = tuple[Specificity, Layer, Specificity]

_DEFAULTS_AT_MOST: Specificity = ((Kind.SHAPE, 0),)


@dataclass(frozen=True)
class Entry:
    """Settings for the parameters that a selector takes.

    Attributes:
        selector: which parameters.
        settings: as :func:`~megatron_eopt.overrides.settings.check_settings` returns them.
        layer: where it comes from; an entry of the defaults may select nothing.
        source: the file and line, the flag or the dict that it stands in, as in ``overrides.yaml:3``.
    """

    selector: Selector
    settings: Mapping[str, Value] = field(hash=False)
    layer: Layer
    source: str

    def order(self, info: ParameterInfo) -> Order:
        """Its rank for a parameter that it selects: of two entries the higher one wins."""
        own = self.selector.specificity(info)
        return min(own, _DEFAULTS_AT_MOST) if self.layer == Layer.DEFAULTS else own, self.layer, own


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
        own_source = f"{source}[{_key(selector)}]"
        try:
            entries.append(make_entry(selector, _renamed(settings, own_source), layer, own_source, known))
        except OverrideError as error:
            wrong.append(str(error))
    if wrong:
        raise OverrideError("\n".join(wrong))
    return entries


def _renamed(settings: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Settings with our names for Megatron's."""
    if not isinstance(settings, Mapping):
        return settings
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        if (ours := _MEGATRONS_NAMES.get(key, key)) in renamed:
            raise OverrideError(f"{source}: {SettingError(ours, 'max_lr is the same: keep one of the two')}")
        renamed[ours] = value
    if WEIGHT_DECAY not in renamed and renamed.get("start_wd") == renamed.get("end_wd") is not None:
        renamed[WEIGHT_DECAY] = renamed.pop("start_wd")
        del renamed["end_wd"]
    return renamed


def _key(selector: object) -> str:
    if isinstance(selector, str):
        return repr(selector)
    try:
        return f"'{Selector.parse(selector)}'"
    except OverrideError:
        return repr(selector)
