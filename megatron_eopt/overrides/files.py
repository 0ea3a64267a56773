"""Entries from a file of YAML or JSON, with the line of whatever is wrong in it.

A file is a list of entries, each a mapping of ``select`` and of settings; or a mapping of selectors to settings.
"""

from os import PathLike
from pathlib import Path

from megatron_eopt.overrides.errors import OverrideError, SettingError, did_you_mean, shown
from megatron_eopt.overrides.known import Known
from megatron_eopt.overrides.nodes import Node, NodeError, Pair, compose, is_list, is_mapping, line, pairs, plain
from megatron_eopt.overrides.rules import Entry, Layer
from megatron_eopt.overrides.selectors import Selector
from megatron_eopt.overrides.settings import SETTINGS, check_setting, conflicts, named_optimizer

_SELECT = "select"
_FORMAT = "a list of entries {select: ..., SETTING: ...}, or a mapping of selectors to settings"


def read_overrides(path: str | PathLike[str], known: Known | None = None) -> list[Entry]:
    """The entries of a file.

    Args:
        path: of YAML, or of JSON if its name ends so.
        known: names that settings may have; those registered if None.

    Raises:
        OverrideError: for everything that is wrong in it, a line for each: ``FILE:LINE: KEY: what, suggestion``.
    """
    reader = _Reader(str(path), known or Known.registered())
    entries: list[Entry] = []
    try:
        entries = reader.document(compose(Path(path)))
    except OSError as error:
        raise OverrideError(f"{path}: cannot be read: {error.strerror}") from None
    except NodeError as error:
        reader.wrong.append((error.line, error.what))
    if reader.wrong:
        raise OverrideError("\n".join(f"{path}:{at}: {what}" for at, what in sorted(reader.wrong)))
    return entries


class _Reader:
    """Goes through one file, and collects what is wrong with it."""

    def __init__(self, path: str, known: Known) -> None:
        self.path = path
        self.known = known
        self.wrong: list[tuple[int, str]] = []

    def document(self, root: Node) -> list[Entry]:
        if root is None or (not is_list(root) and not is_mapping(root)):
            at, got = (1, "nothing") if root is None else (line(root), shown(plain(root)))
            raise NodeError(at, f"expected {_FORMAT}, got {got}")
        if not root.value:
            raise NodeError(line(root), f"there are no entries: expected {_FORMAT}")
        found = self.listed(root) if is_list(root) else self.mapped(root)
        return [entry for entry in found if entry is not None]

    def listed(self, root: Node) -> list[Entry | None]:
        entries = []
        for node in root.value:
            try:
                entries.append(self.listed_entry(node))
            except NodeError as error:
                self.wrong.append((error.line, error.what))
        return entries

    def listed_entry(self, node: Node) -> Entry | None:
        if not is_mapping(node):
            raise NodeError(line(node), f"expected an entry {{select: ..., SETTING: ...}}, got {shown(plain(node))}")
        selects: list[Pair] = []
        settings: list[Pair] = []
        for pair in pairs(node):
            (selects if plain(pair.key) == _SELECT else settings).append(pair)
        if not selects:
            keys = [str(plain(pair.key)) for pair in settings]
            near = [key for key in keys if key not in SETTINGS and did_you_mean(key, [_SELECT])]
            hint = f" (it has {near[0]!r})" if near else ""
            raise NodeError(line(node), f"select: is missing, which says for which parameters the entry is{hint}")
        return self.entry(line(node), selects[0].line, plain(selects[0].value), settings)

    def mapped(self, root: Node) -> list[Entry | None]:
        keys = pairs(root)
        if any(plain(pair.key) == _SELECT for pair in keys):
            raise NodeError(line(root), "select: a single entry is a list, too: put '- ' before it")
        entries: list[Entry | None] = []
        for key, at, value in keys:
            try:
                if not is_mapping(value):
                    got = shown(plain(value))
                    raise NodeError(at, f"{plain(key)}: expected a mapping of settings, got {got}")
                entries.append(self.entry(at, at, plain(key), pairs(value)))
            except NodeError as error:
                self.wrong.append((error.line, error.what))
        return entries

    def entry(self, at: int, select_line: int, written: object, pairs_of_settings: list[Pair]) -> Entry | None:
        before = len(self.wrong)
        selector = self.selector(select_line, written)
        lines = {str(plain(pair.key)): pair.line for pair in pairs_of_settings}
        values = {}
        optimizer = named_optimizer(_optimizer(pairs_of_settings), None if selector is None else selector.optimizer)
        for pair in pairs_of_settings:
            key = plain(pair.key)
            try:
                values[str(key)] = check_setting(key, plain(pair.value), self.known, optimizer)
            except SettingError as error:
                self.wrong.append((pair.line, str(error)))
            except NodeError as error:
                self.wrong.append((error.line, f"{key}: {error.what}"))
        self.wrong += [(lines[error.key], str(error)) for error in conflicts(values)]
        if not pairs_of_settings:
            self.wrong.append((at, f"no settings: expected one or more of {', '.join(SETTINGS)}"))
        if len(self.wrong) > before or selector is None:
            return None
        return Entry(selector, values, Layer.FILE, f"{self.path}:{at}")

    def selector(self, at: int, written: object) -> Selector | None:
        try:
            return Selector.parse(written)
        except OverrideError as error:
            self.wrong.append((at, f"select: {error}"))
            return None


def _optimizer(settings: list[Pair]) -> object:
    """What an entry sets as the optimizer; None if it sets none, or nothing that can be read."""
    try:
        return next((plain(pair.value) for pair in settings if plain(pair.key) == "optimizer"), None)
    except NodeError:
        return None
