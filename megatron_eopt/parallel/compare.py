"""Whether two ranks have the same plan, and what differs where they have not."""

from collections.abc import Iterator
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_eopt.parallel.plan import Bucket, Matrix, Plan


def fingerprint(plan: "Plan", label: str | None = None) -> str:
    """SHA-256 of a plan, in hexadecimal digits.

    Args:
        plan: of this rank.
        label: of a group: what other groups share, and what a rank has for itself, is left out.
    """
    lines = [repr(matrix) for matrix in _matrices(plan, label)]
    lines += [repr((bucket.scheme, names, bucket.owners)) for bucket, names in _buckets(plan, label)]
    return sha256("\n".join(lines).encode()).hexdigest()


def first_difference(mine: "Plan", other: "Plan", label: str | None = None) -> str | None:
    """The first parameter in which two plans differ, and in what; None for equal ones.

    Args:
        mine: a plan.
        other: another rank's.
        label: as for :func:`fingerprint`.
    """
    ours, theirs = _matrices(mine, label), _matrices(other, label)
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.name != b.name:
            return f"matrix {place} is {a.name!r} in the one and {b.name!r} in the other"
        for what in ("shape", "pieces", "group", "itemsize"):
            a_is, b_is = getattr(a, what), getattr(b, what)
            if a_is != b_is:
                return f"{a.name!r} has the {what} {a_is!r} in the one and {b_is!r} in the other"
    if len(ours) != len(theirs):
        more, which = (ours, "first") if len(ours) > len(theirs) else (theirs, "second")
        return f"{more[min(len(ours), len(theirs))].name!r} is in the {which} only"
    of_mine, of_other = _decisions(mine, label), _decisions(other, label)
    for matrix in ours:
        a_has, b_has = of_mine[matrix.name], of_other[matrix.name]
        for what, a_is, b_is in zip(("scheme", "owner"), a_has, b_has, strict=True):
            if a_is != b_is:
                return f"{matrix.name!r} has the {what} {a_is!r} in the one and {b_is!r} in the other"
    for place, ((_, a_names), (_, b_names)) in enumerate(
        zip(_buckets(mine, label), _buckets(other, label), strict=False)
    ):
        if a_names != b_names:
            return f"bucket {place} begins with {a_names[0]!r} in the one and with {b_names[0]!r} in the other"
    return None


def _matrices(plan: "Plan", label: str | None) -> list["Matrix"]:
    return [matrix for matrix in plan.matrices if label in (None, matrix.group)]


def _buckets(plan: "Plan", label: str | None) -> Iterator[tuple["Bucket", tuple[str, ...]]]:
    """The buckets of a group and the names of their matrices, in the order of execution."""
    for bucket in plan.buckets:
        if label in (None, plan.matrices[bucket.matrices[0]].group):
            yield bucket, tuple(plan.matrices[i].name for i in bucket.matrices)


def _decisions(plan: "Plan", label: str | None) -> dict[str, tuple[str, int | None]]:
    """Scheme and owner of each matrix, by name."""
    return {
        name: (bucket.scheme, bucket.owners[place] if bucket.owners else None)
        for bucket, names in _buckets(plan, label)
        for place, name in enumerate(names)
    }
