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


def make_entries(written: Iterable[tuple[object, Any, str]], layer: Layer) -> list[Entry]:
    """Entries of (selector, settings, source).

    A setting may be Megatron's ``max_lr``, which is ``lr``. An :class:`OverrideError` has a line for each mistake.
    """
    entries = []
    mistakes = []
    for written_selector, settings, source in written:
        try:
            selector = Selector.parse(written_selector)
        except (OverrideError, re.error) as error:
            mistakes.append(f"{source}: select: {error}")
            continue
        if not isinstance(settings, Mapping) or not settings:
            mistakes.append(f"{source}: expected a mapping of settings, as lr: 1e-3, got {reprlib.repr(settings)}")
            continue
        values: dict[str, Any] = {}
        for key, raw in settings.items():
            name = "lr" if key == "max_lr" else str(key)
            if name in values:
                mistakes.append(f"{source}: max_lr is lr: keep one of the two")
            if name in ("optimizer", "exclude") and selector.optimizer is not None:
                mistakes.append(f"{source}: {key}: cannot be set for the parameters of an optimizer, by '{selector}'")
            try:
                values[name] = check_setting(name, raw, None)  # its parameters' optimizer is not known yet
            except ValueError as error:
                mistakes.append(f"{source}: {key}: {error}")
        entries.append(Entry(selector, values, layer, source))
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
    return make_entries(written, layer)


def _shown(selector: object) -> str:
    if isinstance(selector, str):
        return repr(selector)
    try:
        return f"'{Selector.parse(selector)}'"
    except (OverrideError, re.error):  # which make_entries names, with the source
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


def read_overrides(path: str | PathLike[str]) -> list[Entry]:
    """Entries of a file of YAML or JSON.

    An :class:`OverrideError` has a line for each mistake, ``FILE:LINE: KEY: what, suggestion``, with the line on which
    the entry begins. A file of more than :data:`_MOST` bytes is not read, and no pipe or device, which may never end.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is no regular file")
        with Path(path).open("rb") as file:
            written = file.read(_MOST + 1)
        if len(written) > _MOST:
            raise OSError(f"it has more than {_MOST:,} bytes")
        text = written.decode("utf-8-sig")
        if Path(path).suffix == ".json":
            text = text.replace("\t", " ")  # by which JSON may be indented, and YAML not
        loader = _Loader(text)
        loader.name = str(path)
        root = loader.get_single_node()
        found = loader.construct_document(root) if root else None
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        hint = "in YAML a selector that begins with * is quoted, and blanks indent"
        raise OverrideError(f"{path}: cannot be read: {error}\n{hint}") from None
    listed = []
    if isinstance(found, list):
        for entry, node in zip(found, root.value, strict=True):
            settings = dict(entry) if isinstance(entry, dict) else {"select": entry}
            listed.append((settings.pop("select", None), settings, f"{path}:{node.start_mark.line + 1}"))
    elif isinstance(found, dict):
        lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
        for selector, settings in found.items():
            listed.append((selector, settings, f"{path}:{lines.get(selector, 1)}"))
    if not listed:
        raise OverrideError(
            f"{path}: expected a list of entries {{select: ..., SETTING: ...}}, or a mapping of selectors to settings, "
            f"got {reprlib.repr(found)}"
        )
    return make_entries(listed, Layer.FILE)
