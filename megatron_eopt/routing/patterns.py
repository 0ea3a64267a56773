"""Rows of parameters, patterns of rows, and their JSON in checkpoints and files.

A name is a pattern with ``*`` for every number, and an index: its numbers. Boxes are a short, exact form of a set of
indices.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

Index = tuple[int, ...]  # numbers of a name from left to right: layer, expert
Runs = tuple[tuple[int, int], ...]  # ``(first, last + 1)``
Members = tuple[tuple[Runs, ...], ...]  # boxes: runs for each star, in every combination

_DIGITS = r"(?:0|[1-9][0-9]*)"
# Between dots, as layers and experts are numbered, and behind the names of grouped experts' parameters.
_NUMBER = re.compile(rf"(?<![^.]){_DIGITS}(?![^.])|(?:(?<=\.weight)|(?<=\.bias)){_DIGITS}\Z")
_SHOWN_BOXES = 3
MANIFEST_FORMAT = 1  # of JSON; counts up with every change that an older release cannot read


@dataclass(frozen=True)
class LogicalMatrix:
    """A logical matrix of a parameter."""

    name: str  # within its parameter, as ``q`` or ``expert 3 gate``; empty for a parameter that is one matrix
    rows: int  # outputs of the global matrix
    cols: int  # inputs
    scheme: str  # how it is orthogonalized: local, duplicated, owner, ...
    scale: float  # factor from the orthogonal factor to the update


@dataclass(frozen=True)
class ManifestRow:
    """One parameter. Lists become tuples, and dicts are sorted by key."""

    name: str  # global and unwrapped, as in ``decoder.layers.3.mlp.linear_fc1.weight``
    shape: tuple[int, ...]  # of the global parameter
    dtype: str  # as in ``bfloat16``
    optimizer: str | None  # that updates it; ``owner`` in files
    reason: str  # for this optimizer, as in ``overrides.yaml:9``
    layout: str  # how ranks share it: ``whole``, ``rows over tp 2``, ...
    matrices: tuple[LogicalMatrix, ...]  # none for a parameter that is not orthogonalized
    update_rms: float | None  # predicted, of the first update before the learning rate; None if not known
    lr: float  # the largest learning rate of the schedule
    min_lr: float  # the smallest, which is the largest where the schedule is constant
    weight_decay: float  # as it is applied
    settings: dict[str, Any] = field(hash=False)  # further ones that are not the defaults
    sources: dict[str, str] = field(hash=False)  # setting -> file and line, or flag
    overruled: tuple[str, ...]  # settings from other sources that did not win, a line each
    state_bytes: int  # of its optimizer state, over all tensor-parallel ranks of one replica
    tied_to: str | None  # name of the parameter that it is to equal
    excluded: bool  # left without an optimizer on purpose

    def __post_init__(self) -> None:
        for key in ("shape", "matrices", "overruled"):
            object.__setattr__(self, key, as_tuples(getattr(self, key)))
        settings = {key: as_tuples(value) for key, value in sorted(self.settings.items())}
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "sources", dict(sorted(self.sources.items())))

    @property
    def sizes(self) -> str:
        """Logical matrices: ``q 64x64, k 32x64``, or ``8 q 16x64``."""
        counts = Counter[str]()
        for matrix in self.matrices:
            name = re.sub(r"\s*\b[0-9]+\b", "", matrix.name).strip()
            counts[f"{name} {matrix.rows}x{matrix.cols}".strip()] += 1
        sizes = []
        for size, number in counts.items():
            sizes.append(size if number == 1 else f"{number:,} {size}")
        return ", ".join(sizes)


def as_tuples(value: Any) -> Any:
    """Lists, also nested ones, as tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class ParamPattern:
    """Parameters whose rows are alike."""

    like: ManifestRow  # named by the pattern: ``decoder.layers.*.mlp.linear_fc1.weight``
    members: Members  # the numbers that the stars stand for

    @property
    def pattern(self) -> str:
        """The names, with ``*`` for every number."""
        return self.like.name

    @cached_property
    def count(self) -> int:
        """Number of parameters."""
        return len(expanded(self.members))

    @cached_property
    def label(self) -> str:
        """The names with ranges, as ``decoder.layers.{0-3}.mlp.linear_fc1.weight``."""
        shown = [join_name(self.pattern, map(_ranges, box)) for box in self.members[:_SHOWN_BOXES]]
        more = len(self.members) - _SHOWN_BOXES
        return " and ".join([*shown, f"{more} more such blocks"] if more > 0 else shown)

    @property
    def named(self) -> str:
        """The label and the number of parameters."""
        return self.label if self.count == 1 else f"{self.label} ({self.count:,} parameters)"


def to_json(families: Iterable[ParamPattern]) -> dict[str, Any]:
    """Patterns as values that survive JSON."""
    written = []
    for family in families:
        row = asdict(family.like)
        pattern = row.pop("name")
        optimizer = row.pop("optimizer")
        written.append({"pattern": pattern, "members": family.members, "owner": optimizer} | row)
    return json.loads(json.dumps({"format": MANIFEST_FORMAT, "families": written}))


def write_json(families: Iterable[ParamPattern], file: str) -> None:
    """Write patterns to a file."""
    Path(file).write_text(json.dumps(to_json(families), indent=1) + "\n")


def from_json(manifest: Any) -> list[ParamPattern]:
    """The patterns; ``ValueError`` for a newer format, and for what is no manifest."""
    try:
        number = manifest["format"]
        if number > MANIFEST_FORMAT:
            raise ValueError(
                f"the manifest has format {number}, and this release of megatron_eopt reads up to {MANIFEST_FORMAT}: "
                f"install the release that wrote it, or a later one"
            )
        return [_family(dict(family)) for family in manifest["families"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest is damaged ({error!r}): take that of another checkpoint") from None


def _family(written: dict[str, Any]) -> ParamPattern:
    members = as_tuples(written.pop("members"))
    expanded(members)  # which a damaged one fails
    name = written.pop("pattern")
    optimizer = written.pop("owner")
    matrices = [LogicalMatrix(**matrix) for matrix in written.pop("matrices")]
    return ParamPattern(ManifestRow(name=name, optimizer=optimizer, matrices=tuple(matrices), **written), members)


def families(rows: Iterable[ManifestRow]) -> list[ParamPattern]:
    """Rows as patterns; :func:`rows` is the inverse.

    Two rows of one name may differ, as those of two optimizers do.
    """
    indices_of: dict[ManifestRow, set[Index]] = defaultdict(set)
    for row in rows:
        pattern, index = split_name(row.name)
        indices_of[replace(row, name=pattern)].add(index)
    return _in_order(indices_of)


def rows(families: Iterable[ParamPattern]) -> list[ManifestRow]:
    """A row for each parameter, layer 2 before layer 10."""
    found = []
    for family in families:
        for index in expanded(family.members):
            found.append(replace(family.like, name=join_name(family.pattern, index)))
    return sorted(found, key=lambda row: _by_numbers(row.name))


def merged(lists: Iterable[Iterable[ParamPattern]]) -> list[ParamPattern]:
    """The patterns of all ranks together, whatever their order.

    A parameter of which ranks say different things is then there twice, which ``checks.py`` finds.
    """
    indices_of: dict[ManifestRow, set[Index]] = defaultdict(set)
    for family in {family for families in lists for family in families}:
        indices_of[family.like].update(expanded(family.members))
    return _in_order(indices_of)


def by_pattern(families: Iterable[ParamPattern]) -> dict[str, list[ParamPattern]]:
    """Families by their pattern."""
    groups: dict[str, list[ParamPattern]] = {}
    for family in families:
        groups.setdefault(family.pattern, []).append(family)
    return groups


def _in_order(indices_of: dict[ManifestRow, set[Index]]) -> list[ParamPattern]:
    families = [ParamPattern(like, compressed(indices)) for like, indices in indices_of.items()]
    return sorted(families, key=lambda family: (_by_numbers(family.pattern), family.members, repr(family.like)))


def split_name(name: str) -> tuple[str, Index]:
    """A name as pattern and index."""
    return _NUMBER.sub("*", name), tuple(map(int, _NUMBER.findall(name)))


def join_name(pattern: str, numbers: Iterable[object]) -> str:
    """A pattern with numbers, or texts, for its stars."""
    first, *rest = pattern.split("*")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, rest, strict=True))


def compressed(indices: Iterable[Index]) -> Members:
    """Boxes of a set of indices; equal for equal sets."""
    indices = set(indices)
    if not all(indices):  # of a name without numbers
        return ((),)
    behind: dict[int, set[Index]] = defaultdict(set)
    for first, *rest in sorted(indices):
        behind[first].add(tuple(rest))
    alike: dict[Members, list[list[int]]] = defaultdict(list)  # what stands behind -> runs of first numbers
    for first, rests in behind.items():
        runs = alike[compressed(rests)]
        if runs and runs[-1][1] == first:
            runs[-1][1] += 1
        else:
            runs.append([first, first + 1])
    found = []
    for boxes, runs in alike.items():
        for box in boxes:
            found.append((as_tuples(runs), *box))
    return tuple(found)


def expanded(members: Members) -> list[Index]:
    """All indices, in ascending order."""
    found: list[Index] = []
    for box in members:
        numbers = []
        for runs in box:
            numbers.append(list(chain(*(range(first, end) for first, end in runs))))
        found += product(*numbers)
    return sorted(found)


def _ranges(runs: Runs) -> str:
    ranges = []
    for first, end in runs:
        ranges.append(str(first) if end == first + 1 else f"{first}-{end - 1}")
    text = ",".join(ranges)
    return text if text.isdecimal() else f"{{{text}}}"


def _by_numbers(name: str) -> tuple[str | int, ...]:
    parts: list[str | int] = []
    for index, text in enumerate(re.split(r"([0-9]+)", name)):
        parts.append(int(text) if index % 2 else text)  # each second part is a number
    return tuple(parts)
