"""Dion2 on several ranks selects and steps as one does, also after a resume."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from megatron_eopt.optimizers.dion2 import Dion2
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed, whole
from tests.distributed.test_dion import CASES, PLACEMENTS, STEPS, dtensor_case, found
from tests.optimizers.field import assert_close, drawn


def trained(rank, world_size, steps=range(STEPS), state=None, start=None):
    """Some steps of all cases: the optimizer, and its parameters by name."""
    parameters = {
        name: placed(drawn(shape, index, torch.float64), attributes, rank, world_size)
        for index, (name, (shape, attributes)) in enumerate(CASES.items())
    }
    for name, value in (start or {}).items():
        parameters[name].data.copy_(value)
    several = list(parameters.values())
    optimizer = Dion2(
        [{"params": several[:3], "fraction": 0.4}, {"params": several[3:], "lr": 0.02}],
        lr=0.05,
        weight_decay=0.1,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        pg_collection=groups_of(world_size),
    )
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for step in steps:
        for index, (name, (shape, attributes)) in enumerate(CASES.items()):
            gradient = cut(drawn(shape, 1000 * step + index, torch.float64), attributes, rank, world_size)
            if step == 2 and name == "expert" and rank == 0:
                gradient[0, 0] = torch.nan  # left out on all ranks
            parameters[name].grad = gradient
        optimizer.step()
    return optimizer, parameters


def of_dtensors(rank, world_size):
    results = {}
    for name, (sizes, placements) in PLACEMENTS.items() if world_size == 4 else ():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("one", "other")[: len(sizes)])
        p, gradients = dtensor_case()
        q = nn.Parameter(distribute_tensor(p.detach(), mesh, placements, src_data_rank=None))
        optimizer = Dion2([q], lr=0.05)
        for gradient in gradients:
            q.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            optimizer.step()
        results[name] = whole(q)
    return results


def on_all(rank, world_size):
    _, straight = trained(rank, world_size)
    first, begun = trained(rank, world_size, range(2))
    _, resumed = trained(rank, world_size, range(2, STEPS), first.state_dict(), found(begun))
    return found(straight), found(resumed), of_dtensors(rank, world_size)


@pytest.fixture(scope="module")
def ran():
    return {ranks: run_ranks(on_all, ranks) for ranks in (2, 4)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_steps_of_one(ran, ranks):
    _, alone = trained(0, 1)
    for rank, (straight, resumed, _) in enumerate(ran[ranks]):
        for name, (_, attributes) in CASES.items():
            # stacks of one and of many are multiplied in other orders
            assert_close(straight[name], cut(alone[name].detach(), attributes, rank, ranks), 1e-11, name)
            assert torch.equal(resumed[name], straight[name]), name


@pytest.mark.parametrize("name", PLACEMENTS)
def test_dtensors_take_the_steps_of_one_rank(ran, name):
    p, gradients = dtensor_case()
    optimizer = Dion2([p], lr=0.05)
    for gradient in gradients:
        p.grad = gradient
        optimizer.step()
    for _, _, of_placements in ran[4]:
        assert_close(of_placements[name], p.detach(), 1e-12)
