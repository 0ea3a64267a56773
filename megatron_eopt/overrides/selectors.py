"""Which parameters an entry is for: conditions that all have to hold, how they are written, and which is narrower."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_eopt.overrides.conditions import (
    AnyOf,
    Attribute,
    Condition,
    Kind,
    Name,
    Owner,
    ParameterInfo,
    Predicate,
    Rank,
    Regex,
    Shape,
)
from megatron_eopt.overrides.errors import OverrideError, did_you_mean, listing, nearest, shown

Specificity = tuple[Rank, ...]

_WRITTEN: dict[str, Callable[[str], Condition]] = {
    "name": Name,
    "regex": Regex,
    "attr": Attribute,
    "shape": Shape,
    "optimizer": Owner,
}
_PREFIXES = {"re": "regex"} | {kind: kind for kind in _WRITTEN}
_PYTHON_ONLY = "predicate"


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
    def asks_for_optimizer(self) -> bool:
        """Whether the owner of a parameter has to be known first."""
        return any(isinstance(each, Owner) for each in self.conditions)

    @property
    def optimizer(self) -> str | None:
        """The optimizer that it asks for; None if it takes parameters of any."""
        return next((each.optimizer for each in self.conditions if isinstance(each, Owner)), None)

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
        if isinstance(written, str):
            return cls((_condition(written),))
        if isinstance(written, Mapping):
            return cls(tuple(_conditions(written)))
        if hasattr(written, "with_name_predicate"):
            return cls.from_param_key(written)
        if hasattr(written, "matches") and hasattr(written, "rank"):
            return cls((written,))
        if callable(written):
            return cls((_predicate(written),))
        raise OverrideError(f"expected a glob, or a mapping of {listing(_WRITTEN)}, got {shown(written)}")

    @classmethod
    def from_param_key(cls, key: Any) -> "Selector":
        """A selector from Megatron's ``ParamKey``, which takes what any of its fields takes.

        Its predicates get the parameter itself, so the :class:`ParameterInfo` must have it.

        Raises:
            OverrideError: for a key in which nothing is set.
        """
        conditions: list[Condition] = [
            *map(Name, _several(key.name)),
            *map(Attribute, _several(key.attr)),
            *(Predicate(each.name, _OfParameter(each, False)) for each in _several(key.predicate)),
            *(Predicate(each.name, _OfParameter(each, True)) for each in _several(key.with_name_predicate)),
        ]
        if not conditions:
            raise OverrideError(f"{key!r} selects nothing: set its name, attr, predicate or with_name_predicate")
        return cls((conditions[0] if len(conditions) == 1 else AnyOf(tuple(conditions)),))


@dataclass(frozen=True)
class _OfParameter:
    """A predicate of Megatron's, which asks the parameter itself; a class, so that it pickles as well as that does."""

    predicate: Any
    with_name: bool

    def __call__(self, info: ParameterInfo) -> bool:
        if info.parameter is None:
            raise OverrideError(f"predicate {self.predicate.name} needs the parameter {info.name} itself")
        return bool(self.predicate(info.parameter, info.name) if self.with_name else self.predicate(info.parameter))


def no_match(selector: Selector, parameters: Iterable[ParameterInfo]) -> str:
    """What to say of a selector that takes none of the parameters: the condition that fails, and what is near it."""
    known = list(parameters)
    for condition in selector.conditions:
        if not any(condition.matches(info) for info in known):
            return f"{_quoted(condition)} matches no parameter{_near(condition, known)}"
    return f"no parameter is matched by all of {_quoted(selector)}, though some are by each"


def _condition(written: str) -> Condition:
    match = re.match(r"\s*(\w+)\s*:\s*(.*?)\s*$", written, re.DOTALL)
    if match is None:
        return Name(written.strip())
    kind, what = match.groups()
    if kind == _PYTHON_ONLY:
        raise OverrideError("a predicate is a Python function: it cannot be written as text")
    if kind not in _PREFIXES:
        known = did_you_mean(kind, _PREFIXES) or f": expected {listing(_PREFIXES)}"
        raise OverrideError(f"unknown kind of selector {kind!r} in {written!r}{known}")
    return _WRITTEN[_PREFIXES[kind]](what)


def _conditions(written: Mapping[Any, Any]) -> Iterator[Condition]:
    for kind, value in written.items():
        if kind == _PYTHON_ONLY and not isinstance(value, str):
            yield from map(_predicate, _several(value))
            continue
        if kind == _PYTHON_ONLY:
            raise OverrideError("a predicate is a Python function: it cannot be written as text")
        if kind not in _PREFIXES:
            known = did_you_mean(str(kind), _PREFIXES) or f": expected {listing(_PREFIXES)}"
            raise OverrideError(f"unknown kind of selector {kind!r}{known}")
        if value is None or value == []:
            raise OverrideError(f"{kind} has no value")
        for each in _several(value):
            if not isinstance(each, str):
                raise OverrideError(f"expected text for {kind}, got {shown(each)}")
            yield _WRITTEN[_PREFIXES[kind]](each)


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


def _near(condition: Condition, parameters: list[ParameterInfo]) -> str:
    """The nearest that there is: of names and their ends after a dot, of attributes that are true, of owners."""
    if isinstance(condition, Attribute):
        return did_you_mean(condition.name, {n for info in parameters for n, value in info.attributes.items() if value})
    if isinstance(condition, Owner):
        owners = sorted({info.optimizer for info in parameters if info.optimizer})
        return f": owners are {', '.join(owners)}" if owners else ""
    if isinstance(condition, Name):
        asked = condition.pattern.removeprefix("*.")
    elif isinstance(condition, Regex):
        asked = re.sub(r"[\\^$*+?()\[\]{}|]", "", condition.pattern).replace("..", ".").strip(".")
    else:
        return ""
    numbered = re.search(r"\d+(\.|$)", asked) is not None
    candidates: dict[str, None] = {}
    for info in parameters:
        # layers differ in their number only: without this, a model of many makes as many candidates
        name = info.name if numbered else re.sub(r"(?<=\.)\d+(?=\.)", "*", info.name)
        parts = name.split(".")
        candidates |= dict.fromkeys(".".join(parts[start:]) for start in range(len(parts)))
    found = nearest(asked, candidates)
    return "" if found is None else f", did you mean {found!r}?"


def _quoted(what: object) -> str:
    return f"'{what}'"
