"""Muon under DDP and FSDP2, and FSDP2 over tensor parallelism: the steps of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megatron_eopt import TensorParallelMuon
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import whole
from tests.optimizers.field import assert_close

STEPS = 3
MODES = ("auto", "owner", "gram", "duplicated", "distributed")


class Layer(nn.Module):
    """Two matrices of a feed-forward network, which tensor parallelism cuts along rows and along columns."""

    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)


def model(width=12, inner=20, layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width, inner) for _ in range(layers)), nn.Linear(width, 7, bias=False))


def train(network, **settings):
    """Some steps with given gradients, the same however they are spread; the global parameters after them."""
    optimizer = TensorParallelMuon(network.parameters(), lr=0.05, fp32_matmul_prec="highest", **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for p in network.parameters():
            gradient = torch.randn(p.shape, generator=generator)
            if isinstance(p, DTensor):
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = gradient
        counters.reset()
        optimizer.step()
    return list(map(whole, network.parameters()))


def assert_same(actual, expected, message):
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, 1e-5 * STEPS, message)


def under_ddp(rank, world_size):
    network = DistributedDataParallel(model())
    results = train(network, data_parallel_group=dist.group.WORLD)
    calls = dict(counters.calls)
    return results, calls


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_work_is_shared_out_under_ddp(world_size):
    expected = train(model())
    for results, calls in run_ranks(under_ddp, world_size):
        assert_same(results, expected, "ddp")
        # three matrices of each of two shapes and one of a third; on two ranks the three are two parts
        assert calls == {"agree": 1, "all_gather": 5 if world_size == 2 else 3}


def under_fsdp(rank, world_size):
    results = {}
    for tp_mode in MODES:
        network = model()
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in network:
            fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
        results[tp_mode] = train(network, tp_mode=tp_mode)
    return results


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_fsdp2_takes_the_steps_of_one_process(world_size):
    expected = train(model())
    for results in run_ranks(under_fsdp, world_size):
        for tp_mode, actual in results.items():
            assert_same(actual, expected, tp_mode)


def under_both(rank, world_size):
    results = {}
    for tp_mode in MODES:
        network = model()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        for layer in network[:-1]:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(network, mesh=mesh["fsdp"])
        results[tp_mode] = train(network, tp_mode=tp_mode)
    return results


@pytest.mark.wide
def test_fsdp2_over_tensor_parallelism_takes_the_steps_of_one_process():
    expected = train(model())
    for results in run_ranks(under_both, 4):
        for tp_mode, actual in results.items():
            assert_same(actual, expected, tp_mode)


def replicated_over_shards(rank, world_size):
    network = model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return train(network, tp_mode="auto")


def test_hsdp_takes_the_steps_of_one_process():
    expected = train(model())
    for actual in run_ranks(replicated_over_shards, 4):
        assert_same(actual, expected, "hsdp")
