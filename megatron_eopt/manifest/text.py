"""The manifest as text for rank 0's log."""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from megatron_eopt.manifest.columns import aligned
from megatron_eopt.manifest.family import Family, as_families, rows
from megatron_eopt.manifest.row import Row
from megatron_eopt.manifest.words import figure, matrices_in_words, owner_in_words
from megatron_eopt.row import ADAMW_RMS

_HEADER = ("parameter", "n", "shape", "owner", "reason", "matrices", "layout", "update RMS", "lr", "decay", "state MB")
_NUMBERS = ("n", "update RMS", "decay", "state MB")
_LEGEND = (
    f"update RMS: predicted of the first update, before the learning rate; Adam's is near {ADAMW_RMS:g}. "
    f"state: over all tensor-parallel ranks of one replica."
)
_TOTALS = ("owner", "parameters", "elements", "matrices", "state MB")
_WIDTH = 170
_IN_REASON = {"optimizer", "exclude"}
_OF_THE_ROW = {"lr", "min_lr", "weight_decay"}


def table(found: Iterable[Family] | Iterable[Row], full: bool = False, width: int | None = None) -> str:
    """Who owns what, the totals of each owner, and where settings come from as far as any were set.

    Args:
        found: of all ranks together.
        full: a line for each parameter, in place of one for each family.
        width: of a line at most: longer cells go on in the next one. By default 170, and as wide as it takes where
            ``full``, so that each line has a whole name.
    """
    listed = as_families(found)
    bound = width or (sys.maxsize if full else _WIDTH)
    times = Counter(family.pattern for family in listed)
    if full:
        lines = [_cells(row.name, 1, row) for row in rows(listed)]
    else:
        # a pattern can be taken for a selector as it is, so ranges stand only where it would say too much
        names = [family.pattern if times[family.pattern] == 1 else family.label for family in listed]
        lines = [_cells(name, family.count, family.like) for name, family in zip(names, listed, strict=True)]
    return "\n".join(
        [
            *aligned(_HEADER, lines, bound, _NUMBERS),
            *textwrap.wrap(_LEGEND, bound),
            "",
            *aligned(_TOTALS, list(_totals(listed)), bound, _TOTALS[1:]),
            *_section("settings that were set, and where", _set(listed), bound),
            *_section("overruled", _overruled(listed), bound),
        ]
    )


def _cells(name: str, number: int, like: Row) -> list[str]:
    schemes = dict.fromkeys(matrix.scheme for matrix in like.matrices)
    owned = like.owner is not None
    return [
        name,
        f"{number:,}",
        "x".join(map(str, like.shape)) or "scalar",
        owner_in_words(like.owner),
        like.reason,
        matrices_in_words(like.matrices) or "-",
        ", ".join([like.layout, *schemes]),
        "-" if like.update_rms is None else f"{like.update_rms:.3g}",
        _lr(like) if owned else "-",
        f"{like.weight_decay:g}" if owned else "-",
        figure(number * like.state_bytes / 1e6),
    ]


def _lr(like: Row) -> str:
    return f"{like.lr:g}" if like.lr == like.min_lr else f"{like.lr:g} to {like.min_lr:g}"


def _totals(found: Sequence[Family]) -> Iterator[list[str]]:
    owners = sorted({family.like.owner for family in found}, key=lambda owner: (owner is None, owner or ""))
    for owner in owners:
        yield _total(owner_in_words(owner), [family for family in found if family.like.owner == owner])
    if len(owners) != 1:
        yield _total("all", found)


def _total(name: str, found: Sequence[Family]) -> list[str]:
    return [
        name,
        f"{sum(family.count for family in found):,}",
        f"{sum(family.count * prod(family.like.shape) for family in found):,}",
        f"{sum(family.count * len(family.like.matrices) for family in found):,}",
        figure(sum(family.count * family.like.state_bytes for family in found) / 1e6),
    ]


def _set(found: Sequence[Family]) -> Iterator[str]:
    for family in found:
        like = family.like
        # who owns it, and why, has a column
        keys = sorted((like.settings.keys() | like.sources.keys()) - _IN_REASON)
        if keys:
            yield f"{family.label}: {', '.join(_setting(like, key) for key in keys)}"


def _setting(like: Row, key: str) -> str:
    value = getattr(like, key) if key in _OF_THE_ROW else like.settings.get(key)
    shown = key if value is None else f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
    return f"{shown} ({like.sources[key]})" if key in like.sources else shown


def _overruled(found: Sequence[Family]) -> Iterator[str]:
    for family in found:
        if family.like.overruled:
            yield f"{family.label}: {'; '.join(family.like.overruled)}"


def _section(title: str, lines: Iterable[str], width: int) -> Iterator[str]:
    wrapped = [
        part
        for line in lines
        for part in textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    ]
    if wrapped:
        yield from ("", f"{title}:", *wrapped)
