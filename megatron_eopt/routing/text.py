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
    chosen = []
    overruled = []
    patterns = by_pattern(families)
    for family in families:
        # a pattern can be copied as a selector, so ranges stand only where it would select too much
        alone = len(patterns[family.pattern]) == 1
        lines.append(_cells(family.pattern if alone else family.label, family.count, family.like))
        settings = list(_set(family.like))
        if settings:
            chosen.append(f"  {family.label}: {', '.join(settings)}")
        if family.like.overruled:
            overruled.append(f"  {family.label}: {'; '.join(family.like.overruled)}")
    if full:
        lines = [_cells(row.name, 1, row) for row in rows(families)]
    text = [
        *aligned(_HEADER, lines, ("n", "update RMS", "decay", "state MB"), not full),
        _LEGEND,
        "",
        *aligned(_TOTALS, _totals(families), _TOTALS[1:]),
    ]
    if chosen:
        text += ["", "settings that were set, and where:", *chosen]
    if overruled:
        text += ["", "overruled:", *overruled]
    return "\n".join(text)


def _cells(name: str, number: int, row: ManifestRow) -> list[str]:
    schemes = dict.fromkeys(matrix.scheme for matrix in row.matrices)
    rates = "-"
    decay = "-"
    if row.optimizer:
        rates = f"{row.lr:g}"
        if row.lr != row.min_lr:
            rates += f" to {row.min_lr:g}"
        decay = f"{row.weight_decay:g}"
    return [
        name,
        f"{number:,}",
        "x".join(map(str, row.shape)) or "scalar",
        row.optimizer or "none",
        row.reason,
        row.sizes or "-",
        ", ".join([row.layout, *schemes]),
        "-" if row.update_rms is None else f"{row.update_rms:.3g}",
        rates,
        decay,
        megabytes(number * row.state_bytes),
    ]


def _totals(families: Sequence[ParamPattern]) -> list[list[str]]:
    of_each: dict[str, list[ParamPattern]] = {}
    for family in sorted(families, key=lambda family: family.like.optimizer or "~"):  # those of none last
        of_each.setdefault(family.like.optimizer or "none", []).append(family)
    of_each["all"] = list(families)
    lines = []
    for name, those in of_each.items():
        parameters = 0
        elements = 0
        matrices = 0
        size = 0
        for family in those:
            parameters += family.count
            elements += family.count * prod(family.like.shape)
            matrices += family.count * len(family.like.matrices)
            size += family.count * family.like.state_bytes
        lines.append([name, f"{parameters:,}", f"{elements:,}", f"{matrices:,}", megabytes(size)])
    return lines


def megabytes(count: int) -> str:
    """Bytes as MB, with three digits or more."""
    value = count / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _set(row: ManifestRow) -> Iterator[str]:
    values = row.settings | {"lr": row.lr, "min_lr": row.min_lr, "weight_decay": row.weight_decay}
    for key in sorted((row.settings.keys() | row.sources.keys()) - {"optimizer", "exclude"}):  # which the reason says
        value = values.get(key, "")
        if isinstance(value, float):
            value = f"{value:g}"
        shown = f"{key} {value}".strip()
        if key in row.sources:
            shown += f" ({row.sources[key]})"
        yield shown


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
    for row in zip(*columns, strict=True):
        for parts in zip_longest(*row, fillvalue=""):
            line = []
            for title, part, width in zip(header, parts, widths, strict=True):
                line.append(part.rjust(width) if title in numbers else part.ljust(width))
            text.append("  ".join(line).rstrip())
    height = max(len(column[0]) for column in columns)  # of the titles
    text.insert(height, "-" * (sum(widths) + 2 * len(widths) - 2))
    return text
