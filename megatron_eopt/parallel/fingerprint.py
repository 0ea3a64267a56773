"""What of a plan has to be the same on all ranks: its hash, and its first difference."""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from megatron_eopt.parallel.plan_records import Plan


@lru_cache
def _digest(value: tuple[Any, ...]) -> str:
    """SHA-256 of a fact of many numbers, which many matrices share."""
    return sha256(repr(value).encode()).hexdigest()


def fingerprint(plan: Plan, label: str | None = None) -> str:
    """SHA-256 of a plan, or of what a group shares."""
    facts = []
    for what, x in _facts(plan, label):
        facts.append((what, _digest(x) if isinstance(x, tuple) else x))
    return sha256(repr(facts).encode()).hexdigest()


def first_difference(mine: Plan, other: Plan, label: str | None = None) -> str | None:
    """The first fact in which two plans differ."""
    ours = dict(_facts(mine, label))
    theirs = dict(_facts(other, label))
    longer = ours if len(ours) >= len(theirs) else theirs
    for what in longer:
        x = ours.get(what)
        y = theirs.get(what)
        if x != y:
            return f"{what} {x!r} in the one and {y!r} in the other"
    return None


def _facts(plan: Plan, label: str | None) -> Iterator[tuple[str, Any]]:
    """What a plan says, in words and values; without a label of all groups."""
    matrices = [matrix for matrix in plan.matrices if label in (None, matrix.group)]
    buckets = [bucket for bucket in plan.buckets if label in (None, plan.one_of(bucket).group)]
    for number, matrix in enumerate(matrices):
        yield f"matrix {number} is", matrix.name
    for matrix in matrices:
        yield f"{matrix.name!r} has, by its shard, the whole shape", matrix.shape
        for what in ("rectangles", "group", "itemsize", "iteration"):
            yield f"{matrix.name!r} has the {what}", getattr(matrix, what)
    named = [tuple(plan.matrices[i].name for i in bucket.matrices) for bucket in buckets]
    for bucket, names in zip(buckets, named, strict=True):
        for name, compute_rank in zip_longest(names, bucket.compute_ranks):
            yield f"{name!r} has the scheme", bucket.scheme
            yield f"{name!r} has the compute rank", compute_rank
    for number, names in enumerate(named):
        yield f"bucket {number} begins with", names[0]
        yield f"bucket {number} has the matrices", names
