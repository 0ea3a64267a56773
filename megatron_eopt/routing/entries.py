"""Entries: a selector and settings, from Python or a file.

A file is a list of entries, each a mapping of ``select`` and settings; or a mapping of selectors to settings. YAML is
read as version 1.2, which contains JSON: ``1e-3`` is a number and ``no`` is text, unlike in version 1.1. Nothing is
built from tags, and :mod:`~megatron_eopt.routing.limits` bounds what is read.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped, unused-ignore]

from megatron_eopt.orthogonalize.choices import did_you_mean
from megatron_eopt.routing.known import Known, OverrideError, shown, unfit
from megatron_eopt.routing.limits import MAX_DEPTH, MAX_FILE_BYTES, MAX_MISTAKES, MAX_SETTINGS, MAX_VALUES
from megatron_eopt.routing.selectors import Kind, ParameterInfo, Predicate, Selector, Specificity
from megatron_eopt.routing.settings import NO_SETTINGS, SETTINGS, checked

# Where entries come from; of two that are equally specific the later one wins.
Layer = IntEnum("Layer", ["DEFAULTS", "PYTHON", "FILE", "FLAGS"], start=0)
Order = tuple[Specificity, Layer, Specificity]


@dataclass(frozen=True)
class Entry:
    """Settings for the parameters of a selector."""

    selector: Selector
    settings: Mapping[str, Any] = field(hash=False)  # checked
    layer: Layer  # an entry of the defaults may select nothing
    source: str  # file and line, flag or dict, as in ``overrides.yaml:3``
    mistakes: tuple[str, ...] = ()  # lines, which :func:`resolve` reports; ``settings`` are then the right ones

    def order(self, info: ParameterInfo) -> Order:
        """Rank for a parameter that it selects; the highest wins."""
        own = self.selector.specificity(info)
        return min(own, ((Kind.SHAPE, 0),)) if self.layer == Layer.DEFAULTS else own, self.layer, own


UNREADABLE = Selector((Predicate("unreadable", lambda info: False),))


def refuse_mistakes(entries: Iterable[Entry]) -> None:
    """Raise an :class:`OverrideError` with a line for each mistake."""
    if mistakes := [line for entry in entries for line in entry.mistakes]:
        raise OverrideError("\n".join(mistakes))


def make_entry(selector: object, settings: Mapping[str, Any], layer: Layer, source: str, known: Known) -> Entry:
    """One checked entry, with its mistakes."""
    parsed, mistakes, values = UNREADABLE, list[str](), dict[str, Any]()
    try:
        parsed = Selector.parse(selector)
    except OverrideError as error:
        mistakes.append(f"select: {error}")
    if not isinstance(settings, Mapping):
        mistakes.append(f"expected a mapping of settings, got {settings!r}")
    elif not settings:
        mistakes.append(NO_SETTINGS)
    else:
        values, wrong = checked(settings, known, parsed.optimizer)
        mistakes += map(str, wrong)
    return Entry(parsed, values, layer, source, tuple(f"{source}: {mistake}" for mistake in mistakes))


def entries_from_dict(
    overrides: Mapping[Any, Mapping[str, Any]],
    layer: Layer = Layer.PYTHON,
    source: str = "overrides",
    known: Known | None = None,
    *,
    keep_mistakes: bool = False,
) -> list[Entry]:
    """Entries from ``{selector: settings}``.

    A selector may be a ``ParamKey``, and a setting Megatron's ``max_lr``. An :class:`OverrideError` has a line for each
    mistake; with ``keep_mistakes`` they stay on the entries, for :func:`resolve` to report.
    """
    known = known or Known.registered()
    entries = []
    if not isinstance(overrides, Mapping):
        raise OverrideError(f"{source}: expected {{selector: settings}}, got {overrides!r}")
    for selector, settings in overrides.items():
        name = repr(selector)
        with suppress(OverrideError):  # make_entry says what is wrong
            name = name if isinstance(selector, str) else f"'{Selector.parse(selector)}'"
        own_source = f"{source}[{name}]"
        both = isinstance(settings, Mapping) and {"lr", "max_lr"} <= settings.keys()
        made = make_entry(selector, _renamed(settings), layer, own_source, known)
        twice = (f"{own_source}: lr: max_lr is the same: keep one of the two",) * both
        entries.append(replace(made, mistakes=twice + made.mistakes))
    if not keep_mistakes:
        refuse_mistakes(entries)
    return entries


def _renamed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings by our names: ``lr`` for Megatron's ``max_lr``."""
    if not isinstance(settings, Mapping):
        return settings
    renamed = {"lr" if key == "max_lr" else key: value for key, value in settings.items()}
    if "weight_decay" not in renamed and renamed.get("start_wd") == renamed.get("end_wd") is not None:
        renamed["weight_decay"] = renamed.pop("start_wd")
        del renamed["end_wd"]
    return renamed


_Node = Any  # of yaml, which has no types
_Pairs = dict[Any, tuple[int, _Node]]  # key -> its line, and what it stands for
_Wrong = tuple[int, str]  # a line, and what is wrong there

_SELECT = "select"
_FORMAT = "a list of entries {select: ..., SETTING: ...}, or a mapping of selectors to settings"

_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
# The core schema of YAML 1.2: kind -> pattern of its text, conversion.
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+", int),
    "float": (_FLOAT, lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))),
    "merge": (r"<<", str),
}
_TAGS = {_TAG + kind for kind in (*_SCALARS, "str", "seq", "map")}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar = {  # None: whatever a scalar begins with
        None: [(_TAG + kind, re.compile(f"^({like})$")) for kind, (like, _) in _SCALARS.items()]
    }

    depth = values = 0

    def compose_node(self, parent: _Node, index: Any) -> _Node:
        """Read a node within the bounds of depth and size."""
        line, is_alias, before = _line(self.peek_event()), self.check_event(yaml.AliasEvent), self.values
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _FileError((line, f"values lie more than {MAX_DEPTH} deep"))
        node = super().compose_node(parent, index)
        self.depth -= 1
        self.values += getattr(node, "size", MAX_VALUES) if is_alias else 1  # an alias in its own node has no end
        if self.values > MAX_VALUES:
            raise _FileError((line, f"with aliases followed, there are more than {MAX_VALUES:,} values: use fewer"))
        if not is_alias:
            node.size = self.values - before
        return node


class _FileError(OverrideError):
    """Mistakes of a file; its arguments are (line, mistake)."""


def read_overrides(
    path: str | PathLike[str], known: Known | None = None, *, keep_mistakes: bool = False
) -> list[Entry]:
    """Entries of a file of YAML or JSON.

    An :class:`OverrideError` has a line for each mistake, ``FILE:LINE: KEY: what, suggestion``; with ``keep_mistakes``
    they stay on the entries, for :func:`resolve` to report, unless the file as a whole cannot be read.
    """
    entries, mistakes, known = list[Entry](), list[str](), known or Known.registered()

    def lines(wrong: Iterable[_Wrong]) -> tuple[str, ...]:
        return tuple(f"{path}:{line}: {what}" for line, what in sorted(wrong))

    try:
        for selector, line, node in _written(_compose(Path(path))):
            try:
                parsed, values, wrong = _entry(selector, line, node, known)
            except _FileError as error:
                parsed, values, wrong = UNREADABLE, {}, list(error.args)
            entries.append(Entry(parsed, values, Layer.FILE, f"{path}:{line}", lines(wrong)))
            mistakes += entries[-1].mistakes
            if len(mistakes) > MAX_MISTAKES:
                raise OverrideError("\n".join([*mistakes, f"{path}:{line}: read up to here: mend these first"]))
    except OSError as error:
        raise OverrideError(f"{path}: cannot be read: {error.strerror}") from None
    except _FileError as error:
        raise OverrideError("\n".join(lines(error.args))) from None
    if not keep_mistakes:
        refuse_mistakes(entries)
    return entries


def _compose(path: Path) -> _Node:
    if path.exists() and not (path.is_file() and path.stat().st_size <= MAX_FILE_BYTES):  # a pipe waits when opened
        raise OverrideError(f"{path}: expected a file of at most {MAX_FILE_BYTES:,} bytes, no device and no folder")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _FileError((error.object[: error.start].count(b"\n") + 1, "this is no UTF-8 text")) from None
    if path.suffix.lower() == ".json":
        try:
            with suppress(RecursionError):  # the loader refuses deep nesting, with the line
                json.loads(text, parse_int=str)
        except json.JSONDecodeError as error:
            raise _FileError((error.lineno, f"this is no JSON: {error.msg}, at column {error.colno}")) from None
        text = text.replace("\t", " ")  # JSON strings have no tabs, and YAML takes none before a value
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context
        hint = ""
        if "alias" in f"{error.context} {error.problem}":
            hint = ": quote a selector that begins with *, as in '*.weight'"
        elif "\\t" in problem or "".join(text.splitlines()[mark.line : mark.line + 1]).startswith("\t"):
            hint = ": indent by blanks"
        raise _FileError((mark.line + 1, f"this is no YAML: {problem[:200]}{hint}")) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise _FileError((line, f"this is no YAML: {str(error).splitlines()[0]}")) from None
    except OverrideError as error:
        raise error from None
    except (ValueError, OverflowError) as error:  # of a character's code, or of the version of YAML
        raise _FileError((loader.line + 1, f"this is no YAML: {error}")) from None


def _written(root: _Node) -> Iterator[tuple[object, int, _Node]]:
    """Selector, line and settings of each entry."""
    if not isinstance(root, yaml.CollectionNode):
        line, got = (1, "nothing") if root is None else (_line(root), shown(_plain(root)))
        raise _FileError((line, f"expected {_FORMAT}, got {got}"))
    _check_tag(root)
    if not root.value:
        raise _FileError((_line(root), f"there are no entries: expected {_FORMAT}"))
    if isinstance(root, yaml.SequenceNode):
        yield from ((_SELECT, _line(node), node) for node in root.value)
        return
    pairs = _pairs(root)
    if _SELECT in pairs:
        raise _FileError((_line(root), "select: a single entry is a list, too: put '- ' before it"))
    yield from ((selector, *pair) for selector, pair in pairs.items())


def _entry(written: object, line: int, node: _Node, known: Known) -> tuple[Selector, dict[str, Any], list[_Wrong]]:
    if not isinstance(node, yaml.MappingNode):
        inside = "expected an entry {select: ..., SETTING: ...}"
        expected = inside if written == _SELECT else f"{written}: expected a mapping of settings"
        raise _FileError((line, f"{expected}, got {shown(_plain(node))}"))
    settings, select_line = _pairs(node), line
    if len(settings) > MAX_SETTINGS:
        raise _FileError((line, f"there are {len(settings):,} settings, and an entry may have {MAX_SETTINGS}"))
    if written == _SELECT:
        if _SELECT not in settings:
            near = [key for key in map(str, settings) if key not in SETTINGS and did_you_mean(key, [_SELECT])]
            hint = f" (it has {near[0]!r})" if near else ""
            raise _FileError((line, f"select: is missing, which says for which parameters the entry is{hint}"))
        select_line = settings[_SELECT][0]
    wrong: list[_Wrong] = []
    selector, raw = UNREADABLE, {}
    for key, (_, value) in settings.items():
        try:
            raw[key] = _plain(value)
        except _FileError as error:
            wrong += [(at, f"{key}: {what}") for at, what in error.args]
    try:
        selector = Selector.parse(raw.pop(_SELECT, UNREADABLE) if written == _SELECT else written)
    except OverrideError as error:
        wrong.append((select_line, f"select: {error}"))
    values, mistakes = checked(raw, known, selector.optimizer)
    lines = {str(key): at for key, (at, _) in settings.items()}
    wrong += [(lines[error.key], str(error)) for error in mistakes]
    if settings.keys() <= {_SELECT}:
        wrong.append((line, NO_SETTINGS))
    return selector, values, wrong


def _line(node: _Node) -> int:
    return node.start_mark.line + 1


def _check_tag(node: _Node) -> None:
    if node.tag not in _TAGS:
        raise _FileError((_line(node), f"{ascii(node.tag.replace(_TAG, '!!'))[1:-1]:.80} is a tag: write plain values"))


def _plain(node: _Node) -> Any:
    _check_tag(node)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(each) for each in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key: _plain(value) for key, (_, value) in _pairs(node).items()}
    kind, text = node.tag.removeprefix(_TAG), node.value
    if what := unfit(text.removesuffix("\n")):
        raise _FileError((_line(node), what))
    try:
        return _SCALARS[kind][1](text) if kind in _SCALARS else text
    except ValueError:
        raise _FileError((_line(node), f"{text!r} is no {kind}")) from None


def _pairs(node: _Node) -> _Pairs:
    _check_tag(node)
    own, merged = _Pairs(), _Pairs()
    for key, value in node.value:
        if key.tag == f"{_TAG}merge":
            for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(mapping, yaml.MappingNode):
                    raise _FileError((_line(value), "<<: merges mappings only"))
                merged = merged | _pairs(mapping) | merged
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise _FileError((_line(key), "a key is text, not a list or a mapping"))
        name = _plain(key)
        if name in own:
            raise _FileError((_line(key), f"{name}: is here a second time, the first is on line {own[name][0]}"))
        own[name] = _line(key), value
    return own | merged | own  # its own keys come first, and win
