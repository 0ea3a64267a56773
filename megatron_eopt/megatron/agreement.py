"""What all ranks of a run find out together: each function is called by every rank, and returns the same on each."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_eopt.overrides import OverrideError
from megatron_eopt.parallel.collectives import lowest


def gathered[T](value: T) -> list[T]:
    """The values of all ranks, in their order."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def from_rank_0[T](find: Callable[[], T]) -> T:
    """What the first rank finds."""
    found: list[Any] = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return cast(T, found[0])


def on_all_ranks[T](decide: Callable[[], T]) -> T:
    """What is decided on this rank; a mistake of one is an OverrideError on all, so that none waits for another."""
    error = None
    try:
        decided = decide()
    except ValueError as found:
        error = str(found)
    # the objects of a thousand ranks take their time
    all_well = lowest(torch.tensor([error is None]).int(), dist.group.WORLD)  # type: ignore[arg-type]
    for found_there in [] if all_well else gathered(error):
        if found_there is not None:
            raise OverrideError(found_there)
    return decided
