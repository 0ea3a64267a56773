"""SOAP takes the steps of one rank with DTensors: FSDP2, HSDP and meshes of two dimensions, cut evenly or not."""

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron_eopt.matrices import GATE_UP, heads
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import message_of, whole
from tests.optimizers.field import assert_close

STEPS = 7

# The first gradient spans the sides that have a factor, of at most `max_dim`. Of what it does not span, rounding makes
# the basis, and products are rounded as their operands lie in memory.
SHAPES = {
    "even": (24, 8),
    "square": (6, 6),
    "uneven": (13, 9),
    "wide": (7, 30),
    "one row": (1, 12),
    "long": (40, 9),
    "gate and up": (18, 24),
    "heads": (15, 11),
    "vector": (7,),
    "scalar": (),
}
SPLITS = {"gate and up": GATE_UP, "heads": heads("q", 5)}
HELD = {"uneven", "wide", "one row", "heads"}
SETTINGS = {"lr": 0.05, "precondition_frequency": 2, "max_dim": 9, "use_kl_shampoo": True}


def placements_of(kind, name):
    """How a parameter is cut: what cannot be is replicated."""
    short = {"vector": 1, "scalar": 0}.get(name, 2)
    return [each if isinstance(each, Replicate) or each.dim < short else Replicate() for each in kind]


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def made(spread):
    parameters = {name: torch.nn.Parameter(spread(name, x)) for name, x in drawn(0).items()}
    for name, split in SPLITS.items():
        parameters[name].logical_matrices = split
    return parameters, built(parameters)


def built(parameters):
    kinds = [[named for named in parameters.items() if (named[0] in HELD) is held] for held in (False, True)]
    return SOAP([{"params": kinds[0]}, {"params": kinds[1], "weight_norm": "hold"}], **SETTINGS)


def steps(optimizer, parameters, spread, numbers, bad=None):
    for step in numbers:
        for name, x in drawn(100 + step).items():
            parameters[name].grad = spread(name, x)
        if step == bad:
            parameters["uneven"].grad.to_local().fill_(torch.nan)
        optimizer.step()


def result(optimizer, parameters):
    return {
        name: (whole(p), {key: whole(value) for key, value in optimizer.state[p].items()})
        for name, p in parameters.items()
    }


def spread_over(mesh, kind):
    return lambda name, x: distribute_tensor(x, mesh, placements_of(kind, name))


def model_of(rank, world_size, shape, kinds):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    found = []
    for kind in kinds:
        spread = spread_over(mesh, kind)
        parameters, optimizer = made(spread)
        counters.reset()
        steps(optimizer, parameters, spread, range(STEPS))
        found.append((result(optimizer, parameters), dict(counters.calls)))
    return found


def on_two(rank, world_size, folder):
    found = model_of(rank, world_size, (2,), [[Shard(0)], [Shard(1)], [Replicate()]])
    mesh = init_device_mesh("cpu", (2,))
    spread = spread_over(mesh, [Shard(0)])
    parameters, optimizer = made(spread)
    steps(optimizer, parameters, spread, range(5), bad=3 if rank else None)
    return found, result(optimizer, parameters), goes_on(mesh, spread), sharded_model(rank, folder), refused(mesh)


def on_four(rank, world_size, folder):
    kinds = [[Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Shard(1)]]
    return model_of(rank, world_size, (2, 2), kinds), loaded(rank, world_size, folder)


def refused(mesh):
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    partial, vector = (DTensor.from_local(torch.ones(shape), mesh, [Partial()]) for shape in ((6, 4), (6,)))
    stack = distribute_tensor(torch.ones(2, 6, 4), mesh, [Shard(0)])
    said = []
    for each in (partial, stack, vector):
        optimizer = SOAP([x])
        message = message_of(lambda each=each, optimizer=optimizer: optimizer.add_param_group({"params": [each]}))
        said.append((len(optimizer.param_groups), message))
    return said


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(9, 13), torch.nn.Linear(13, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def goes_on(mesh, spread):
    """Whether an optimizer's state dict goes on bit for bit in a new optimizer."""
    straight, optimizer = made(spread)
    steps(optimizer, straight, spread, range(6))
    parameters, first = made(spread)
    steps(first, parameters, spread, range(3))
    second = built(parameters)
    second.load_state_dict(first.state_dict())
    steps(second, parameters, spread, range(3, 6))
    return all(torch.equal(whole(p), whole(straight[name])) for name, p in parameters.items())


def losses(model, optimizer, numbers, rank=0, world_size=1):
    generator = torch.Generator().manual_seed(5)
    batches = torch.randn(8, 32, 9, generator=generator)
    found = []
    for step in numbers:
        optimizer.zero_grad()
        loss = model(batches[step].chunk(world_size)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def sharded_model(rank, folder):
    """Losses under FSDP2, which saves what it has after four steps."""
    model = Model()
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = SOAP(model.parameters(), weight_norm="hold", **SETTINGS)
    first = losses(model, optimizer, range(4), rank, 2)
    checkpoint.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    return first + losses(model, optimizer, range(4, 8), rank, 2)


def loaded(rank, world_size, folder):
    """Losses of so many ranks from what was saved on."""
    model = Model()
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = SOAP(model.parameters(), weight_norm="hold", **SETTINGS)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=folder, no_dist=world_size == 1)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return losses(model, optimizer, range(4, 8), rank, world_size)


def on_one(name, x):
    return x


def assert_equal_one(found, numbers, leave_out=()):
    parameters, optimizer = made(on_one)
    steps(optimizer, parameters, on_one, numbers)
    for name, (expected, state) in result(optimizer, parameters).items():
        if name not in leave_out:
            assert_close(found[name][0], expected, what=name)
            assert list(found[name][1]) == list(state)
            for key, value in state.items():
                assert_close(found[name][1][key], value, what=(name, key))


def assert_same_to_the_bit(of_ranks):
    for name, (p, state) in of_ranks[0].items():
        for other, of_other in (found[name] for found in of_ranks[1:]):
            assert torch.equal(p, other), name
            assert all(torch.equal(value, of_other[key]) for key, value in state.items()), name


@pytest.mark.wide
def test_ranks_step_as_one(tmp_path):
    of_two = run_ranks(on_two, 2, tmp_path)
    parameters, optimizer = made(on_one)
    steps(optimizer, parameters, on_one, range(3))
    before = result(optimizer, parameters)["uneven"][0]
    for found, after_bad, resumed, _, said in of_two:
        for (model, calls), gathers in zip(found, (STEPS, STEPS, 0), strict=True):
            assert_equal_one(model, range(STEPS))
            assert calls.get("all_gather", 0) == gathers
        assert_equal_one(after_bad, range(5), leave_out=["uneven"])
        # the fourth gradient is left out, the fifth taken
        assert after_bad["uneven"][1]["steps"] == 4
        assert not torch.equal(after_bad["uneven"][0], before)
        assert after_bad["uneven"][0].isfinite().all()
        assert resumed
        assert [groups for groups, _ in said] == [1, 1, 1]
        for _, text in (said[0], said[2]):
            assert "SOAP cannot lay parameter 0 of group 1" in text
            assert "only Replicate and Shard can be laid out" in text
        assert "declare a stack of 2 matrices" in said[1][1]
    of_four = run_ranks(on_four, 4, tmp_path)
    for found, _ in of_four:
        for model, _ in found:
            assert_equal_one(model, range(STEPS))
    for of_ranks in (of_two, of_four):
        for place in range(3):
            assert_same_to_the_bit([found[0][place][0] for found in of_ranks])
    model = Model()
    alone = torch.tensor(losses(model, SOAP(model.parameters(), weight_norm="hold", **SETTINGS), range(8)))
    assert alone[-1] < alone[0]
    of_mean = [[each[3] for each in of_two], [each[1] for each in of_four], [loaded(0, 1, tmp_path)]]
    for found, expected in zip(of_mean, (alone, alone[4:], alone[4:]), strict=True):
        torch.testing.assert_close(torch.tensor(found).mean(0), expected, rtol=1e-4, atol=0)
