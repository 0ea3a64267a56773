"""The manifest as a table, for rank 0's log."""

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod

from megatron_eopt.family import ADAMW_RMS
from megatron_eopt.routing.patterns import ManifestRow, ParamPattern, rows

_HEADER = "parameter, n, shape, optimizer, reason, matrices, layout, update RMS, lr, decay, state MB".split(", ")
_LEGEND = (
    f"update RMS: predicted of the first update, before the learning rate; Adam's is near {ADAMW_RMS:g}. "
    f"state: over all tensor-parallel ranks of one replica."
)
_TOTALS = ("optimizer", "parameters", "elements", "matrices", "state MB")
_GAP = "  "


class _Wrapper(textwrap.TextWrapper):
    wordsep_simple_re = re.compile(r"( +)|(?<=\.)(?=[^0-9 ])")  # at blanks, and behind dots outside of numbers


def table(families: Sequence[ParamPattern], full: bool = False, width: int | None = None) -> str:
    """Optimizers of parameters, totals, and sources of settings.

    A line is a family, or a parameter with ``full``. Lines longer than ``width`` are wrapped; it is 170 by default, and
    unlimited with ``full``.
    """
    bound = width or (sys.maxsize if full else 170)
    if full:
        lines = [_cells(row.name, 1, row) for row in rows(families)]
    else:
        times = Counter(family.pattern for family in families)
        # a pattern can be copied as a selector, so ranges stand only where it would select too much
        names = [family.pattern if times[family.pattern] == 1 else family.label for family in families]
        lines = [_cells(name, family.count, family.like) for name, family in zip(names, families, strict=True)]
    chosen = [f"{family.label}: {', '.join(said)}" for family in families if (said := list(_set(family.like)))]
    overruled = [f"{family.label}: {'; '.join(family.like.overruled)}" for family in families if family.like.overruled]
    return "\n".join(
        [
            *aligned(_HEADER, lines, bound, ("n", "update RMS", "decay", "state MB")),
            *textwrap.wrap(_LEGEND, bound),
            "",
            *aligned(_TOTALS, list(_totals(families)), bound, _TOTALS[1:]),
            *(["", "settings that were set, and where:", *_wrapped(chosen, bound)] if chosen else []),
            *(["", "overruled:", *_wrapped(overruled, bound)] if overruled else []),
        ]
    )


def _cells(name: str, number: int, row: ManifestRow) -> list[str]:
    schemes = dict.fromkeys(matrix.scheme for matrix in row.matrices)
    rates = f"{row.lr:g}" if row.lr == row.min_lr else f"{row.lr:g} to {row.min_lr:g}"
    return [
        name,
        f"{number:,}",
        "x".join(map(str, row.shape)) or "scalar",
        row.optimizer or "none",
        row.reason,
        row.sizes or "-",
        ", ".join([row.layout, *schemes]),
        "-" if row.update_rms is None else f"{row.update_rms:.3g}",
        rates if row.optimizer else "-",
        f"{row.weight_decay:g}" if row.optimizer else "-",
        megabytes(number * row.state_bytes),
    ]


def _totals(families: Sequence[ParamPattern]) -> Iterator[list[str]]:
    optimizers = sorted({family.like.optimizer for family in families}, key=lambda name: (name is None, name or ""))
    totals = {name or "none": [family for family in families if family.like.optimizer == name] for name in optimizers}
    for name, those in (totals if len(totals) == 1 else totals | {"all": families}).items():
        yield [
            name,
            f"{sum(family.count for family in those):,}",
            f"{sum(family.count * prod(family.like.shape) for family in those):,}",
            f"{sum(family.count * len(family.like.matrices) for family in those):,}",
            megabytes(sum(family.count * family.like.state_bytes for family in those)),
        ]


def megabytes(count: int) -> str:
    """Bytes as MB, with three digits or more."""
    value = count / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _set(row: ManifestRow) -> Iterator[str]:
    of_the_row = {key: getattr(row, key) for key in ("lr", "min_lr", "weight_decay")}
    for key in sorted((row.settings.keys() | row.sources.keys()) - {"optimizer", "exclude"}):  # which the reason says
        value = (row.settings | of_the_row).get(key)
        shown = key if value is None else f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        yield f"{shown} ({row.sources[key]})" if key in row.sources else shown


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False).wrap
    return [text for line in lines for text in wrap(line)]


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]], width: int, numbers: Sequence[str]) -> list[str]:
    """A table as lines of text of at most ``width``.

    The first column is made narrower last. In columns of more than 24 characters words may be cut to fit. ``numbers``
    are titles of columns that are aligned to the right.
    """
    widths = _widths(list(zip(header, *lines, strict=True)), width)
    wraps = [_Wrapper(size, break_on_hyphens=False).wrap for size in widths]
    justify = [str.rjust if title in numbers else str.ljust for title in header]

    def printed(cells: Sequence[str]) -> Iterator[str]:
        wrapped = [wrap(cell) for wrap, cell in zip(wraps, cells, strict=True)]
        for texts in zip_longest(*wrapped, fillvalue=""):
            yield _GAP.join(put(text, size) for put, text, size in zip(justify, texts, widths, strict=True)).rstrip()

    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    return [*printed(header), rule, *(text for cells in lines for text in printed(cells))]


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    # of a title only the longest word widens its column
    widths = [max(_longest_word(title), *map(len, cells), 0) for title, *cells in columns]
    least = [min(size, 24, max(map(_longest_word, cells))) for size, cells in zip(widths, columns, strict=True)]
    weights = [3, *[1] * (len(columns) - 1)]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        wide = [column for column, size in enumerate(widths) if size > least[column]]
        if not wide:
            break
        widths[max(wide, key=lambda column: widths[column] / weights[column])] -= 1
    return widths


def _longest_word(text: str) -> int:
    return max(len((word or "").strip()) for word in _Wrapper.wordsep_simple_re.split(text))
