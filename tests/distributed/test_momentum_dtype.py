"""Momenta in bf16 have the same bits wherever their entries lie: tensor parallelism, DTensors, copies."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_eopt import TensorParallelMuon
from megatron_eopt.matrices import ATTRIBUTE, GATE_UP, query_key_value
from megatron_eopt.optimizers.parameters import ROWS
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed, sharded, whole
from tests.optimizers.field import drawn

STEPS = 4
BF16 = torch.bfloat16
TP_MODES = ("duplicated", "distributed", "owner", "gram", "auto", "blockwise")
QKV = query_key_value([8, 4, 4])

CASES = {
    "rows": ((48, 20), sharded(0)),
    "columns": ((20, 48), sharded(1)),
    "query, key and value": ((64, 12), sharded(0, **{ATTRIBUTE: QKV})),
    "heads": ((64, 12), sharded(0, **{ATTRIBUTE: query_key_value([8, 4, 4], per_head=True)})),
    "gate and up": ((32, 12), sharded(0, **{ATTRIBUTE: GATE_UP})),
    "gate and up as one": ((32, 12), sharded(0, **{ROWS: GATE_UP})),
    "whole": ((12, 20), {}),
}
# Of DTensors: cut unevenly, so that some of four ranks have little or nothing.
PLACED = {
    "tall": ((10, 7), Shard(0)),
    "wide": ((7, 10), Shard(1)),
    "few": ((3, 9), Shard(0)),
    "fused": ((32, 6), Shard(0)),
    "replicated": ((8, 6), Replicate()),
}


def of_step(shape, step):
    return drawn(shape, shape[0] + 1000 * step)


def trained(rank, ranks, tp_mode):
    """The momenta of all cases on a rank, by name."""
    named = {name: placed(of_step(shape, 0), attributes, rank, ranks) for name, (shape, attributes) in CASES.items()}
    optimizer = TensorParallelMuon(
        named.items(), lr=0.01, pg_collection=groups_of(ranks), tp_mode=tp_mode, momentum_dtype=BF16
    )
    for step in range(STEPS):
        for name, (shape, attributes) in CASES.items():
            named[name].grad = cut(of_step(shape, 1 + step), attributes, rank, ranks)
        optimizer.step()
    return {name: optimizer.state[p]["momentum_buffer"] for name, p in named.items()}


def tensor_parallel(rank, ranks):
    found = {tp_mode: trained(rank, ranks, tp_mode) for tp_mode in TP_MODES}
    copies = dist.group.WORLD if ranks > 1 else None
    shared = TensorParallelMuon(
        [("w", nn.Parameter(of_step((10, 6), 0)))], momentum_dtype=BF16, data_parallel_group=copies
    )
    (p,) = shared.param_groups[0]["params"]
    for step in range(STEPS):
        p.grad = of_step((10, 6), 1 + step)
        shared.step()
    return found, shared.state[p]["momentum_buffer"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_tensor_parallel_momenta_have_the_bits_of_one_rank(ranks):
    found = run_ranks(tensor_parallel, ranks)
    of_one, of_copies = tensor_parallel(0, 1)
    for rank, (of_rank, shared) in enumerate(found):
        assert torch.equal(shared, of_copies)
        for tp_mode, momenta in of_rank.items():
            for name, (_, attributes) in CASES.items():
                expected = cut(of_one["auto"][name], attributes, rank, ranks)
                assert torch.equal(momenta[name], expected), (tp_mode, name, rank)


class Model(nn.Module):
    """DTensors, or whole parameters where there is no mesh."""

    def __init__(self, mesh=None, along=lambda placement: [placement]):
        super().__init__()
        self.spread = lambda x, placement: (
            x if mesh is None else distribute_tensor(x, mesh, along(placement), src_data_rank=None)
        )
        for name, (shape, placement) in PLACED.items():
            self.register_parameter(name, nn.Parameter(self.spread(of_step(shape, 0), placement)))
            if name == "fused":
                setattr(self.fused, ATTRIBUTE, QKV)

    def train_by(self, optimizer, steps):
        for step in steps:
            for name, (shape, placement) in PLACED.items():
                self.get_parameter(name).grad = self.spread(of_step(shape, 1 + step), placement)
            optimizer.step()
        optimizer.zero_grad()


def built(model):
    return TensorParallelMuon(model.named_parameters(), lr=0.01, tp_mode="auto", momentum_dtype=BF16)


def momenta(model, optimizer):
    found = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    assert {x.dtype for x in found.values()} == {BF16}
    return {name: whole(x) for name, x in found.items()}


def of_dtensors(rank, ranks, folder):
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model = Model(line)
    optimizer = built(model)
    model.train_by(optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    model.train_by(optimizer, range(2, STEPS))
    found = [momenta(model, optimizer)]
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for along in (
            lambda placement: [Replicate(), placement],
            lambda placement: [
                _StridedShard(0, split_factor=2) if placement == Shard(0) else placement,
                placement,
            ],
        ):
            model = Model(square, along)
            optimizer = built(model)
            model.train_by(optimizer, range(STEPS))
            found.append(momenta(model, optimizer))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [2, 4])
def test_momenta_of_dtensors_have_the_bits_of_one_rank(ranks, tmp_path):
    model = Model()
    optimizer = built(model)
    model.train_by(optimizer, range(STEPS))
    expected = momenta(model, optimizer)
    for of_rank in run_ranks(of_dtensors, ranks, tmp_path):
        for of_mesh in of_rank:
            for name, momentum in of_mesh.items():
                assert torch.equal(momentum, expected[name]), name

    # and one rank goes on from the checkpoint of several
    model = Model()
    optimizer = built(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.param_groups[0]["momentum_steps"] == 2
    model.train_by(optimizer, range(2, STEPS))
    for name, momentum in momenta(model, optimizer).items():
        assert torch.equal(momentum, expected[name]), name
