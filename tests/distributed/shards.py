"""What the tests of several ranks share: groups, whole tensors and their shards, and what is counted."""

from functools import cache
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import GATE_UP
from megatron_eopt.parallel.collectives import counters

OF_SHARDS = {"tensor_model_parallel", "partition_dim", "expert_tp"}
"""Attributes that a parameter of one rank does not have."""


def groups_of(ranks=2):
    """Megatron's groups where all ranks share each matrix; of one rank there are none."""
    return SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD) if ranks > 1 else None


@cache
def grid(rank):
    """This rank's groups of tensor and of data parallelism, of two ranks each: 0 1 and 2 3, 0 2 and 1 3."""
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return made[rank // 2], made[2 + rank % 2]


def sharded(dim, **more):
    """Attributes of a shard of tensor parallelism."""
    return {"tensor_model_parallel": True, "partition_dim": dim, **more}


def is_cut(attributes):
    """Whether they are those of a shard."""
    return attributes.get("tensor_model_parallel", "partition_dim" in attributes)


def cut(x, attributes, rank, ranks):
    """This rank's shard of a whole tensor: of gate and up a part of each."""
    if ranks == 1 or not is_cut(attributes):
        return x.clone()
    if GATE_UP in attributes.values():
        return torch.cat([half.chunk(ranks)[rank] for half in x.chunk(2)])
    return x.chunk(ranks, attributes["partition_dim"])[rank].contiguous()


def marked(x, **attributes):
    """A parameter with attributes."""
    p = torch.nn.Parameter(x)
    for name, value in attributes.items():
        setattr(p, name, value)
    return p


def shard(x, dim=0):
    """A parameter that says that it is a shard."""
    return marked(x, **sharded(dim))


def placed(x, attributes, rank, ranks):
    """This rank's parameter of a whole tensor."""
    own = {key: value for key, value in attributes.items() if ranks > 1 or key not in OF_SHARDS}
    return marked(cut(x, attributes, rank, ranks), **own)


def part_of(x, rectangle):
    """The entries of a rectangle."""
    return x[rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]


def whole(x):
    """A copy of all entries, of a DTensor or of what is whole."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def counted():
    """Collective -> calls and bytes since the last reset."""
    return {name: (counters.calls[name], counters.bytes[name]) for name in counters.calls}


def message_of(call, error_type=ValueError):
    """What a call is refused with; None if it is not."""
    try:
        call()
    except error_type as error:
        return str(error)
