"""Entries: a selector and settings, from Python or a file.

A file is a list of entries, each a mapping of ``select`` and settings; or a mapping of selectors to settings. YAML is
read as version 1.2, which contains JSON: ``1e-3`` is a number and ``no`` is text, unlike in version 1.1.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped, unused-ignore]

from megatron_eopt.routing.selectors import Kind, OverrideError, ParameterInfo, Selector, Specificity
from megatron_eopt.routing.settings import check_setting

# Where entries come from; of two that are equally specific the later one wins.
Layer = IntEnum("Layer", ["DEFAULTS", "PYTHON", "FILE", "FLAGS"], start=0)


@dataclass(frozen=True)
class Entry:
    """Settings for the parameters of a selector."""

    selector: Selector
    settings: Mapping[str, Any] = field(hash=False)
    layer: Layer  # an entry of the defaults may select nothing
    source: str  # file and line, flag or dict, as in ``overrides.yaml:3``

    def order(self, info: ParameterInfo) -> tuple[Specificity, Layer]:
        """Rank for a parameter that it selects; the highest wins, the last of equal ones."""
        specificity = self.selector.specificity(info)
        if self.layer == Layer.DEFAULTS:
            specificity = min(specificity, ((Kind.SHAPE, 0),))
        return specificity, self.layer


def make_entry(selector: object, settings: Any, layer: Layer, source: str) -> Entry:
    """One checked entry; an :class:`OverrideError` has a line for each mistake.

    A setting may be Megatron's ``max_lr``, which is ``lr``.
    """
    try:
        parsed = Selector.parse(selector)
    except OverrideError as error:
        raise OverrideError(f"{source}: select: {error}") from None
    if not isinstance(settings, Mapping) or not settings:
        raise OverrideError(f"{source}: expected a mapping of settings, as lr: 1e-3, got {reprlib.repr(settings)}")
    if "max_lr" in settings:
        if "lr" in settings:
            raise OverrideError(f"{source}: max_lr is lr: keep one of the two")
        settings = {"lr" if key == "max_lr" else key: value for key, value in settings.items()}
    values = {}
    mistakes = []
    for key, raw in settings.items():
        if key in ("optimizer", "exclude") and parsed.optimizer is not None:
            mistakes.append(f"{source}: {key}: cannot be set for the parameters of an optimizer, by '{parsed}'")
        try:
            values[str(key)] = check_setting(str(key), raw, None)  # its parameters' optimizer is not known yet
        except ValueError as error:
            mistakes.append(f"{source}: {key}: {error}")
    if mistakes:
        raise OverrideError("\n".join(mistakes))
    return Entry(parsed, values, layer, source)


def _make_entries(written: Iterable[tuple[object, Any, str]], layer: Layer) -> list[Entry]:
    """Entries of (selector, settings, source), or all their mistakes."""
    entries = []
    mistakes = []
    for selector, settings, source in written:
        try:
            entries.append(make_entry(selector, settings, layer, source))
        except OverrideError as error:
            mistakes.append(str(error))
    if mistakes:
        raise OverrideError("\n".join(mistakes))
    return entries


def entries_from_dict(
    overrides: Mapping[Any, Mapping[str, Any]], layer: Layer = Layer.PYTHON, source: str = "overrides"
) -> list[Entry]:
    """Entries from ``{selector: settings}``.

    A selector may be a ``ParamKey``. An :class:`OverrideError` has a line for each mistake.
    """
    written = []
    for selector, settings in overrides.items():
        own_source = f"{source}[{_shown(selector)}]"
        written.append((selector, settings, own_source))
    return _make_entries(written, layer)


def _shown(selector: object) -> str:
    if isinstance(selector, str):
        return repr(selector)
    try:
        return f"'{Selector.parse(selector)}'"
    except OverrideError:  # which make_entry raises again, with the source
        return repr(selector)


_MOST = 1_000_000  # bytes of a file
_SCALARS = {  # of the core schema of YAML 1.2: type -> how it is written
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_RESOLVERS = [(f"tag:yaml.org,2002:{kind}", re.compile(f"^({written})$")) for kind, written in _SCALARS.items()]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar = {None: _RESOLVERS}  # None: whatever a scalar begins with

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases: some hundred bytes of them can stand for gigabytes."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="found an alias, and aliases are not read", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is there twice, of which PyYAML takes the last."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is here a second time", problem_mark=key.start_mark)
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _read(path: Path) -> str:
    """The text of a file of at most :data:`_MOST` bytes; a pipe or device may never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")
    if path.stat().st_size > _MOST:
        raise OSError(f"it has {path.stat().st_size:,} bytes, and at most {_MOST:,} are read")
    return path.read_text(encoding="utf-8-sig")


def read_overrides(path: str | PathLike[str]) -> list[Entry]:
    """Entries of a file of YAML or JSON.

    An :class:`OverrideError` has a line for each mistake, ``FILE:LINE: KEY: what, suggestion``, with the line on which
    the entry begins.
    """
    try:
        text = _read(Path(path))
        if Path(path).suffix == ".json":
            text = text.replace("\t", " ")  # by which JSON may be indented, and YAML not
        loader = _Loader(text)
        root = loader.get_single_node()
        found = loader.construct_document(root) if root else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        hint = "quote a selector that begins with *, and indent by blanks"
        raise OverrideError(f"{path}:{line}: this is no YAML: {error.problem}: {hint}") from None
    except RecursionError:
        raise OverrideError(f"{path}: cannot be read: it is nested hundreds of times, and entries are flat") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OverrideError(f"{path}: cannot be read: {error}") from None
    written = []
    if isinstance(found, list):
        for entry, node in zip(found, root.value, strict=True):
            source = f"{path}:{node.start_mark.line + 1}"
            if not isinstance(entry, dict) or "select" not in entry:
                raise OverrideError(
                    f"{source}: expected an entry {{select: ..., SETTING: ...}}, got {reprlib.repr(entry)}"
                )
            settings = {key: value for key, value in entry.items() if key != "select"}
            written.append((entry["select"], settings, source))
    elif isinstance(found, dict):
        lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
        for selector, settings in found.items():
            written.append((selector, settings, f"{path}:{lines.get(selector, 1)}"))
    if not written:
        raise OverrideError(
            f"{path}: expected a list of entries {{select: ..., SETTING: ...}}, or a mapping of selectors to settings, "
            f"got {reprlib.repr(found)}"
        )
    return _make_entries(written, Layer.FILE)
