"""Dion on several ranks takes the steps of one, and its state moves between numbers of ranks."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt.matrices import experts
from megatron_eopt.optimizers.dion import Dion
from megatron_eopt.parallel.collectives import counters, sent_bytes
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import counted, cut, groups_of, placed, sharded, whole
from tests.optimizers.field import assert_close, drawn

STEPS = 4
TOLERANCE = 1e-5  # of the largest entry, in fp32
CASES = {
    "tall along rows": ((48, 20), sharded(0)),
    "tall along columns": ((48, 20), sharded(1)),
    "wide along rows": ((20, 48), sharded(0)),
    "wide along columns": ((20, 48), sharded(1)),
    "fused qkv": ((4 * 16, 24), sharded(0, qkv_split_shapes=[8, 4, 4])),
    "fused qkv along columns": ((4 * 16, 24), sharded(1, qkv_split_shapes=[8, 4, 4])),
    # shards end inside the group, and some hold nothing of k or v
    "one query group": ((48, 20), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "expert": ((20, 48), {"partition_dim": 1, "expert_tp": True}),
    "stacked experts": ((2, 16, 20), sharded(1, logical_matrices=experts(2))),
    "replicated": ((20, 12), {}),
}
PLACEMENTS = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicated": ((4,), [Replicate()]),
    "copies of rows": ((2, 2), [Replicate(), Shard(0)]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
}


def dion_of_cases(first, others, **settings):
    return Dion([{"params": first, "rank_fraction": 0.4}, {"params": others, "lr": 0.02}], momentum=0.8, **settings)


def trained(
    rank, world_size, dtype=torch.float32, steps=range(STEPS), state=None, start=None, build=dion_of_cases, broken=()
):
    """Some steps of all cases: the optimizer, and its parameters by name.

    Gradients that are ``broken``, each a step and the name of a case, are not finite on the first rank.
    """
    parameters = {
        name: placed(drawn(shape, index, dtype), attributes, rank, world_size)
        for index, (name, (shape, attributes)) in enumerate(CASES.items())
    }
    for name, value in (start or {}).items():
        parameters[name].data.copy_(value)
    several = list(parameters.values())
    optimizer = build(
        several[:3],
        several[3:],
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
            gradient = cut(drawn(shape, 1000 * step + index, dtype), attributes, rank, world_size)
            if rank == 0 and (step, name) in broken:
                gradient[0, 0] = torch.nan
            parameters[name].grad = gradient
        counters.reset()
        optimizer.step()
    return optimizer, parameters


def found(parameters):
    return {name: p.detach() for name, p in parameters.items()}


def sent_by_formula(ranks):
    """All-reduces of ``m r`` and ``n r`` numbers, for all matrices of a group that share ranks: here three times."""
    alone, parameters = trained(0, 1, steps=range(1))
    calls = [  # the names that go together: by group of settings, then by group of ranks
        ["tall along rows", "tall along columns", "wide along rows"],
        ["expert"],
        ["wide along columns", "fused qkv", "fused qkv along columns", "one query group", "stacked experts"],
    ]
    sent = 0
    for names in calls:
        for side in (0, 1):
            numbers = 0
            for p in (parameters[name] for name in names):
                matrices = alone.matrix_layouts(p)
                bases = [x for key, x in alone.state[p].items() if key.startswith("Q")]
                numbers += sum(x.shape[side] * Q.shape[1] for x, Q in zip(matrices, bases, strict=True))
            sent += sent_bytes("all_reduce", 4 * numbers, ranks)
    return {"all_reduce": (2 * len(calls), sent)}


def of_shards(rank, world_size):
    wide, (_, parameters) = trained(rank, world_size, torch.float64)[1], trained(rank, world_size)
    traffic = counted()
    first, begun = trained(rank, world_size, steps=range(2))
    _, resumed = trained(rank, world_size, steps=range(2, STEPS), state=first.state_dict(), start=found(begun))
    bases = {(name, key): x for name, p in begun.items() for key, x in first.state[p].items() if key[0] == "Q"}
    return found(wide), found(parameters), found(resumed), bases, traffic


def of_dtensors(rank, world_size, kind=Dion):
    results = {}
    for name, (sizes, placements) in PLACEMENTS.items() if world_size == 4 else ():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("one", "other")[: len(sizes)])
        p, gradients = dtensor_case()
        q = nn.Parameter(distribute_tensor(p.detach(), mesh, placements, src_data_rank=None))
        q.qkv_split_shapes = [8, 4, 4]
        optimizer = of_fused([q], kind)
        for gradient in gradients:
            q.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            optimizer.step()
        state = {key: whole(x) for key, x in optimizer.state[q].items()}
        results[name] = whole(q), state
    return results


def dtensor_case():
    p, *gradients = drawn((STEPS, 16, 10), dtype=torch.float64)
    return nn.Parameter(p), gradients


def of_fused(params, kind=Dion):
    split = {"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": [8, 4, 4]}
    fraction = {"rank_fraction": 0.5} if kind is Dion else {"fraction": 0.5}
    return kind(params, lr=0.05, **fraction, **split)


def model():
    torch.manual_seed(0)
    # 13 rows are cut unevenly over ranks
    return nn.Sequential(nn.Linear(10, 13, bias=False), nn.Linear(13, 6, bias=False))


def fsdp(mesh):
    made = model()
    fully_shard(made, mesh=mesh)
    return made


def train(made, optimizer, steps):
    for step in steps:
        made(drawn((32, 10), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dion(made):
    return Dion(made.parameters(), lr=0.05, rank_fraction=0.5)


def checkpoint(made, optimizer):
    return {"model": made.state_dict(), "optimizer": get_optimizer_state_dict(made, optimizer)}


def of_fsdp2(rank, world_size, folder):
    """Four ranks save after two steps, two go on and save, and each tells what it ends with."""
    made = fsdp(init_device_mesh("cpu", (world_size,)))
    optimizer = dion(made)
    if world_size == 4:
        train(made, optimizer, range(2))
    else:
        kept = checkpoint(made, optimizer)
        dcp.load(kept, checkpoint_id=folder / "4")
        made.load_state_dict(kept["model"])
        set_optimizer_state_dict(made, optimizer, kept["optimizer"])
        train(made, optimizer, range(2, STEPS))
    dcp.save(checkpoint(made, optimizer), checkpoint_id=folder / str(world_size))
    return [whole(p) for p in made.parameters()]


def left_out(rank, world_size):
    """What stays bit for bit where one rank has a gradient that is not finite."""
    optimizer, parameters = trained(rank, world_size)
    before = found({name: p.clone() for name, p in parameters.items()})
    for name, (shape, attributes) in CASES.items():
        parameters[name].grad = cut(drawn(shape), attributes, rank, world_size)
    if rank == 1:
        parameters["wide along columns"].grad[0, 0] = torch.inf
    optimizer.step()
    return {name for name, p in parameters.items() if torch.equal(p, before[name])}


def on_all(rank, world_size, folder):
    # in one go, since it takes seconds to start ranks
    return (
        of_shards(rank, world_size),
        of_dtensors(rank, world_size),
        of_fsdp2(rank, world_size, folder),
        left_out(rank, world_size),
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return {ranks: run_ranks(on_all, ranks, folder) for ranks in (4, 2)}, folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_steps_of_one(ran, ranks):
    (_, wide), (_, alone) = trained(0, 1, torch.float64), trained(0, 1)
    for rank, ((in_fp64, in_fp32, resumed, _, traffic), *_) in enumerate(ran[0][ranks]):
        for name, (_, attributes) in CASES.items():
            assert_close(in_fp64[name], cut(wide[name].detach(), attributes, rank, ranks), 1e-12, name)
            assert_close(in_fp32[name], cut(alone[name].detach(), attributes, rank, ranks), TOLERANCE, name)
            assert torch.equal(resumed[name], in_fp32[name]), name
        sent = {name: of_one for name, of_one in traffic.items() if name != "agree"}
        assert sent == sent_by_formula(ranks)


def test_ranks_that_have_all_columns_have_one_basis(ran):
    (*_, first, _), (*_, second, _) = (of_shards for of_shards, *_ in ran[0][2])
    for (name, key), basis in first.items():
        if CASES[name][1].get("partition_dim") == 0 or name in ("replicated", "stacked experts"):
            assert torch.equal(basis, second[name, key]), name


@pytest.mark.parametrize("name", PLACEMENTS)
def test_dtensors_take_the_steps_of_one_rank(ran, name):
    assert_as_one_rank([of_placements[name] for _, of_placements, *_ in ran[0][4]])


def assert_as_one_rank(found_there, kind=Dion):
    """Parameters and state of DTensors on each rank are those of one rank."""
    p, gradients = dtensor_case()
    optimizer = of_fused([p], kind)
    for gradient in gradients:
        p.grad = gradient
        optimizer.step()
    for q, state in found_there:
        assert_close(q, p.detach(), 1e-12)
        assert state.keys() == optimizer.state[p].keys()
        for key, x in state.items():
            assert_close(x, optimizer.state[p][key], 1e-11, key)


def test_fsdp2_goes_on_with_another_number_of_ranks_and_then_alone(ran):
    results, folder = ran
    straight = model()
    optimizer = dion(straight)
    train(straight, optimizer, range(STEPS))
    for _, _, parameters, _ in results[2]:
        for found_there, p in zip(parameters, straight.parameters(), strict=True):
            assert_close(found_there, p.detach(), TOLERANCE)
    made = model()
    loaded = dion(made)
    kept = checkpoint(made, loaded)
    dcp.load(kept, checkpoint_id=folder / "2")
    set_optimizer_state_dict(made, loaded, kept["optimizer"])
    for p, q in zip(straight.parameters(), made.parameters(), strict=True):
        for key, x in optimizer.state[p].items():
            assert_close(loaded.state[q][key], x, TOLERANCE, key)


def test_a_step_that_is_left_out_is_left_out_on_all_ranks(ran):
    for results in ran[0].values():
        for *_, same in results:
            assert same == {"wide along columns"}
