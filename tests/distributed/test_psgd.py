"""PSGD-Kron at TP=k and on DTensors takes the steps of one rank, with the factors of a cut matrix on one rank."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers import whole_matrices
from megatron_eopt.optimizers.psgd import PSGDKron
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, message_of, placed, shard, sharded, whole
from tests.optimizers.field import assert_close

STEPS = 6
TOLERANCE = 1e-11  # in fp64, of products in another order
CASES = {
    **{
        f"{kind} along dim {dim}": (shape, sharded(dim))
        for kind, shape in {"square": (24, 24), "tall": (48, 20), "wide": (20, 48)}.items()
        for dim in (0, 1)
    },
    "long side cut": ((60, 8), sharded(0)),
    "short side cut": ((60, 8), sharded(1)),
    "two diagonals": ((60, 52), sharded(0)),
    "fused qkv": ((4 * 16, 24), sharded(0, qkv_split_shapes=[8, 4, 4])),
    # shards end inside the group, and some hold nothing of k or v
    "one query group": ((48, 20), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "gate and up": ((32, 12), sharded(0, logical_matrices=GATE_UP)),
    "stacked experts": ((2, 16, 20), sharded(1, logical_matrices=experts(2))),
    "expert": ((20, 48), {"partition_dim": 1, "expert_tp": True}),
    "replicated": ((20, 12), {}),
}
VARIANTS = [{}, {"precondition_frequency": 2, "maximize": True, "damping_noise_scale": 0.3, "weight_decay": 0.2}]
BAD = ["tall along dim 0", "fused qkv"]


def drawn(seed):
    """Random entries of every whole parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, _) in CASES.items()}


def trained(rank, world_size, settings, numbers=range(STEPS), bad=(), start=None):
    """A model after some steps; at the fourth the last rank has bad gradients for the parameters of these names."""
    parameters = {name: placed(x, CASES[name][1], rank, world_size) for name, x in drawn(0).items()}
    several = list(parameters.items())
    optimizer = PSGDKron(
        [{"params": several[:7], "momentum": 0.5}, {"params": several[7:], "lr": 0.1}],
        lr=0.05,
        max_dim=48,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        pg_collection=groups_of(world_size),
        **settings,
    )
    if start is not None:
        state, values = start
        optimizer.load_state_dict(copy.deepcopy(state))
        for name, value in values.items():
            parameters[name].data.copy_(value)
    for step in numbers:
        for name, x in drawn(100 + step).items():
            parameters[name].grad = cut(x, CASES[name][1], rank, world_size)
            if name in bad and step == 3 and rank == world_size - 1:
                parameters[name].grad.view(-1)[0] = torch.nan
        counters.reset()
        optimizer.step()
    return optimizer, parameters, dict(counters.calls)


def result(optimizer, parameters, calls=None):
    return {name: (p.detach(), dict(optimizer.state[p])) for name, p in parameters.items()}


def on_ranks(rank, world_size):
    found = [result(*trained(rank, world_size, settings)) for settings in VARIANTS]
    bad = result(*trained(rank, world_size, {}, bad=BAD))
    first, parameters, _ = trained(rank, world_size, VARIANTS[1], range(3))
    start = first.state_dict(), {name: p.detach() for name, p in parameters.items()}
    resumed = result(*trained(rank, world_size, VARIANTS[1], range(3, STEPS), start=start))
    optimizer, parameters, calls = trained(rank, world_size, {})
    schemes = {name: [each.scheme for each in optimizer.described_matrices()[p]] for name, p in parameters.items()}
    most, whole_matrices.MOST_BYTES = whole_matrices.MOST_BYTES, 8 * 3 * 48 * 20 * 2
    small, exchanges = result(*trained(rank, world_size, {})), counters.calls["all_to_all"]
    whole_matrices.MOST_BYTES = most
    alone = message_of(lambda: PSGDKron([shard(torch.ones(4, 3))]))
    return found, bad, resumed, calls, schemes, (small, exchanges), alone


def assert_equals(found, expected, rank, world_size, what):
    """Parameters and state of a rank are its parts of those of one rank."""
    for name, (_, attributes) in CASES.items():
        (p, state), (of_one, of_whole) = found[name], expected[name]
        assert_close(p, cut(of_one, attributes, rank, world_size), TOLERANCE, (what, rank, name))
        assert set(state) == set(of_whole)
        for key, value in of_whole.items():
            value = cut(value, attributes, rank, world_size) if key == "exp_avg" else value
            if state[key].numel():
                assert_close(state[key], value, 10 * TOLERANCE, (what, rank, name, key))


def assert_ranks_equal_one(ranks):
    expected, n = [result(*trained(0, 1, settings)) for settings in VARIANTS], len(ranks)
    of_bad = result(*trained(0, 1, {}, bad=BAD))
    for rank, (found, bad, resumed, calls, schemes, (small, exchanges), alone) in enumerate(ranks):
        for of_rank, of_one, settings in zip(found, expected, VARIANTS, strict=True):
            assert_equals(of_rank, of_one, rank, n, settings)
        assert_equals(bad, of_bad, rank, n, "bad")
        assert_equals(small, expected[0], rank, n, "small chunks")
        for name, (p, state) in resumed.items():
            assert torch.equal(p, found[1][name][0]), name
            assert all(torch.equal(x, found[1][name][1][key]) for key, x in state.items()), name
        assert calls == {"all_to_all": 4, "agree": 2}  # there and back, of the groups tp and expt_tp
        assert exchanges > 4
        assert schemes.pop("replicated") == ["local"]
        assert {scheme for of_one in schemes.values() for scheme in of_one} == {"owner"}
        assert "of shape (4, 3) is marked as sharded, but no process group completes it" in alone
    for name, (_, state) in ranks[0][0][0].items():
        for key in state.keys() - {"exp_avg"}:
            having = [bool(found[0][name][1][key].numel()) for found, *_ in ranks]
            assert sum(having) == (n if name == "replicated" else 1), (name, key)


def test_two_ranks_step_as_one_and_one_of_them_keeps_the_factors():
    assert_ranks_equal_one(run_ranks(on_ranks, 2))


@pytest.mark.wide
def test_four_ranks_step_as_one_and_one_of_them_keeps_the_factors():
    assert_ranks_equal_one(run_ranks(on_ranks, 4))


SHAPES = {"even": (24, 8), "uneven": (13, 9), "one row": (1, 12), "long": (40, 9), "gate and up": (18, 24)}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}


def stepped(spread):
    """Weights and state after some steps of parameters that are laid out by ``spread``."""
    generator, parameters = torch.Generator().manual_seed(0), {}
    for name, shape in SHAPES.items():
        parameters[name] = torch.nn.Parameter(spread(torch.randn(shape, generator=generator, dtype=torch.float64)))
    parameters["gate and up"].logical_matrices = GATE_UP
    optimizer = PSGDKron(list(parameters.items()), lr=0.05, max_dim=30)
    for _ in range(STEPS):
        for p in parameters.values():
            p.grad = spread(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        optimizer.step()
    return {name: (whole(p), {k: whole(x) for k, x in optimizer.state[p].items()}) for name, p in parameters.items()}


def of_dtensors(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        kind: stepped(lambda x, placement=placement: distribute_tensor(x, mesh, [placement], src_data_rank=None))
        for kind, placement in PLACEMENTS.items()
    }


def test_dtensors_step_as_one_rank():
    expected = stepped(lambda x: x.clone())
    for found in run_ranks(of_dtensors, 2):
        for kind, of_kind in found.items():
            for name, (p, state) in of_kind.items():
                of_one, of_whole = expected[name]
                assert_close(p, of_one, TOLERANCE, (kind, name))
                assert set(state) == set(of_whole)
                for key, x in state.items():
                    assert_close(x, of_whole[key], 10 * TOLERANCE, (kind, name, key))
