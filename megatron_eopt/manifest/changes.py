"""What changed from one manifest to another: from a checkpoint's to that of the run that resumes from it."""

from collections.abc import Iterable, Iterator

from megatron_eopt.manifest.family import Family, by_index, by_pattern
from megatron_eopt.manifest.members import Index, compressed, count, join_name, label
from megatron_eopt.manifest.row import Row
from megatron_eopt.manifest.words import matrices_in_words, owner_in_words

_FIELDS = {
    "shape": "shape",
    "dtype": "dtype",
    "update_rms": "update RMS",
    "lr": "lr",
    "min_lr": "min_lr",
    "weight_decay": "weight decay",
    "tied_to": "tied to",
    "excluded": "excluded",
}


def compare(old: Iterable[Family], new: Iterable[Family]) -> list[str]:
    """A line for every change, with all parameters that it was made for.

    What another number of ranks changes is no change: layouts, schemes (but for blockwise, which makes other updates)
    and sizes of state. Neither are reasons and places of settings.

    Args:
        old: families of the checkpoint.
        new: of this run.

    Raises:
        ValueError: for a parameter with two owners, which :func:`~megatron_eopt.manifest.checks.problems` finds.
    """
    before, now = by_pattern(old), by_pattern(new)
    lines = []
    for pattern in dict.fromkeys([*before, *now]):
        if before.get(pattern) == now.get(pattern):
            continue
        was, comes = _single(pattern, before.get(pattern, ())), _single(pattern, now.get(pattern, ()))
        known: dict[tuple[Row | None, Row | None], str] = {}
        changed: dict[str, list[Index]] = {}
        for index in sorted(was.keys() | comes.keys()):
            pair = was.get(index), comes.get(index)
            if pair not in known:
                known[pair] = "; ".join(_changes(*pair))
            if known[pair]:
                changed.setdefault(known[pair], []).append(index)
        for what, indices in changed.items():
            members = compressed(indices)
            number = count(members)
            lines.append(f"{label(pattern, members)}{f' ({number:,} parameters)' if number > 1 else ''}: {what}")
    return lines


def _single(pattern: str, group: Iterable[Family]) -> dict[Index, Row]:
    single = {}
    for index, likes in by_index(group).items():
        if len(likes) > 1:
            owners = " and ".join(sorted(owner_in_words(like.owner) for like in likes))
            raise ValueError(
                f"{join_name(pattern, index)} is listed {len(likes)} times, as owned by {owners}: expected a manifest "
                f"without problems; this one cannot be compared"
            )
        (single[index],) = likes
    return single


def _changes(old: Row | None, new: Row | None) -> Iterator[str]:
    if old is None or new is None:
        if new is not None:
            yield f"added, owned by {owner_in_words(new.owner)}"
        if old is not None:
            yield f"removed, was owned by {owner_in_words(old.owner)}"
        return
    if old.owner != new.owner:
        yield f"owner {owner_in_words(old.owner)} -> {owner_in_words(new.owner)}"
    if _sizes(old) != _sizes(new):
        was, comes = (matrices_in_words(row.matrices) or "none" for row in (old, new))
        yield f"matrices {was} -> {comes}"
    if _approximate(old) != _approximate(new):
        yield "orthogonalized blockwise -> exactly" if _approximate(old) else "orthogonalized exactly -> blockwise"
    for name, shown in _FIELDS.items():
        yield from _change(shown, getattr(old, name), getattr(new, name))
    for key in sorted(old.settings.keys() | new.settings.keys()):
        yield from _change(key, old.settings.get(key, "default"), new.settings.get(key, "default"))


def _change(name: str, old: object, new: object) -> Iterator[str]:
    if old != new:
        was, comes = ("none" if value is None else value for value in (old, new))
        yield f"{name} {was} -> {comes}"


def _sizes(row: Row) -> list[tuple[str, int, int]]:
    return [(matrix.name, matrix.rows, matrix.cols) for matrix in row.matrices]


def _approximate(row: Row) -> bool:
    return any(matrix.scheme == "blockwise" for matrix in row.matrices)
