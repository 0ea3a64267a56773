"""What ranks have to have in common: it is described, compared, and the first rank that differs is named.

A description has named values. Ranks exchange its hash, and only where hashes differ the descriptions of two of them.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from itertools import zip_longest
from struct import unpack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.collectives import gather_numbers, values_of
from megatron_eopt.parallel.plan_records import Plan
from megatron_eopt.parallel.rectangles import Rectangle
from megatron_eopt.version import __version__

Groups = Mapping[str, ProcessGroup]  # of ranks, by label
Description = Mapping[str, Any]  # values by name; equal ones have an equal ``repr``


def hashed(value: object) -> list[int]:
    """SHA-256 of the ``repr`` of a value, as four numbers of 64 bits."""
    return list(unpack("<4q", sha256(repr(value).encode()).digest()))


def compare(described: Description, group: ProcessGroup) -> list[str]:
    """A line for each value that differs between a group's first rank and the first that differs from it.

    All its ranks call it together, and get the same lines.
    """
    hashes = gather_numbers(hashed(sorted(described.items())), group)
    other = next((rank for rank, each in enumerate(hashes) if each != hashes[0]), None)
    if other is None:
        return []
    one, another = values_of((0, other), dict(described), group)
    return differences(one, another, dist.get_global_rank(group, 0), dist.get_global_rank(group, other))


def differences(one: Description, another: Description, rank: int = 0, other: int = 1) -> list[str]:
    """A line for each value that two ranks have otherwise."""
    lines = []
    longer = max(one, another, key=len)  # in whose order the first difference comes first
    for name in {**longer, **one, **another}:
        mine = one.get(name, "missing")
        theirs = another.get(name, "missing")
        if repr(mine) != repr(theirs):
            lines.append(f"{name} is {mine!r} on rank {rank} and {theirs!r} on rank {other}")
    return lines


@cache
def versions() -> dict[str, str]:
    """What computes a step: torch, and this package."""
    return {"torch": torch.__version__, "megatron_eopt": __version__}


def groups_by_label(shared_by: Iterable[tuple[str, Groups]]) -> dict[str, ProcessGroup]:
    """The groups that share parameters, by label, sorted."""
    groups: dict[str, ProcessGroup] = {}
    for name, of_parameter in shared_by:
        for label, group in of_parameter.items():
            if groups.setdefault(label, group) is not group:
                raise ValueError(
                    f"{name} lies on another group of ranks than parameters before it, but both are called "
                    f"{label!r}: give the dimensions of one device mesh other names, or each mesh an optimizer"
                )
    return dict(sorted(groups.items()))


def check_same(plan: Plan, groups: Groups, settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Refuse a plan, settings, or versions that differ between ranks.

    ``settings`` are by label and parameter. ``ValueError`` names the first difference.
    """
    for label, group in groups.items():
        described = {f"the version of {package}": version for package, version in versions().items()}
        if settings is not None:
            described |= described_settings(settings[label])
        lines = compare(described | described_plan(plan, label), group)
        if lines:
            raise ValueError(
                f"the optimizer's plan differs between ranks of group {label!r}: {lines[0]}. Ranks that share "
                f"parameters need the same parameters in the same order, with the same settings and, unless they are "
                f"DTensors, with shards of one shape: pad what does not divide"
            )


def described_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by parameter, which are in order."""
    described: dict[str, Any] = {f"parameter {number}": name for number, name in enumerate(settings)}
    for name, of_parameter in settings.items():
        described |= {f"{key} of {name!r}": value for key, value in of_parameter.items()}
    return described


def described_plan(plan: Plan, label: str | None = None) -> dict[str, Any]:
    """What a plan says of the matrices of a group, or of all."""
    matrices = [matrix for matrix in plan.matrices if label in (None, matrix.group)]
    buckets = [bucket for bucket in plan.buckets if label in (None, plan.one_of(bucket).group)]
    described: dict[str, Any] = {f"matrix {number}": matrix.name for number, matrix in enumerate(matrices)}
    first: dict[tuple[Rectangle, ...], str] = {}  # a layout over thousands of ranks is described once
    for matrix in matrices:
        name = repr(matrix.name)
        like = first.setdefault(matrix.rectangles, name)
        described[f"the whole shape, by its shard, of {name}"] = matrix.shape
        described[f"the layout of {name}"] = matrix.rectangles if like == name else f"that of {like}"
        for what in ("group", "itemsize", "iteration"):
            described[f"the {what} of {name}"] = getattr(matrix, what)
    for number, bucket in enumerate(buckets):
        names = [plan.matrices[i].name for i in bucket.matrices]
        for name, compute_rank in zip_longest(names, bucket.compute_ranks):
            described[f"the scheme of {name!r}"] = bucket.scheme
            described[f"the compute rank of {name!r}"] = compute_rank
        described[f"bucket {number}"] = names
    return described
