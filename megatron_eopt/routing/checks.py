"""Errors and warnings of a manifest, and its changes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from megatron_eopt.family import ADAMW_RMS, LIKE_MUON
from megatron_eopt.routing.patterns import (
    ManifestRow,
    ParamPattern,
    by_pattern,
    compressed,
    expanded,
    rows,
    split_name,
)
from megatron_eopt.routing.patterns import families as patterns_of
from megatron_eopt.routing.settings import SCHEDULED
from megatron_eopt.screen import span

FAR = 4.0  # warn of updates more than so many times larger or smaller than AdamW's
_NAMED = 3  # families in a line of a resume
_TIED = ("optimizer", "lr", "min_lr", "weight_decay", "settings")  # equal for tied parameters


def problems(families: Sequence[ParamPattern], optimizer: str, for_matrices: bool) -> list[str]:
    """Errors that end a start.

    ``families`` are of all ranks together, ``optimizer`` is the run's, of no use without matrices if ``for_matrices``.
    """
    wrong = [*_without_optimizer(families), *_listed_twice(families), *_drifting_ties(families)]
    if for_matrices:
        wrong += _without_matrices(families, optimizer)
    return wrong


def _without_optimizer(families: Sequence[ParamPattern]) -> Iterator[str]:
    for family in families:
        row = family.like
        if row.optimizer is None and not row.excluded:
            yield (
                f"no optimizer has {family.named} ({row.reason}): expected one optimizer for every trainable "
                f"parameter, or it keeps the value it starts with; give it one (optimizer: adam in an overrides file), "
                f"or leave it out on purpose (exclude: true)"
            )
        elif row.optimizer is not None and row.excluded:
            yield (
                f"{row.optimizer} has {family.named}, which is excluded ({row.reason}): expected no optimizer; build "
                f"the optimizers from parameter groups that leave it out"
            )


def _listed_twice(families: Iterable[ParamPattern]) -> Iterator[str]:
    """Errors of parameters of two optimizers, or of which ranks say two things."""
    of_names = defaultdict[str, list[ManifestRow]](list)
    for row in rows(families):
        of_names[row.name].append(replace(row, name=""))
    twice = defaultdict[tuple[str, tuple[ManifestRow, ...]], list[str]](list)
    for name, found in of_names.items():
        if len(found) > 1:
            twice[split_name(name)[0], tuple(found)].append(name)
    for (_, alike), names in twice.items():
        label = _named([replace(alike[0], name=name) for name in names])
        yield (
            f"{label} is listed {len(alike)} times, {_differing(alike)}: expected one optimizer, or it is stepped "
            f"twice; give each optimizer its own parameters, and all ranks the same flags, files and packages"
        )


def _differing(rows: Sequence[ManifestRow]) -> str:
    """Rows by the fields and settings in which they differ."""
    values = [vars(row) | {"settings": None} | row.settings for row in rows]
    names = []
    for name in dict.fromkeys(chain(*values)):
        if any(value.get(name) != values[0].get(name) for value in values):
            names.append(name)
    described = []
    for value in values:
        described.append(", ".join(f"{name} {value.get(name)}" for name in names))
    return " and ".join(described)


def _drifting_ties(families: Sequence[ParamPattern]) -> Iterator[str]:
    groups = by_pattern(families)  # a partner that is not listed is another name of the same parameter
    for family in families:
        row = family.like
        if row.tied_to is None:
            continue
        pattern, index = split_name(row.tied_to)
        for partner in groups.get(pattern, ()):
            differs = any(getattr(row, name) != getattr(partner.like, name) for name in _TIED)
            if differs and index in expanded(partner.members):
                yield (
                    f"{family.label} is tied to {row.tied_to}, and they differ, {_differing([row, partner.like])}: "
                    f"expected the same {', '.join(_TIED)} for both, or they drift apart; select both in the override"
                )


def _without_matrices(families: Sequence[ParamPattern], optimizer: str) -> Iterator[str]:
    if not any(family.like.optimizer == optimizer and family.like.matrices for family in families):
        yield (
            f"--optimizer {optimizer} is for matrices, and it has none on any rank: expected at least one; see the "
            f"reasons in the manifest, change the overrides or what is frozen, or take --optimizer adam"
        )


def warnings(families: Sequence[ParamPattern], scale_mode: str) -> list[str]:
    """Warnings; ``scale_mode`` is the run's default."""
    found = list(_far_from_adam(families, scale_mode))
    decays = defaultdict[float, list[ParamPattern]](list)
    for family in families:
        row = family.like
        if row.excluded:
            found.append(f"{family.named} keeps the value it starts with ({row.reason})")
        elif row.optimizer is not None and len(row.shape) < 2 and row.weight_decay:
            decays[row.weight_decay].append(family)
    for decay, members in sorted(decays.items()):
        found.append(
            f"weight decay {decay:g} on vectors, {_some(members)}: biases and norms mostly have none; set weight_decay "
            f"0 for shape:vector, or keep it if it is meant"
        )
    return found


def _far_from_adam(families: Sequence[ParamPattern], scale_mode: str) -> Iterator[str]:
    classes = defaultdict[tuple[str, bool], list[ParamPattern]](list)
    for family in families:
        row = family.like
        rms = row.update_rms
        if not row.optimizer or not row.matrices or rms is None or ADAMW_RMS / FAR <= rms <= ADAMW_RMS * FAR:
            continue
        what = row.optimizer
        if what in LIKE_MUON:
            what += f" with scale mode {row.settings.get('scale_mode', scale_mode)}"
        classes[what, rms > ADAMW_RMS].append(family)
    for (what, large), members in sorted(classes.items(), key=lambda item: item[0]):
        sizes = [family.like.update_rms or 0.0 for family in members]
        times = [size / ADAMW_RMS for size in sizes]
        rates = [family.like.lr for family in members]
        yield (
            f"{what} makes updates of RMS {span(sizes)}, {span(times)} times Adam's {ADAMW_RMS:g}, for "
            f"{_some(members)}: a learning rate that is right for Adam is too {'large' if large else 'small'} by that; "
            f"take --muon-preset match_adamw with muon or one like it, or set --muon-lr, or keep it if lr "
            f"{span(rates)} is chosen for it"
        )


def compare(old: Iterable[ParamPattern], new: Iterable[ParamPattern]) -> list[str]:
    """Changes from one manifest to another, a line each.

    Left out is what another number of ranks changes (layouts, sizes of state, and schemes but blockwise, which makes
    other updates), and reasons and sources of settings.
    """
    before = {row.name: row for row in rows(old)}
    now = {row.name: row for row in rows(new)}
    both = before | now
    changed = defaultdict[str, dict[str, list[ManifestRow]]](dict)  # changes -> pattern -> rows
    for row in both.values():
        changes = "; ".join(_changes(before.get(row.name), now.get(row.name)))
        if changes:
            pattern, _ = split_name(row.name)
            changed[changes].setdefault(pattern, []).append(row)
    lines = []
    for changes, of_patterns in changed.items():
        number = sum(len(alike) for alike in of_patterns.values())
        names = [_named(alike) for alike in of_patterns.values()]
        if len(names) > 1 and number == len(both):
            names = [f"all {number:,} parameters"]
        elif len(names) > _NAMED:
            names[_NAMED - 1 :] = [f"{len(names) - _NAMED + 1} more families, {number:,} parameters in all"]
        lines.append(f"{', '.join(names)}: {changes}")
    return lines


def with_schedule(families: Iterable[ParamPattern], other: Iterable[ParamPattern]) -> list[ParamPattern]:
    """A manifest with the rates and weight decays of another one, where that has the parameter."""
    others = {row.name: row for row in rows(other)}
    found = []
    for row in rows(families):
        like = others.get(row.name, row)
        settings = {key: value for key, value in row.settings.items() if key not in SCHEDULED}
        settings |= {key: value for key, value in like.settings.items() if key in SCHEDULED}
        row = replace(row, settings=settings)
        found.append(replace(row, lr=like.lr, min_lr=like.min_lr, weight_decay=like.weight_decay))
    return patterns_of(found)


def _named(alike: Sequence[ManifestRow]) -> str:
    """Rows of one pattern by their names."""
    pattern, _ = split_name(alike[0].name)
    indices = [split_name(row.name)[1] for row in alike]
    return ParamPattern(replace(alike[0], name=pattern), compressed(indices)).named


def _changes(old: ManifestRow | None, new: ManifestRow | None) -> Iterator[str]:
    if old is None and new is not None:
        yield f"added, with the optimizer {new.optimizer or 'none'}"
    elif new is None and old is not None:
        yield f"removed, had the optimizer {old.optimizer or 'none'}"
    elif old is not None and new is not None:
        before = _compared(old)
        now = _compared(new)
        for name in dict.fromkeys([*before, *now]):
            was = before.get(name, "default")
            comes = now.get(name, "default")
            if was != comes:
                yield f"{name} {was} -> {comes}"


def _compared(row: ManifestRow) -> dict[str, object]:
    """What is compared, by its printed name."""
    return {
        "optimizer": row.optimizer or "none",
        "matrices": row.sizes or "none",
        "orthogonalized": "blockwise" if any(matrix.scheme == "blockwise" for matrix in row.matrices) else "exactly",
        "shape": row.shape,
        "dtype": row.dtype,
        "update RMS": "none" if row.update_rms is None else row.update_rms,
        "lr": row.lr,
        "min_lr": row.min_lr,
        "weight decay": row.weight_decay,
        "tied to": row.tied_to or "none",
        "excluded": row.excluded,
        **row.settings,
    }


def _some(members: Sequence[ParamPattern]) -> str:
    number = sum(family.count for family in members)
    more = f" and {len(members) - 1} more families" if len(members) > 1 else ""
    return f"{number:,} {'parameter' if number == 1 else 'parameters'} ({members[0].label}{more})"
