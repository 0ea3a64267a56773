"""A gradient that is not finite, or too large, on one rank leaves a parameter as it is on all that have a part."""

import logging
from itertools import product

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_eopt.optimizers.parameters import local
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, shard
from tests.optimizers.family import ELEMENTWISE, OPTIMIZERS, build
from tests.optimizers.field import drawn


def poisoned(seed, bad):
    gradient = drawn((6, 4), seed)
    gradient[0, 0] = bad
    return gradient


def unmoved(optimizer, parameter, gradients):
    """Whether the second of two steps left this rank's part as it was, and a third one did not."""
    kept = []
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
        kept.append(local(parameter).detach().clone())
    return torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


def steps(rank, ranks):
    logging.disable()  # of the skipped steps
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for name, bad in product(OPTIMIZERS, (torch.nan, 1e20)):
        parameter = torch.nn.Parameter(distribute_tensor(drawn((6, 4)), mesh, [Shard(0)]))
        gradients = [drawn((6, 4), 1), poisoned(2, bad), drawn((6, 4), 3)]
        gradients = [distribute_tensor(g, mesh, [Shard(0)]) for g in gradients]
        found[name, bad, "FSDP2"] = unmoved(build(name, [parameter]), parameter, gradients)
    for name, bad in product(ELEMENTWISE, (torch.nan, 1e20)):
        own = slice(3 * rank, 3 * rank + 3)
        parameter = shard(drawn((6, 4))[own])
        gradients = [g[own] for g in (drawn((6, 4), 1), poisoned(2, bad), drawn((6, 4), 3))]
        found[name, bad, "TP"] = unmoved(build(name, [parameter], pg_collection=groups_of()), parameter, gradients)
    return found


def test_a_parameter_steps_on_all_ranks_or_on_none():
    for found in run_ranks(steps, 2):
        assert [each for each, held in found.items() if not held] == []
