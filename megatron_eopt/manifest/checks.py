"""What is wrong with who owns what: errors that a start fails on, and warnings that it prints."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from megatron_eopt.family import LIKE_MUON
from megatron_eopt.manifest.family import Family, as_families, by_index, by_pattern
from megatron_eopt.manifest.members import Index, compressed, contains, join_name, label, split_name
from megatron_eopt.manifest.row import Row
from megatron_eopt.manifest.words import owner_in_words
from megatron_eopt.row import ADAMW_RMS

FAR = 4.0
"""An update that is more than so many times larger or smaller than AdamW's is warned of."""

_TIED = ("owner", "lr", "min_lr", "weight_decay", "settings")


def problems(found: Iterable[Family] | Iterable[Row], optimizer: str, for_matrices: bool) -> list[str]:
    """Errors that a start fails on, each with what was found, what was expected and what to do.

    Args:
        found: of all ranks together; two rows of one name with different owners are one of the errors.
        optimizer: of the run, as ``--optimizer`` names it.
        for_matrices: whether that optimizer is for matrices, so that one without any does nothing of what it is for.

    Raises:
        ValueError: for rows that are equal, see :func:`~megatron_eopt.manifest.family.families`.
    """
    listed = as_families(found)
    return [
        *_unowned(listed),
        *_owned_twice(listed),
        *_drifting_ties(listed),
        *(_without_matrices(listed, optimizer) if for_matrices else ()),
    ]


def warnings(found: Iterable[Family] | Iterable[Row], scale_mode: str) -> list[str]:
    """What a run may well be meant to have, and should be seen: a line for each class of parameters.

    Args:
        found: of all ranks together.
        scale_mode: of the run, for parameters whose settings have no other.
    """
    listed = as_families(found)
    return [*_far_from_adam(listed, scale_mode), *_excluded(listed), *_decayed_vectors(listed)]


def _unowned(found: Sequence[Family]) -> Iterator[str]:
    for family in found:
        like = family.like
        if like.owner is None and not like.excluded:
            yield (
                f"nobody owns {family.named}{_because(like)}: expected one optimizer for every trainable parameter, or "
                f"it keeps the value it starts with; give it one (optimizer: adam in an overrides file), or leave it "
                f"out on purpose (exclude: true)"
            )
        elif like.owner is not None and like.excluded:
            yield (
                f"{like.owner} owns {family.named}, which is excluded{_because(like)}: expected no owner; build the "
                f"optimizers from parameter groups that leave it out"
            )


def _owned_twice(found: Sequence[Family]) -> Iterator[str]:
    for pattern, group in by_pattern(found).items():
        if len(group) == 1:
            continue
        twice: dict[frozenset[Row], list[Index]] = {}
        for index, likes in by_index(group).items():
            if len(likes) > 1:
                twice.setdefault(likes, []).append(index)
        for likes, indices in twice.items():
            owners = " and ".join(sorted(owner_in_words(like.owner) + _because(like) for like in likes))
            yield (
                f"{label(pattern, compressed(indices))} is listed {len(likes)} times, as owned by {owners}: expected "
                f"one owner, or it is stepped twice; give each optimizer its own parameters"
            )


def _drifting_ties(found: Sequence[Family]) -> Iterator[str]:
    """A tied parameter whose partner is not listed is another name of it, and cannot differ."""
    groups = by_pattern(found)
    for family in found:
        if family.like.tied_to is None:
            continue
        pattern, index = split_name(family.like.tied_to)
        for partner in groups.get(pattern, ()):
            if contains(partner.members, index) and (differing := _differing(family.like, partner.like)):
                yield (
                    f"{family.label} is tied to {join_name(pattern, index)}, and they differ in {differing}: expected "
                    f"the same for both, or they drift apart; select both in the override"
                )


def _differing(a: Row, b: Row) -> str:
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in _TIED]
    return ", ".join(f"{name} ({_shown(one)} and {_shown(other)})" for name, one, other in pairs if one != other)


def _without_matrices(found: Sequence[Family], optimizer: str) -> Iterator[str]:
    if any(family.like.matrices for family in found if family.like.owner == optimizer):
        return
    owned: Counter[str] = Counter()
    for family in found:
        owned[owner_in_words(family.like.owner)] += family.count
    owners = ", ".join(f"{owner} owns {number:,}" for owner, number in sorted(owned.items())) or "none is trainable"
    yield (
        f"--optimizer {optimizer} is for matrices, and none is its own on any rank (parameters: {owners}): "
        f"expected at least one; see the reasons in the manifest, change the overrides or what is frozen, or take "
        f"--optimizer adam"
    )


def _far_from_adam(found: Sequence[Family], scale_mode: str) -> Iterator[str]:
    classes: dict[tuple[str, str, bool], list[Family]] = {}
    for family in found:
        like = family.like
        if like.owner is None or not like.matrices or like.update_rms is None:
            continue
        if not ADAMW_RMS / FAR <= like.update_rms <= ADAMW_RMS * FAR:
            mode = str(like.settings.get("scale_mode", scale_mode))
            classes.setdefault((like.owner, mode, like.update_rms > ADAMW_RMS), []).append(family)
    for (owner, mode, large), members in sorted(classes.items()):
        sizes = [family.like.update_rms for family in members if family.like.update_rms is not None]
        factors = _span([size / ADAMW_RMS for size in sizes])
        # for other modes the size depends on the shape, which one factor cannot undo
        factor = " or --muon-extra-scale-factor 0.2" if mode == "spectral" else ""
        scaled = owner in LIKE_MUON
        what = f"{owner} with scale mode {mode}" if scaled else owner
        advice = f"take --muon-preset match_adamw{factor}, or" if scaled else "set --muon-lr for it, or"
        yield (
            f"{what} makes updates of RMS {_span(sizes)}, {factors} times Adam's {ADAMW_RMS:g}, for {_some(members)}: "
            f"a learning rate that is right for Adam is too {'large' if large else 'small'} by that; {advice} keep it "
            f"if lr {_span([family.like.lr for family in members])} is chosen for it"
        )


def _excluded(found: Sequence[Family]) -> Iterator[str]:
    for family in found:
        if family.like.excluded:
            yield f"{family.named} keeps the value it starts with{_because(family.like)}"


def _decayed_vectors(found: Sequence[Family]) -> Iterator[str]:
    decays: dict[float, list[Family]] = {}
    for family in found:
        like = family.like
        if like.owner is not None and len(like.shape) < 2 and like.weight_decay:
            decays.setdefault(like.weight_decay, []).append(family)
    for decay, members in sorted(decays.items()):
        yield (
            f"weight decay {decay:g} on vectors, {_some(members)}: biases and norms mostly have none; set weight_decay "
            f"0 for shape:vector, or keep it if it is meant"
        )


def _because(like: Row) -> str:
    return f" ({like.reason})" if like.reason else ""


def _some(members: Sequence[Family]) -> str:
    number = sum(family.count for family in members)
    noun = "parameter" if number == 1 else "parameters"
    more = f" and {len(members) - 1} more families" if len(members) > 1 else ""
    return f"{number:,} {noun} ({members[0].label}{more})"


def _span(values: Sequence[float]) -> str:
    shown = dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values)))
    return " to ".join(shown)


def _shown(value: object) -> str:
    return "nobody" if value is None else str(value)
