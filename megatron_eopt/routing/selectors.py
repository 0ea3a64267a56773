"""Selectors of parameters, and how specific they are.

A selector has conditions on the name, an attribute, the shape or the optimizer of a parameter. Its specificity follows
from their :class:`Kind`, and among globs from the number of characters that are no wildcards.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, partial
from typing import Any

from megatron_eopt.orthogonalize.choices import near_or_all


class OverrideError(ValueError):
    """Mistakes in overrides, a line each, with the source."""


@dataclass(frozen=True)
class ParameterInfo:
    """What conditions look at, instead of a model."""

    name: str  # unwrapped
    shape: tuple[int, ...]  # of the whole parameter, so that a selector takes the same at every TP
    # Megatron's, such as ``is_embedding_or_output_parameter``, ``expert_tp`` and ``allreduce``
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    optimizer: str | None = None  # once that is known
    parameter: Any = field(default=None, compare=False, repr=False)  # for predicates of a ``ParamKey``

    @property
    def is_embedding(self) -> bool:
        """Whether it is an embedding or the output layer."""
        return bool(self.attributes.get("is_embedding_or_output_parameter", False))

    @property
    def is_matrix(self) -> bool:
        """Whether it is Muon's by default: two dimensions, no embedding."""
        return len(self.shape) == 2 and not self.is_embedding


def unwrapped(name: str) -> str:
    """The name without a leading ``module.`` for each wrapper."""
    return re.sub(r"^(module\.)+", "", name)


SHAPES = ("vector", "matrix", "tall", "wide", "square", "stack", "embedding", "expert")


def has_shape(info: ParameterInfo, shape: str) -> bool:
    """Whether a parameter is of one of :data:`SHAPES`."""
    match shape:
        case "vector":
            return len(info.shape) < 2
        case "stack":
            return len(info.shape) > 2
        case "embedding":
            return info.is_embedding
        case "expert":
            return bool(info.attributes.get("expert_tp")) or not info.attributes.get("allreduce", True)
    if not info.is_matrix:
        return False
    rows, cols = info.shape
    match shape:
        case "tall":
            return rows > cols
        case "wide":
            return rows < cols
        case "square":
            return rows == cols
    return True


# What a condition asks for, from the least specific up.
Kind = IntEnum("Kind", ["EVERYTHING", "OPTIMIZER", "SHAPE", "ATTR", "PREDICATE", "REGEX", "NAME", "WHOLE_NAME"])
_WRITTEN = ("name", "re", "regex", "attr", "shape", "optimizer")  # kinds in texts and mappings
_PREFIXES = {Kind.NAME: "", Kind.REGEX: "re:", Kind.PREDICATE: "predicate "}

Specificity = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Condition:
    """One condition; two that are written alike are equal.

    A glob matches the whole name, or its end after a dot: ``linear_qkv.weight`` means ``*.linear_qkv.weight``. Case
    counts, and ``*`` also matches dots. A glob without wildcards that equals the whole name is the most specific
    condition. A regular expression is found anywhere in the name.
    """

    kind: Kind
    text: str  # of a predicate, its name
    holds: Callable[[ParameterInfo], bool] | None = field(default=None, compare=False)  # of a predicate

    def __str__(self) -> str:
        return _PREFIXES.get(self.kind, f"{self.kind.name.lower()}:") + self.text

    def matches(self, info: ParameterInfo) -> bool:
        """Whether it holds for a parameter."""
        match self.kind:
            case Kind.NAME:
                return _of_glob(self.text).search(info.name) is not None
            case Kind.REGEX:
                return re.search(self.text, info.name) is not None
            case Kind.ATTR:
                return bool(info.attributes.get(self.text, False))
            case Kind.SHAPE:
                return has_shape(info, self.text)
            case Kind.OPTIMIZER:
                return info.optimizer == self.text
        return self.holds is not None and bool(self.holds(info))

    def rank(self, info: ParameterInfo) -> tuple[int, int]:
        """How specific it is for a parameter that it matches."""
        if self.kind != Kind.NAME:
            return self.kind, 0
        glob = unwrapped(self.text)
        if glob == info.name:
            return Kind.WHOLE_NAME, 0
        # without the leading *., which is implied
        literal = len(re.sub(r"\[!?\]?[^\]]*\]|[*?]", "", glob.removeprefix("*.")))
        return (Kind.NAME, literal) if literal else (Kind.EVERYTHING, 0)


@cache
def _of_glob(glob: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.){fnmatch.translate(unwrapped(glob))}")


Predicate = partial(Condition, Kind.PREDICATE)
"""``Predicate(NAME, FUNCTION)``: compared by the name; it pickles if the function does."""


@dataclass(frozen=True)
class Selector:
    """Parameters for which all conditions hold."""

    conditions: tuple[Condition, ...]
    any_of: bool = False  # any is enough, as in Megatron's ``ParamKey``

    def __str__(self) -> str:
        return (" or " if self.any_of else " and ").join(map(str, self.conditions))

    @property
    def optimizer(self) -> str | None:
        """The optimizer of whose parameters it takes some."""
        return next((condition.text for condition in self.conditions if condition.kind == Kind.OPTIMIZER), None)

    def matches(self, info: ParameterInfo) -> bool:
        """Whether it takes a parameter."""
        return (any if self.any_of else all)(condition.matches(info) for condition in self.conditions)

    def specificity(self, info: ParameterInfo) -> Specificity:
        """How specific it is for a parameter that it takes.

        The ranks of its conditions, the highest first, to compare with ``<``; with ``any_of`` only the highest that
        holds.
        """
        ranks = [condition.rank(info) for condition in self.conditions if condition.matches(info)]
        ranks = sorted((rank for rank in ranks if rank[0] != Kind.EVERYTHING), reverse=True)
        return tuple(ranks[:1] if self.any_of else ranks)

    @classmethod
    def parse(cls, written: object) -> "Selector":
        """A selector from how it is written, or an :class:`OverrideError` or ``re.error``.

        Text is a glob on the name, or begins with ``re:``, ``attr:``, ``shape:`` or ``optimizer:``. A mapping has
        ``name``, ``regex``, ``attr``, ``shape`` and ``optimizer``, each with one or a list, which all have to hold.
        Python also has selectors, conditions, named functions of :class:`ParameterInfo`, and Megatron's ``ParamKey``.
        """
        if isinstance(written, Selector):
            return written
        conditions = tuple(_conditions(written))
        if not conditions:
            raise OverrideError(
                f"expected a glob, or a mapping of name, regex, attr, shape or optimizer, got {written!r}; '*' is for "
                f"every parameter"
            )
        return cls(conditions, any_of=hasattr(written, "with_name_predicate"))


def _conditions(written: Any) -> Iterator[Condition]:
    if isinstance(written, Condition):
        yield written
    elif isinstance(written, str):
        match = re.fullmatch(r"\s*(\w+)\s*:(.*)", written, re.DOTALL)
        name, text = match.groups() if match else ("name", written)
        yield _condition(name, text)
    elif isinstance(written, Mapping):
        for name, value in written.items():
            for each in _several(value):
                yield _condition(name, each)
    elif hasattr(written, "with_name_predicate"):
        for each in _several(written.name):
            yield Condition(Kind.NAME, each)
        for each in _several(written.attr):
            yield Condition(Kind.ATTR, each)
        for each in _several(written.predicate):
            yield Predicate(each.name, partial(_says, each))
        for each in _several(written.with_name_predicate):
            yield Predicate(each.name, partial(_says_of_name, each))
    elif callable(written):
        yield Predicate(getattr(written, "__name__", repr(written)), written)


def _condition(name: str, value: Any) -> Condition:
    if name not in _WRITTEN or not isinstance(value, str):
        raise OverrideError(f"expected text for one of {', '.join(_WRITTEN)}, got {value!r} for {name}")
    text = value.strip()
    if not text:  # as a regular expression it would select every parameter
        raise OverrideError("an empty text selects nothing: write '*' for every parameter")
    if name == "shape" and text not in SHAPES:
        raise OverrideError(f"unknown shape {text!r}{near_or_all(text, SHAPES)}")
    if name in ("re", "regex"):
        re.compile(text)
        name = "regex"
    return Condition(Kind[name.upper()], text)


def _says(predicate: Any, info: ParameterInfo) -> bool:
    return bool(predicate(info.parameter))


def _says_of_name(predicate: Any, info: ParameterInfo) -> bool:
    return bool(predicate(info.parameter, info.name))


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
