"""Errors and warnings of a manifest, and its changes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from megatron_eopt.family import ADAMW_RMS, LIKE_MUON
from megatron_eopt.routing.patterns import (
    Index,
    Likes,
    ManifestRow,
    ParamPattern,
    by_index,
    by_pattern,
    compressed,
    expanded,
    split_name,
)

FAR = 4.0  # warn of updates more than so many times larger or smaller than AdamW's
_TIED = ("optimizer", "lr", "min_lr", "weight_decay", "settings")  # equal for tied parameters


def problems(families: Sequence[ParamPattern], optimizer: str, for_matrices: bool) -> list[str]:
    """Errors that end a start.

    ``families`` are of all ranks together, ``optimizer`` is the run's, of no use without matrices if ``for_matrices``.
    """
    wrong = [*_without_optimizer(families), *_listed_twice(families), *_drifting_ties(families)]
    return [*wrong, *_without_matrices(families, optimizer)] if for_matrices else wrong


def _without_optimizer(families: Sequence[ParamPattern]) -> Iterator[str]:
    for family in families:
        row = family.like
        if row.optimizer is None and not row.excluded:
            yield (
                f"no optimizer has {family.named}{_because(row)}: expected one optimizer for every trainable "
                f"parameter, or it keeps the value it starts with; give it one (optimizer: adam in an overrides file), "
                f"or leave it out on purpose (exclude: true)"
            )
        elif row.optimizer is not None and row.excluded:
            yield (
                f"{row.optimizer} has {family.named}, which is excluded{_because(row)}: expected no optimizer; build "
                f"the optimizers from parameter groups that leave it out"
            )


def _listed_twice(families: Sequence[ParamPattern]) -> Iterator[str]:
    for group in by_pattern(families).values():
        twice: dict[Likes, list[Index]] = {}
        for index, rows in by_index(group).items():
            if len(rows) > 1:
                twice.setdefault(rows, []).append(index)
        for rows, indices in twice.items():
            optimizers = " and ".join(sorted(_shown(row.optimizer) + _because(row) for row in rows))
            label = ParamPattern(group[0].like, compressed(indices)).label
            yield (
                f"{label} is listed {len(rows)} times, for the optimizers {optimizers}: expected one optimizer, or it "
                f"is stepped twice; give each optimizer its own parameters"
            )


def _drifting_ties(families: Sequence[ParamPattern]) -> Iterator[str]:
    groups = by_pattern(families)  # a partner that is not listed is another name of the same parameter
    for family in families:
        row = family.like
        if row.tied_to is None:
            continue
        pattern, index = split_name(row.tied_to)
        for partner in groups.get(pattern, ()):
            pairs = [(name, getattr(row, name), getattr(partner.like, name)) for name in _TIED]
            differing = [f"{name} ({_shown(one)} and {_shown(other)})" for name, one, other in pairs if one != other]
            if differing and index in expanded(partner.members):
                yield (
                    f"{family.label} is tied to {row.tied_to}, and they differ in {', '.join(differing)}: expected "
                    f"the same for both, or they drift apart; select both in the override"
                )


def _without_matrices(families: Sequence[ParamPattern], optimizer: str) -> Iterator[str]:
    if any(family.like.matrices for family in families if family.like.optimizer == optimizer):
        return
    numbers: Counter[str] = Counter()
    for family in families:
        numbers[family.like.optimizer or "no optimizer"] += family.count
    others = ", ".join(f"{name} has {number:,}" for name, number in sorted(numbers.items())) or "none is trainable"
    yield (
        f"--optimizer {optimizer} is for matrices, and it has none on any rank (parameters: {others}): expected at "
        f"least one; see the reasons in the manifest, change the overrides or what is frozen, or take --optimizer adam"
    )


def warnings(families: Sequence[ParamPattern], scale_mode: str) -> list[str]:
    """Warnings; ``scale_mode`` is the run's default."""
    excluded = [family for family in families if family.like.excluded]
    kept = [f"{family.named} keeps the value it starts with{_because(family.like)}" for family in excluded]
    return [*_far_from_adam(families, scale_mode), *kept, *_decayed_vectors(families)]


def _far_from_adam(families: Sequence[ParamPattern], scale_mode: str) -> Iterator[str]:
    classes: dict[tuple[str, str, bool], list[ParamPattern]] = {}
    for family in families:
        row, rms = family.like, family.like.update_rms
        if row.optimizer and row.matrices and rms is not None and not ADAMW_RMS / FAR <= rms <= ADAMW_RMS * FAR:
            mode = str(row.settings.get("scale_mode", scale_mode))
            classes.setdefault((row.optimizer, mode, rms > ADAMW_RMS), []).append(family)
    for (optimizer, mode, large), members in sorted(classes.items(), key=lambda item: item[0]):
        sizes = [family.like.update_rms or 0.0 for family in members]
        # in other modes the size depends on the shape
        factor = " or --muon-extra-scale-factor 0.2" if mode == "spectral" else ""
        scaled = optimizer in LIKE_MUON
        what = f"{optimizer} with scale mode {mode}" if scaled else optimizer
        advice = f"take --muon-preset match_adamw{factor}, or" if scaled else "set --muon-lr for it, or"
        yield (
            f"{what} makes updates of RMS {_span(sizes)}, {_span([size / ADAMW_RMS for size in sizes])} times Adam's "
            f"{ADAMW_RMS:g}, for {_some(members)}: a learning rate that is right for Adam is too "
            f"{'large' if large else 'small'} by that; {advice} keep it if lr "
            f"{_span([family.like.lr for family in members])} is chosen for it"
        )


def _decayed_vectors(families: Sequence[ParamPattern]) -> Iterator[str]:
    decays: dict[float, list[ParamPattern]] = {}
    for family in families:
        row = family.like
        if row.optimizer is not None and len(row.shape) < 2 and row.weight_decay:
            decays.setdefault(row.weight_decay, []).append(family)
    for decay, members in sorted(decays.items()):
        yield (
            f"weight decay {decay:g} on vectors, {_some(members)}: biases and norms mostly have none; set weight_decay "
            f"0 for shape:vector, or keep it if it is meant"
        )


def compare(old: Iterable[ParamPattern], new: Iterable[ParamPattern]) -> list[str]:
    """Changes from one manifest to another, a line each.

    Left out is what another number of ranks changes (layouts, sizes of state, and schemes but blockwise, which makes
    other updates), and reasons and sources of settings. A parameter of two optimizers is a ``ValueError``.
    """
    before, now = by_pattern(old), by_pattern(new)
    lines = []
    for pattern in dict.fromkeys([*before, *now]):
        if before.get(pattern) == now.get(pattern):
            continue
        was, comes = (by_index(manifest.get(pattern, ())) for manifest in (before, now))
        known: dict[tuple[Likes, Likes], str] = {}
        changed: dict[str, list[Index]] = {}
        for index in sorted(was.keys() | comes.keys()):
            pair = was.get(index, frozenset()), comes.get(index, frozenset())
            if pair not in known:
                known[pair] = "; ".join(_changes(_only(pair[0], index), _only(pair[1], index)))
            if known[pair]:
                changed.setdefault(known[pair], []).append(index)
        like = (now.get(pattern) or before[pattern])[0].like
        lines += [f"{ParamPattern(like, compressed(indices)).named}: {what}" for what, indices in changed.items()]
    return lines


def _only(rows: Likes, index: Index) -> ManifestRow | None:
    if len(rows) > 1:
        name = ParamPattern(next(iter(rows)), compressed([index])).label
        optimizers = " and ".join(sorted(_shown(row.optimizer) for row in rows))
        raise ValueError(
            f"{name} is listed {len(rows)} times, for the optimizers {optimizers}: expected a manifest without "
            f"problems; this one cannot be compared"
        )
    return next(iter(rows), None)


def _changes(old: ManifestRow | None, new: ManifestRow | None) -> Iterator[str]:
    if old is not None and new is not None:
        before, now = old.settings | _compared(old), new.settings | _compared(new)
        for name in [*_compared(old), *sorted(old.settings.keys() | new.settings.keys())]:
            was, comes = before.get(name, "default"), now.get(name, "default")
            if was != comes:
                yield f"{name} {_shown(was)} -> {_shown(comes)}"
    elif new is not None:
        yield f"added, with the optimizer {_shown(new.optimizer)}"
    elif old is not None:
        yield f"removed, had the optimizer {_shown(old.optimizer)}"


def _compared(row: ManifestRow) -> dict[str, object]:
    """What is compared beside settings, by its printed name."""
    return {
        "optimizer": row.optimizer,
        "matrices": row.sizes or None,
        "orthogonalized": "blockwise" if any(matrix.scheme == "blockwise" for matrix in row.matrices) else "exactly",
        "shape": row.shape,
        "dtype": row.dtype,
        "update RMS": row.update_rms,
        "lr": row.lr,
        "min_lr": row.min_lr,
        "weight decay": row.weight_decay,
        "tied to": row.tied_to,
        "excluded": row.excluded,
    }


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _because(row: ManifestRow) -> str:
    return f" ({row.reason})" if row.reason else ""


def _some(members: Sequence[ParamPattern]) -> str:
    number = sum(family.count for family in members)
    more = f" and {len(members) - 1} more families" if len(members) > 1 else ""
    return f"{number:,} {'parameter' if number == 1 else 'parameters'} ({members[0].label}{more})"


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))
