"""YAML and JSON as values that know their line.

YAML as version 1.2 has it, of which JSON is a part: ``1e-3`` is a number, which version 1.1 takes for text, and ``no``
is text. Nothing is built from tags, and an alias is followed only as deep as a file of overrides goes.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped, unused-ignore]

from megatron_eopt.overrides.errors import OverrideError, shown

Node = Any  # of yaml, which has no types

_PLAIN = "tag:yaml.org,2002:"
_DEEPEST = 4
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"


class _Loader(yaml.SafeLoader):
    """Reads plain scalars by the core schema of YAML 1.2, and merge keys."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("merge", r"<<", "<"),
):  # fmt: skip
    _Loader.add_implicit_resolver(_PLAIN + _tag, re.compile(f"^({_pattern})$"), [*_first, *([""] * (_tag == "null"))])


class NodeError(OverrideError):
    """A mistake at a line; the message is without it."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(line, what)
        self.line = line
        self.what = what

    def __str__(self) -> str:
        return self.what


class Pair(NamedTuple):
    """A key of a mapping, its line, and what it stands for."""

    key: Node
    line: int
    value: Node


def compose(path: Path) -> Node:
    """The root of a file; None for one that is empty.

    Raises:
        NodeError: for a file that is no text, no YAML or, by its name, no JSON.
        OSError: for one that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise NodeError(line, "this is no UTF-8 text") from None
    if path.suffix.lower() == ".json":
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise NodeError(error.lineno, f"this is no JSON: {error.msg}, at column {error.colno}") from None
        text = text.replace("\t", " ")  # no text of JSON has a tab in it, and YAML takes none before a value
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise NodeError(mark.line + 1, f"this is no YAML: {_problem(error, text.splitlines(), mark)}") from None
    except yaml.YAMLError as error:
        raise NodeError(1, f"this is no YAML: {str(error).splitlines()[0]}") from None
    if root is not None:
        _check_tag(root)
    return root


def line(node: Node) -> int:
    """The line on which a node begins, counted from 1."""
    return node.start_mark.line + 1


def is_mapping(node: Node) -> bool:
    """Whether it is a mapping."""
    return isinstance(node, yaml.MappingNode)


def is_list(node: Node) -> bool:
    """Whether it is a list."""
    return isinstance(node, yaml.SequenceNode)


def plain(node: Node, depth: int = 0) -> Any:
    """The value of a node: text, a number, true or false, None, or lists and mappings of them.

    Raises:
        NodeError: for a tag, a key that is there twice, and a value that lies too deep.
    """
    if depth > _DEEPEST:
        raise NodeError(line(node), f"values lie more than {_DEEPEST} deep")
    _check_tag(node)
    if is_list(node):
        return [plain(each, depth + 1) for each in node.value]
    if is_mapping(node):
        return {plain(each.key, depth + 1): plain(each.value, depth + 1) for each in pairs(node)}
    kind, text = node.tag.removeprefix(_PLAIN), node.value
    try:
        return _SCALARS.get(kind, str)(text)
    except ValueError:
        raise NodeError(line(node), f"{text!r} is no {kind}") from None


def pairs(node: Node, depth: int = 0) -> list[Pair]:
    """What a mapping has: its own keys, and those of mappings that ``<<`` merges into it where it has not.

    Raises:
        NodeError: for a key that is there twice, and for a merge of what is no mapping.
    """
    _check_tag(node)
    own: dict[Any, Pair] = {}
    merged: list[Pair] = []
    for key, value in node.value:
        if key.tag == f"{_PLAIN}merge":
            merged.extend(_merged(value, depth))
            continue
        name = _key(key)
        if name in own:
            raise NodeError(line(key), f"{name}: is here a second time, the first is on line {own[name].line}")
        own[name] = Pair(key, line(key), value)
    for pair in merged:
        own.setdefault(_key(pair.key), pair)
    return list(own.values())


def _check_tag(node: Node) -> None:
    if node.tag not in _TAGS:
        raise NodeError(line(node), f"{node.tag.replace(_PLAIN, '!!')} is a tag: write plain values")


def _key(node: Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise NodeError(line(node), "a key is text, not a list or a mapping")
    return plain(node)


def _merged(node: Node, depth: int) -> Iterator[Pair]:
    if depth >= _DEEPEST:
        raise NodeError(line(node), f"merges lie more than {_DEEPEST} deep")
    for each in node.value if is_list(node) else [node]:
        if not is_mapping(each):
            raise NodeError(line(node), "<<: merges mappings only")
        yield from pairs(each, depth + 1)


def _boolean(text: str) -> bool:
    return text.lower() == "true"


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, Callable[[str], Any]] = {"null": lambda text: None, "bool": _boolean, "int": int, "float": _float}
_TAGS = {_PLAIN + kind for kind in (*_SCALARS, "str", "seq", "map", "merge")}


def _problem(error: Any, lines: list[str], mark: Any) -> str:
    problem = error.problem or error.context
    here = lines[mark.line] if mark.line < len(lines) else ""
    hint = ""
    if "alias" in f"{error.context} {error.problem}":
        hint = f": quote a selector that begins with *, as in {shown('*.weight')}"
    elif "\\t" in problem or here.startswith("\t"):
        hint = ": indent by blanks"
    return f"{problem}{hint}"
