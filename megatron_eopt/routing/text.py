"""The manifest as a table, for rank 0's log."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod

from megatron_eopt.family import ADAMW_RMS
from megatron_eopt.routing.patterns import ManifestRow, ParamPattern, by_pattern, rows

_HEADER = "parameter, n, shape, optimizer, reason, matrices, layout, update RMS, lr, decay, state MB".split(", ")
_LEGEND = (
    f"update RMS: predicted of the first update, before the learning rate; Adam's is near {ADAMW_RMS:g}. "
    f"state: over all tensor-parallel ranks of one replica."
)
_TOTALS = ("optimizer", "parameters", "elements", "matrices", "state MB")
_WIDEST = 24  # of a column but the first


def table(families: Sequence[ParamPattern], full: bool = False) -> str:
    """Optimizers of parameters, totals, and sources of settings.

    A line is a family, or a parameter with ``full``, where no cell is wrapped.
    """
    lines = []
    if full:
        for row in rows(families):
            lines.append(_cells(row.name, 1, row))
    else:
        patterns = by_pattern(families)
        for family in families:
            # a pattern can be copied as a selector, so ranges stand only where it would select too much
            name = family.pattern if len(patterns[family.pattern]) == 1 else family.label
            lines.append(_cells(name, family.count, family.like))
    text = aligned(_HEADER, lines, ("n", "update RMS", "decay", "state MB"), not full)
    text += [_LEGEND, "", *aligned(_TOTALS, list(_totals(families)), _TOTALS[1:])]
    chosen = []
    overruled = []
    for family in families:
        settings = list(_set(family.like))
        if settings:
            chosen.append(f"  {family.label}: {', '.join(settings)}")
        if family.like.overruled:
            overruled.append(f"  {family.label}: {'; '.join(family.like.overruled)}")
    if chosen:
        text += ["", "settings that were set, and where:", *chosen]
    if overruled:
        text += ["", "overruled:", *overruled]
    return "\n".join(text)


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
    of_each: dict[str, list[ParamPattern]] = {}
    for family in sorted(families, key=lambda family: (family.like.optimizer is None, family.like.optimizer)):
        of_each.setdefault(family.like.optimizer or "none", []).append(family)
    if len(of_each) > 1:
        of_each["all"] = list(families)
    for name, those in of_each.items():
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
    values = row.settings | {"lr": row.lr, "min_lr": row.min_lr, "weight_decay": row.weight_decay}
    for key in sorted((row.settings.keys() | row.sources.keys()) - {"optimizer", "exclude"}):  # which the reason says
        value = values.get(key, "")
        shown = f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}".strip()
        yield f"{shown} ({row.sources[key]})" if key in row.sources else shown


def aligned(
    header: Sequence[str], lines: Sequence[Sequence[str]], numbers: Sequence[str], wrap: bool = True
) -> list[str]:
    """A table as lines of text.

    Titles are wrapped, and so are wide columns but the first if ``wrap``. ``numbers`` are titles of columns that are
    aligned to the right.
    """
    columns: list[list[list[str]]] = []
    widths = []
    for title, *cells in zip(header, *lines, strict=True):
        width = max(map(len, [*title.split(), *cells]))
        if wrap and columns:
            width = min(width, _WIDEST)
        wrapped = []
        for cell in (title, *cells):
            wrapped.append(textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False))
        columns.append(wrapped)
        widths.append(max(len(line) for cell in wrapped for line in cell))
    text = []
    for number, row in enumerate(zip(*columns, strict=True)):
        if number == 1:
            text.append("-" * (sum(widths) + 2 * len(widths) - 2))
        for parts in zip_longest(*row, fillvalue=""):
            line = []
            for title, part, width in zip(header, parts, widths, strict=True):
                line.append(part.rjust(width) if title in numbers else part.ljust(width))
            text.append("  ".join(line).rstrip())
    return text
