"""One step of a plan: the buckets one after the other, each one's exchanges while others are computed."""

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.plan import Bucket, Plan
from megatron_eopt.parallel.schemes import SCHEMES, Scale

IN_FLIGHT = 3
"""Buckets at work at once: one whose pieces arrive, one that is computed, one whose results leave."""

_Running = Generator[None, None, list[Tensor]]


@torch.no_grad()
def execute(
    plan: Plan, shards: list[Tensor], groups: Mapping[str, ProcessGroup], settings: NewtonSchulz, scale: Scale
) -> list[Tensor]:
    """This rank's pieces of the scaled orthogonal factors of all matrices.

    The order in which buckets are resumed, and with it that of the collectives, follows from the plan alone, so it is
    the same on every rank: in each round the next bucket starts, and then those at work go on, the youngest first.

    Args:
        plan: the same on every rank of its groups.
        shards: this rank's piece of each matrix, in the order of ``plan.matrices``. The tensors are not written to, but
            the list is: each gives its place up for its result, so that it can be freed.
        groups: the ranks of each group that the plan names; those need no entry whose matrices exchange nothing.
        settings: of the iteration.
        scale: of a global matrix, from its rows and columns.

    Returns:
        ``shards``, now with new tensors of the same shapes and dtypes.

    Raises:
        ValueError: if there is not one shard for each matrix, or a group is missing.
    """
    if len(shards) != len(plan.matrices):
        raise ValueError(f"the plan has {len(plan.matrices)} matrices, got {len(shards)} shards")
    for bucket in plan.buckets:
        _check(bucket, plan, groups)
    at_work: list[tuple[Bucket, _Running]] = []
    waiting = list(reversed(plan.buckets))
    while waiting or at_work:
        if waiting and len(at_work) < IN_FLIGHT:
            bucket = waiting.pop()
            at_work.insert(0, (bucket, _start(bucket, plan, shards, groups, settings, scale)))
        still = []
        for bucket, running in at_work:
            done = _resume(running)
            if done is None:
                still.append((bucket, running))
            else:
                for index, result in zip(bucket.matrices, done, strict=True):
                    shards[index] = result
        at_work = still
    return shards


def _check(bucket: Bucket, plan: Plan, groups: Mapping[str, ProcessGroup]) -> None:
    label = plan.matrices[bucket.matrices[0]].group
    if bucket.scheme not in ("local", "blockwise") and label not in groups:
        raise ValueError(f"the plan exchanges over the group {label!r}; given are {sorted(groups)}")


def _start(
    bucket: Bucket,
    plan: Plan,
    shards: Sequence[Tensor],
    groups: Mapping[str, ProcessGroup],
    settings: NewtonSchulz,
    scale: Scale,
) -> _Running:
    matrices = [plan.matrices[index] for index in bucket.matrices]
    of_bucket = [shards[index] for index in bucket.matrices]
    return SCHEMES[bucket.scheme](bucket, matrices, of_bucket, groups.get(matrices[0].group), settings, scale)


def _resume(running: _Running) -> list[Tensor] | None:
    """Let a bucket go on to where it would wait next; its results when it is done."""
    try:
        next(running)
    except StopIteration as done:
        results: list[Tensor] = done.value
        return results
    return None
