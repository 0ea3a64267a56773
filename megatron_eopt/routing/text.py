"""The manifest as a table, for rank 0's log."""

from collections.abc import Iterator, Sequence
from math import prod

from megatron_eopt.family import ADAMW_RMS
from megatron_eopt.routing.patterns import ManifestRow, ParamPattern, by_pattern, rows
from megatron_eopt.screen import aligned, megabytes, wrapped

_HEADER = "parameter, shape, optimizer, reason, matrices, layout, update RMS, lr, decay, state MB".split(", ")
_LEGEND = f"""update RMS: predicted of the first update, before the learning rate; Adam's is
near {ADAMW_RMS:g}. state: over all tensor-parallel ranks of one replica."""
_TOTALS = ("optimizer", "parameters", "elements", "matrices", "state MB")


def table(families: Sequence[ParamPattern], full: bool = False) -> str:
    """Optimizers of parameters, totals, and sources of settings.

    A line is a family, under the optimizer, rates and reason that it shares with others. With ``full`` it is one
    parameter with all of that, as wide as it takes.
    """
    chosen = []
    overruled = []
    for family in families:
        settings = list(_set(family.like))
        if settings:
            chosen.append(wrapped(f"{family.label}: {', '.join(settings)}", "  ", "  "))
        if family.like.overruled:
            overruled.append(wrapped(f"{family.label}: {'; '.join(family.like.overruled)}", "  ", "  "))
    if full:
        cells = [_cells(row) for row in rows(families)]
        text = aligned(_HEADER, cells, ("update RMS", "decay", "state MB"), wrap=False)
    else:
        text = list(_grouped(families))
    text += [_LEGEND, "", *aligned(_TOTALS, _totals(families), _TOTALS[1:])]
    if chosen:
        text += ["", "settings that were set, and where:", *chosen]
    if overruled:
        text += ["", "overruled:", *overruled]
    return "\n".join(text)


def _grouped(families: Sequence[ParamPattern]) -> Iterator[str]:
    """Families under what they share, the largest first, with names behind what is narrow."""
    patterns = by_pattern(families)
    groups: dict[str, list[ParamPattern]] = {}
    for family in families:
        groups.setdefault(_shared(family.like), []).append(family)
    counts = max((len(f"{family.count:,}") for family in families), default=1)
    shapes = max((len(_shape(family.like)) for family in families), default=1)
    for shared, those in sorted(groups.items(), key=lambda group: -_elements(group[1])):
        yield wrapped(shared, hanging="    ")
        for family in those:
            # a pattern can be copied as a selector, so ranges stand only where it would select too much
            name = family.pattern if len(patterns[family.pattern]) == 1 else family.label
            yield f"{family.count:>{counts},}  {_shape(family.like):<{shapes}}  {name}"
            further = _further(family.like)
            if further:
                indent = " " * (counts + shapes + 4)
                yield wrapped(further, indent, "  ")
        yield ""


def _shared(row: ManifestRow) -> str:
    """Optimizer, rates and size of the update, and the reason."""
    said = row.optimizer or "none"
    if row.optimizer:
        said += f": lr {_rates(row)}, decay {row.weight_decay:g}"
        if row.update_rms is not None:
            said += f", update RMS {row.update_rms:.3g}"
    return f"{said} ({row.reason})"


def _further(row: ManifestRow) -> str:
    """Matrices that are others than the parameter, and how ranks share it."""
    said = []
    if row.sizes not in ("", _shape(row)):
        said.append(row.sizes)
    layout = _layout(row)
    if layout not in ("whole", "whole, local"):
        said.append(layout)
    return "; ".join(said)


def _layout(row: ManifestRow) -> str:
    return ", ".join([row.layout, *dict.fromkeys(matrix.scheme for matrix in row.matrices)])


def _shape(row: ManifestRow) -> str:
    return "x".join(map(str, row.shape)) or "scalar"


def _rates(row: ManifestRow) -> str:
    return f"{row.lr:g}" if row.lr == row.min_lr else f"{row.lr:g} to {row.min_lr:g}"


def _elements(families: Sequence[ParamPattern]) -> int:
    return sum(family.count * prod(family.like.shape) for family in families)


def _cells(row: ManifestRow) -> list[str]:
    return [
        row.name,
        _shape(row),
        row.optimizer or "none",
        row.reason,
        row.sizes or "-",
        _layout(row),
        "-" if row.update_rms is None else f"{row.update_rms:.3g}",
        _rates(row) if row.optimizer else "-",
        f"{row.weight_decay:g}" if row.optimizer else "-",
        megabytes(row.state_bytes),
    ]


def _totals(families: Sequence[ParamPattern]) -> list[list[str]]:
    of_each: dict[str, list[ParamPattern]] = {}
    for family in sorted(families, key=lambda family: family.like.optimizer or "~"):  # those of none last
        of_each.setdefault(family.like.optimizer or "none", []).append(family)
    of_each["all"] = list(families)
    lines = []
    for name, those in of_each.items():
        parameters = 0
        matrices = 0
        size = 0
        for family in those:
            parameters += family.count
            matrices += family.count * len(family.like.matrices)
            size += family.count * family.like.state_bytes
        lines.append([name, f"{parameters:,}", f"{_elements(those):,}", f"{matrices:,}", megabytes(size)])
    return lines


def _set(row: ManifestRow) -> Iterator[str]:
    values = row.settings | {"lr": row.lr, "min_lr": row.min_lr, "weight_decay": row.weight_decay}
    for key in sorted((row.settings.keys() | row.sources.keys()) - {"optimizer", "exclude"}):  # which the reason says
        value = values.get(key, "")
        if isinstance(value, float):
            value = f"{value:g}"
        shown = f"{key} {value}".strip()
        if key == "lr" and "lr_mult" in row.settings:
            shown += " after lr_mult"  # which else would seem to come on top
        if key in row.sources:
            shown += f" ({row.sources[key]})"
        yield shown
