"""torch's GradScaler on two ranks: an inf on one of them leaves out the step of both, or the step is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from megatron_eopt import Lion, Muon, OptimizerConfig, TensorParallelMuon, build_optimizer
from megatron_eopt.step.parameters import local
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, message_of, shard, whole

pytestmark = pytest.mark.wide

SCALE = 2.0**10
BAD = 2  # the step with an inf, on rank 1 alone


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))


def under_ddp():
    trained = DistributedDataParallel(model())
    options = {"data_parallel_group": dist.group.WORLD}
    return trained, build_optimizer(trained, OptimizerConfig(name="muon", lr=0.02, options=options))


def under_fsdp2():
    trained = fully_shard(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return trained, build_optimizer(trained, OptimizerConfig(name="muon", lr=0.02))


SETUPS = {each.__name__: each for each in (under_ddp, under_fsdp2)}


def train(rank, setup, scaled, steps):
    """The parameters after each step."""
    trained, optimizer = SETUPS[setup]()
    scaler = GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    seen = []
    for step in steps:
        optimizer.zero_grad()
        tokens = torch.randint(8, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = nn.functional.cross_entropy(trained(tokens), (tokens + 1) % 8)
        bad = step == BAD and rank == 1
        scaler.scale(loss * (torch.inf if bad and setup != "under_fsdp2" else 1.0)).backward()
        if bad and setup == "under_fsdp2":  # in one entry of this rank's shard alone
            local(trained[0].weight.grad)[1, 2] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        seen.append(list(map(whole, trained.parameters())))
    return seen, scaler.get_scale()


def on_ranks(rank, world_size):
    trained = {setup: [train(rank, setup, True, range(4)), train(rank, setup, False, [0, 1, 3])] for setup in SETUPS}
    return {**trained, "as sharded": as_sharded(rank)}


def scaled_step(rank, optimizer, params, bad):
    """What a step with an inf in a parameter on rank 1 says, and what it has changed."""
    before, scaler = [local(p).clone() for p in params], GradScaler("cpu")
    scale = scaler.scale(torch.ones(()))
    for p in params:
        p.grad = torch.ones_like(p) * scale
    if rank == 1:
        local(bad.grad)[0, 0] = torch.inf
    said = message_of(lambda: (scaler.step(optimizer), scaler.update()))
    unchanged = all(map(torch.equal, before, map(local, params)))
    # reading the state of Muon with AdamW inside makes it
    still_zero = not any(local(x).any() for of_one in optimizer.state.values() for x in of_one.values())
    return said, unchanged and still_zero, scaler.get_scale()


def as_sharded(rank):
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {}
    own = shard(torch.ones(4, 6))
    muon = TensorParallelMuon([("up.weight", own)], pg_collection=groups_of())
    found["by a group"] = scaled_step(rank, muon, [own], own)
    for name in ("replicated first", "sharded first", "replicated beside"):
        same, cut = (nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [x])) for x in (Replicate(), Shard(0)))
        named = [("norm.weight", same), ("up.weight", cut)]
        optimizer = Lion(named if name == "replicated first" else named[::-1])
        if name == "replicated beside":
            optimizer = Muon([("norm.weight", same)], [("up.weight", cut)])
        found[name] = scaled_step(rank, optimizer, [same, cut], cut)
    return found


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("setup", SETUPS)
def test_an_inf_on_one_rank_leaves_out_the_step_of_all(results, setup):
    ((first, scale), (expected, _)), ((other, of_other), _) = (result[setup] for result in results)
    assert scale == of_other == SCALE / 2
    for one, two in zip(first, other, strict=True):
        assert all(map(torch.equal, one, two))
    assert all(map(torch.equal, first[BAD], first[BAD - 1]))
    for one, two in zip([first[0], first[1], first[3]], expected, strict=True):
        assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("how", ["by a group", "replicated first", "replicated beside"])
def test_shards_that_the_scaler_does_not_ask_for_are_refused(results, how):
    for result in results:
        said, unchanged, _ = result["as sharded"][how]
        assert said.startswith("torch's GradScaler does not ask all ranks of tp")
        assert "which share up.weight" in said
        assert unchanged


def test_dtensors_that_are_sharded_first_are_asked_for(results):
    assert [result["as sharded"]["sharded first"] for result in results] == [(None, True, 2.0**15)] * 2
