"""How ranks agree on groups, plans and rates."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from struct import unpack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize import timing
from megatron_eopt.orthogonalize.kernels import Shapes, choose
from megatron_eopt.orthogonalize.products import Fp32Precision
from megatron_eopt.parallel.collectives import gather_numbers, lowest, values_of
from megatron_eopt.parallel.fingerprint import fingerprint, first_difference
from megatron_eopt.parallel.records import Plan

logger = logging.getLogger(__name__)

Groups = Mapping[str, ProcessGroup]  # of ranks, by label
KernelProducts = tuple[Shapes, Sequence[torch.dtype], torch.device, Fp32Precision]  # of a kernel that is chosen
_SENT_BYTES = 2**22


def hashed(value: object) -> list[int]:
    """SHA-256 of the ``repr`` of a value, as four numbers of 64 bits."""
    return list(unpack("<4q", sha256(repr(value).encode()).digest()))


@cache
def versions() -> dict[str, str]:
    """What computes a step: torch, and this package.

    The package is told by a hash of its sources: between two commits its number need not differ.
    """
    sources = sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        sources.update(path.read_bytes())
    return {"torch": torch.__version__, "megatron_eopt": f"of sources {sources.hexdigest()[:12]}"}


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
            f"share parameters need the same parameters in the same order, with the same settings"
        )


def times_kernels(kernel: str | None, kept: str | None, device: torch.device) -> bool:
    """Whether ranks time kernels together: on a GPU, if none is given."""
    return kernel is None and kept is None and timing.is_timed(device)


def agreed_kernel(
    products: KernelProducts,
    kernel: str | None,
    kept: str | None,
    groups: Groups,
) -> str:
    """The choice of a kernel, the same on the ranks of all groups.

    ``kernel`` is that of the user, ``kept`` that of the checkpoint or the run. If neither is given, kernels are timed
    on a GPU. Raises ``RuntimeError`` if the kernel cannot serve.
    """
    stacks, dtypes, device, precision = products
    compiles = groups if timing.is_timed(device) else {}
    timed = None
    if times_kernels(kernel, kept, device):
        times = in_turns(lambda: timing.times(*products, tell=_tell), groups)
        timed = timing.fastest(-lowest_of_all(-times, groups))
    choice = choose(
        stacks,
        dtypes,
        device,
        kernel=kernel,
        kept=kept,
        timed=timed,
        fp32_precision=precision,
        agree=lambda serves: lowest_of_all(serves, groups),
        take_turns=lambda check: in_turns(check, compiles),
    )
    return choice.kernel


def _tell(message: str) -> None:
    """Log on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message)


def check_same_on_replicas(held: object, settings: Mapping[str, Any]) -> None:
    """Refuse settings that differ between ranks with equal ``held``.

    All ranks of the world call it. ``held`` tells what a rank has of the model, ``settings`` are by parameter.
    ``ValueError`` on all names the first difference.
    """
    ranks: Any = dist.group.WORLD
    compared = held, (settings, versions())
    holders, of_settings = zip(*gather_numbers([hashed(x)[0] for x in compared], ranks), strict=True)
    pair = _differing(holders, of_settings)
    if pair:
        (of_one, packages), (of_other, other_packages) = values_of(pair, (settings, versions()), ranks)
        difference = _first_version(packages, other_packages) or _first_setting(of_one, of_other)
        raise ValueError(
            f"the optimizer's settings differ between ranks {pair[0]} and {pair[1]}, which hold the same parameters: "
            f"{difference}. Replicas need the same settings"
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


def lowest_of_all(x: Tensor, groups: Groups) -> Tensor:
    """Element-wise minimum over the ranks of every group."""
    for group in groups.values():
        x = lowest(x, group)
    return x


def in_turns[T](compute: Callable[[], T], groups: Groups) -> T:
    """Compute on one rank of each node, then on the others.

    These find in its cache what it compiled. All ranks of the groups call it; nodes are told apart by ``LOCAL_RANK``,
    as torchrun sets it, without which all compute at once.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    told = torch.zeros(1, dtype=torch.int32)
    try:
        found = compute() if first else None
    finally:
        lowest_of_all(told, groups)
    return cast(T, found) if first else compute()
