"""What a selector can ask of a parameter: its name, an attribute, its shape, its optimizer.

Every condition says whether it holds, and how specific it is: a :class:`Kind`, and among globs the number of characters
that are no wildcards.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar

from megatron_eopt.overrides.known import OverrideError, did_you_mean, listing


@dataclass(frozen=True)
class ParameterInfo:
    """What conditions look at, so that no model is needed.

    Attributes:
        name: without the wrappers that a name begins with: see :func:`unwrapped`.
        shape: of the whole parameter, not of a shard, so that a selector takes the same at every TP.
        attributes: Megatron's, such as ``is_embedding_or_output_parameter``, ``expert_tp`` and ``allreduce``.
        optimizer: that updates it, once that is known.
        parameter: what predicates of a ``ParamKey`` get; nothing else needs it, and it does not count in a comparison.
    """

    name: str
    shape: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    optimizer: str | None = None
    parameter: Any = field(default=None, compare=False, repr=False)


def unwrapped(name: str) -> str:
    """A parameter's name without the ``module.`` that each wrapper (DDP, Float16Module) puts before it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def is_embedding(info: ParameterInfo) -> bool:
    """Whether it is an embedding or the output layer."""
    return bool(info.attributes.get("is_embedding_or_output_parameter", False))


def is_expert(info: ParameterInfo) -> bool:
    """Whether it belongs to an expert, by either of Megatron's attributes."""
    return bool(info.attributes.get("expert_tp", False)) or not info.attributes.get("allreduce", True)


def is_matrix(info: ParameterInfo) -> bool:
    """Whether it is what Muon takes by default: two dimensions, no embedding and no output layer."""
    return len(info.shape) == 2 and not is_embedding(info)


SHAPES: dict[str, Callable[[ParameterInfo], bool]] = {
    "vector": lambda info: len(info.shape) < 2,
    "matrix": is_matrix,
    "tall": lambda info: is_matrix(info) and info.shape[0] > info.shape[1],
    "wide": lambda info: is_matrix(info) and info.shape[0] < info.shape[1],
    "square": lambda info: is_matrix(info) and info.shape[0] == info.shape[1],
    "stack": lambda info: len(info.shape) > 2,
    "embedding": is_embedding,
    "expert": is_expert,
}


class Kind(IntEnum):
    """How specific a condition is, from the least specific up."""

    EVERYTHING = 0
    OPTIMIZER = 1
    SHAPE = 2
    ATTRIBUTE = 3
    PREDICATE = 4
    REGEX = 5
    GLOB = 6
    NAME = 7


Rank = tuple[int, int]


@dataclass(frozen=True)
class Condition:
    """One question to a parameter; two that are written alike are equal."""

    text: str
    kind: ClassVar[Kind]
    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse a text that can select nothing."""

    def __str__(self) -> str:
        return f"{self.prefix}{self.text}"

    def matches(self, info: ParameterInfo) -> bool:
        """Whether it holds."""
        raise NotImplementedError

    def rank(self, info: ParameterInfo) -> Rank:
        """How specific it is for a parameter for which it holds."""
        return self.kind, 0


@cache
def _compiled(glob: str) -> re.Pattern[str]:
    return re.compile(rf"(?s:.*\.)?{fnmatch.translate(unwrapped(glob))}")


class Name(Condition):
    """A glob on the name: it matches the whole name, or its end after a dot.

    ``linear_qkv.weight`` is meant as ``*.linear_qkv.weight``, and ``layers.0.*`` as ``*.layers.0.*``. Upper and lower
    case differ; ``*`` also runs over dots, ``?`` and ``[ab]`` are one character.

    A glob without wildcards that is the whole name of a parameter is the most specific condition there is.
    """

    kind = Kind.GLOB

    def __post_init__(self) -> None:
        if not self.text:
            raise OverrideError("an empty name selects nothing: write '*' for every parameter")

    def matches(self, info: ParameterInfo) -> bool:
        """Whether the name, or its end after a dot, is like the glob."""
        return _compiled(self.text).match(info.name) is not None

    def rank(self, info: ParameterInfo) -> Rank:
        """A whole name, or a glob with its literal characters; a leading ``*.``, which is implied, does not count."""
        glob = unwrapped(self.text)
        if glob == info.name:
            return Kind.NAME, 0
        literal = len(re.sub(r"\[!?\]?[^\]]*\]|[*?]", "", glob.removeprefix("*.")))
        return (Kind.GLOB, literal) if literal else (Kind.EVERYTHING, 0)


class Regex(Condition):
    """A regular expression that is found anywhere in the name, unless ``^`` and ``$`` say where."""

    kind, prefix = Kind.REGEX, "re:"

    def __post_init__(self) -> None:
        if not self.text:
            raise OverrideError("an empty regular expression selects everything: write '*' for every parameter")
        try:
            re.compile(self.text)
        except re.error as error:
            raise OverrideError(f"{self.text!r} is no regular expression: {error}") from None

    def matches(self, info: ParameterInfo) -> bool:
        """Whether it is found in the name."""
        return re.search(self.text, info.name) is not None


class Attribute(Condition):
    """An attribute of the parameter that is there and true."""

    kind, prefix = Kind.ATTRIBUTE, "attr:"

    def __post_init__(self) -> None:
        if not self.text.isidentifier():
            raise OverrideError(f"{self.text!r} cannot be the name of an attribute")

    def matches(self, info: ParameterInfo) -> bool:
        """Whether it is there and true."""
        return bool(info.attributes.get(self.text, False))


class Shape(Condition):
    """A class of shapes, one of :data:`SHAPES`."""

    kind, prefix = Kind.SHAPE, "shape:"

    def __post_init__(self) -> None:
        if self.text not in SHAPES:
            near = did_you_mean(self.text, SHAPES) or f": expected {listing(SHAPES)}"
            raise OverrideError(f"unknown shape {self.text!r}{near}")

    def matches(self, info: ParameterInfo) -> bool:
        """Whether it is of the class."""
        return SHAPES[self.text](info)


class OfOptimizer(Condition):
    """The optimizer of the parameter, after the entries that set it have been resolved."""

    kind, prefix = Kind.OPTIMIZER, "optimizer:"

    def matches(self, info: ParameterInfo) -> bool:
        """Whether the parameter has that optimizer."""
        return info.optimizer == self.text


@dataclass(frozen=True)
class Predicate(Condition):
    """A Python function with a name, by which two are compared; it pickles if its function does."""

    holds: Callable[[ParameterInfo], bool] = field(compare=False)
    kind, prefix = Kind.PREDICATE, "predicate "

    def matches(self, info: ParameterInfo) -> bool:
        """What the function says."""
        return bool(self.holds(info))


@dataclass(frozen=True)
class AnyOf(Condition):
    """Holds where one of its conditions does, and is as specific as the most specific one that does."""

    conditions: tuple[Condition, ...]

    def matches(self, info: ParameterInfo) -> bool:
        """Whether one of them holds."""
        return any(each.matches(info) for each in self.conditions)

    def rank(self, info: ParameterInfo) -> Rank:
        """That of the most specific one that holds."""
        return max(each.rank(info) for each in self.conditions if each.matches(info))
