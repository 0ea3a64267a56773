"""Muon under real DDP and FSDP2, HSDP, and FSDP2 over tensor parallelism: the steps of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megatron_eopt import Execution, TensorParallelMuon
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


def under_fsdp2(mesh, tp=None):
    network = model()
    for layer in network:
        if tp is not None and isinstance(layer, Layer):
            parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def on_ranks(rank, ranks):
    results = {
        "ddp": train(DistributedDataParallel(model()), execution=Execution(data_parallel_group=dist.group.WORLD))
    }
    calls = dict(counters.calls)
    line = init_device_mesh("cpu", (ranks,))
    results |= {f"fsdp2, {mode}": train(under_fsdp2(line), tp_mode=mode) for mode in MODES}
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        results["hsdp"] = train(under_fsdp2(square))
        over_tp = {mode: under_fsdp2(square["outer"], square["inner"]) for mode in MODES}
        results |= {f"fsdp2 over tp, {mode}": train(network, tp_mode=mode) for mode, network in over_tp.items()}
    return results, calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_wrapped_models_take_the_steps_of_one_process(ranks):
    expected = train(model())
    for results, calls in run_ranks(on_ranks, ranks):
        for name, parameters in results.items():
            for found, wanted in zip(parameters, expected, strict=True):
                assert_close(found, wanted, 1e-5 * STEPS, name)
        # three matrices of each of two shapes and one of a third; on two ranks the three are two parts
        assert calls == {"agree": 1, "all_gather": 5 if ranks == 2 else 3}
