"""Weights of replicas in plain torch, compared where the ranks of a run agree on a kernel: the clocks are fake."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_eopt import OptimizerConfig, build_optimizer
from megatron_eopt.matrices import experts
from megatron_eopt.optimizers.distributed_muon import DistributedMuon
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.parallel import agreement
from tests.distributed.ranks import run_ranks
from tests.orthogonalize.test_timing import clocked


def matrices(rank):
    """Three matrices, of which rank 1 has one bit of the second otherwise, and all of the third."""
    found = [torch.nn.Parameter(torch.arange(12.0).view(4, 3) + i) for i in range(3)]
    found[1].data.view(torch.int32)[2, 1] ^= rank
    found[2].data += rank
    return found


def named(rank, **attributes):
    found = list(zip(("equal", "w", "v"), matrices(rank), strict=True))
    for _, x in found:
        vars(x).update(attributes)
    return found


def on_meshes(rank, shape, dims, placements):
    """DTensors without names whose local shards are the matrices, on the mesh of all ranks or one of each rank."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))[dims]
    return [torch.nn.Parameter(DTensor.from_local(x.detach(), mesh, placements)) for x in matrices(rank)]


def stack_on_mesh(rank):
    """A stack of two experts, of which each rank has one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("experts",))
    x = torch.arange(12.0).view(1, 4, 3) + rank
    stack = torch.nn.Parameter(DTensor.from_local(x, mesh, [Shard(0)]))
    stack.logical_matrices = experts(2)
    return [stack]


def model(rank):
    layers = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 4), "second": torch.nn.Linear(4, 3)})
    for p in layers.parameters():
        torch.nn.init.ones_(p)
    layers["second"].weight.data += rank
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    return layers


def outcome(optimizer):
    try:
        getattr(optimizer, "prepare", optimizer.step)()
    except ValueError as error:
        return str(error)


def on_rank(rank, ranks):
    clocked(lambda tiles, shape: 1.0)
    found = {
        "named": outcome(TensorParallelMuon(named(rank))),
        "built": outcome(build_optimizer(model(rank), OptimizerConfig(name="muon"))),
        "spectron": outcome(Spectron(named(rank), rank=2)),
        "shared out": outcome(TensorParallelMuon(matrices(rank), data_parallel_group=dist.group.WORLD)),
        "hsdp": outcome(TensorParallelMuon(on_meshes(rank, (2, 1), ("a", "b"), [Replicate(), Shard(0)]))),
        "distributed": outcome(DistributedMuon(matrices(rank), collective_state_dict=True)),
    }
    equal = [
        TensorParallelMuon(named(0)),
        TensorParallelMuon(matrices(0)),
        TensorParallelMuon(on_meshes(0, (2, 1), ("a", "b"), [Replicate(), Shard(0)])),
    ]
    by_design = [
        TensorParallelMuon(matrices(rank)),  # without names, as of two stages of a pipeline
        TensorParallelMuon([(f"{rank}.{name}", x) for name, x in named(rank)]),
        TensorParallelMuon(named(rank, allreduce=False)),  # of experts
        TensorParallelMuon(named(rank, partition_dim=0)),  # shards that nobody marked
        TensorParallelMuon(on_meshes(rank, (2, 1), ("b",), [Shard(0)])),  # a mesh for each rank
        TensorParallelMuon(on_meshes(rank, (1, 2), ("a", "b"), [Replicate(), Shard(0)])),  # another shard
        TensorParallelMuon(stack_on_mesh(rank)),  # other experts
        TensorParallelMuon(named(rank), symmetric_products="torch"),
    ]
    with mock.patch.dict(agreement.versions(), {"torch": "2.0"} if rank else {}):
        found["versions"] = outcome(TensorParallelMuon(named(0)))
    found["passed"] = list(map(outcome, [*equal, *by_design]))
    resumed = TensorParallelMuon(named(rank))
    resumed.load_state_dict(equal[0].state_dict())  # with its kernel
    found["resumed"] = outcome(resumed)
    with mock.patch.object(agreement, "gather_numbers", side_effect=agreement.gather_numbers) as told:
        TensorParallelMuon(named(0)).prepare()
    found["calls"] = told.call_count
    return found


def test_the_first_matrix_that_differs_is_named_on_all_ranks():
    first, second = run_ranks(on_rank, 2)
    assert first == second
    names = {"named": "w", "built": "second.weight", "spectron": "w"}
    names |= dict.fromkeys(("shared out", "hsdp", "distributed"), "parameter 1 of group 0, of shape (4, 3)")
    for case, name in names.items():
        assert first[case].startswith(f"the weights of {name} differ between ranks 0 and 1"), (case, first[case])
    assert f"torch is {torch.__version__} in the one and 2.0 in the other" in first["versions"]
    assert first["passed"] == [None] * len(first["passed"])
    assert first["resumed"] is None
    assert first["calls"] == 1
