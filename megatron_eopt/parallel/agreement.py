"""How ranks compare groups, plans and settings."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import zip_longest
from struct import unpack
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.collectives import gather_numbers, values_of
from megatron_eopt.parallel.fingerprint import fingerprint, first_difference
from megatron_eopt.parallel.plan_records import Plan
from megatron_eopt.version import __version__

Groups = Mapping[str, ProcessGroup]  # of ranks, by label


def hashed(value: object) -> list[int]:
    """SHA-256 of the ``repr`` of a value, as four numbers of 64 bits."""
    return list(unpack("<4q", sha256(repr(value).encode()).digest()))


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
        of_group = {} if settings is None else settings[label]
        digests = gather_numbers(hashed((fingerprint(plan, label), of_group, versions())), group)
        pair = _differing([0] * len(digests), digests)
        if pair is None:
            continue
        (first, of_first, packages), (other, of_other, other_packages) = values_of(
            pair,
            (plan, of_group, versions()),
            group,
        )
        difference = (
            _first_version(packages, other_packages)
            or _first_setting(of_first, of_other)
            or first_difference(first, other, label)
        )
        raise ValueError(
            f"the optimizer's plan differs between ranks 0 and {pair[1]} of group {label!r}: {difference}. Ranks that "
            f"share parameters need the same parameters in the same order, with the same settings and, unless they are "
            f"DTensors, with shards of one shape: pad what does not divide"
        )


def _differing(keys: Sequence[int], values: Sequence[object]) -> tuple[int, int] | None:
    """The first two ranks with one key and two values."""
    first = dict[int, int]()
    for rank, key in enumerate(keys):
        other = first.setdefault(key, rank)
        if values[rank] != values[other]:
            return other, rank
    return None


def _first_version(of_one: Mapping[str, str], of_other: Mapping[str, str]) -> str | None:
    for package, version in of_one.items():
        if version != of_other[package]:
            return f"{package} is {version} in the one and {of_other[package]} in the other"
    return None


def _first_setting(of_one: Mapping[str, Any], of_other: Mapping[str, Any]) -> str | None:
    for i, (one, another) in enumerate(zip_longest(of_one, of_other)):
        if one != another:
            return f"parameter {i} is {one!r} in the one and {another!r} in the other"
        for key in {**of_one[one], **of_other[one]}:
            mine = of_one[one].get(key)
            theirs = of_other[one].get(key)
            if repr(mine) != repr(theirs):
                return f"{one!r} has {key} {mine!r} in the one and {theirs!r} in the other"
    return None
