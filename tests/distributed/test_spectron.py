"""Spectron at TP=k takes the steps of one rank, and the factors that ranks hold in common are the same to the bit."""

import pytest
import torch

from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, message_of, placed, shard, sharded
from tests.optimizers.field import assert_close, drawn

STEPS = 4
RANK = 4
TOLERANCE = 1e-6
"""Of the largest entry: what partial sums round otherwise."""

TP_MODES = ("duplicated", "auto", "distributed")

CALLS = 2 * (1 + 2 * 2 + 1)
"""All-reduces of a step, in each of two groups: of gradients, two for each power iteration, and of the quotients."""

CASES = {
    "tall along rows": ((48, 20), sharded(0)),
    "as tall along rows": ((48, 20), sharded(0)),
    "tall along columns": ((48, 20), sharded(1)),
    "wide along rows": ((20, 48), sharded(0)),
    "wide along columns": ((20, 48), sharded(1)),
    # a rank holds fewer rows than the factors have columns
    "few rows": ((6, 30), sharded(0)),
    "fused qkv": ((4 * 16, 24), sharded(0, qkv_split_shapes=[8, 4, 4])),
    "fused qkv along columns": ((4 * 16, 24), sharded(1, qkv_split_shapes=[8, 4, 4])),
    # shards end inside the group, and some hold nothing of k or v
    "one query group": ((48, 20), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "one more query group": ((48, 20), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "expert": ((20, 48), {"partition_dim": 1, "expert_tp": True}),
    "stacked experts": ((2, 16, 20), sharded(1, logical_matrices=experts(2))),
    "replicated": ((20, 12), {}),
}
PAIRS = {
    "A": ((48, RANK), sharded(0)),
    "B": ((20, RANK), {}),
    "C": ((20, RANK), {}),
    "D transposed": ((RANK, 48), sharded(1)),
}


def made(rank, world_size, cases, generator):
    return {
        name: placed(torch.randn(shape, generator=generator), attributes, rank, world_size)
        for name, (shape, attributes) in cases.items()
    }


def built(parameters, pairs, world_size, **settings):
    several = list(parameters.items())
    return Spectron(
        [
            {"params": several[:5], "weight_decay": 0.2},
            factor_pairs(list(zip(list(pairs.items())[::2], list(pairs.items())[1::2], strict=True))),
            {"params": several[5:], "rank": 3, "lr": 0.1},
        ],
        lr=0.05,
        rank=RANK,
        momentum_beta=0.8,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        fp32_matmul_prec="highest",
        num_power_iterations=2,
        pg_collection=groups_of(world_size),
        **settings,
    )


def steps(optimizer, parameters, cases, rank, world_size, numbers, bad_at=None):
    for step in numbers:
        generator = torch.Generator().manual_seed(100 + step)
        for name, (shape, attributes) in cases.items():
            gradient = cut(torch.randn(shape, generator=generator), attributes, rank, world_size)
            parameters[name].grad = gradient
        if step == bad_at and rank == world_size - 1:
            parameters["tall along rows"].grad[0, 0] = torch.nan
        counters.reset()
        optimizer.step()
    return dict(counters.calls)


def trained(rank, world_size, tp_mode, numbers=range(STEPS), bad_at=None):
    generator = torch.Generator().manual_seed(0)
    parameters, pairs = made(rank, world_size, CASES, generator), made(rank, world_size, PAIRS, generator)
    optimizer = built(parameters, pairs, world_size, tp_mode=tp_mode)
    everything, cases = {**parameters, **pairs}, {**CASES, **PAIRS}
    calls = steps(optimizer, everything, cases, rank, world_size, numbers, bad_at)
    return optimizer, everything, calls


def on_two(rank, world_size):
    results = {}
    for tp_mode in TP_MODES:
        optimizer, parameters, calls = trained(rank, world_size, tp_mode)
        found = {name: (p.detach(), dict(optimizer.state[p])) for name, p in parameters.items()}
        results[tp_mode] = found, calls, optimizer.projection_errors
    _, parameters, _ = trained(rank, world_size, "duplicated", bad_at=1)
    results["bad"] = {name: p.detach() for name, p in parameters.items()}
    return results, resumed(rank, world_size), refused(rank), gate_and_up(rank, world_size)


def resumed(rank, world_size):
    """Whether a state that was saved and loaded on every rank goes on as if it had not been."""
    straight = trained(rank, world_size, "auto", range(4))[1]
    first, parameters, _ = trained(rank, world_size, "auto", range(2))
    cases = {**CASES, **PAIRS}
    second = built(
        {name: parameters[name] for name in CASES},
        {name: parameters[name] for name in PAIRS},
        world_size,
        tp_mode="auto",
    )
    second.load_state_dict(first.state_dict())
    steps(second, parameters, cases, rank, world_size, range(2, 4))
    return all(torch.equal(parameters[name], straight[name]) for name in cases)


def refused(rank):
    """What a weight of which one rank alone has bad entries does, and a factor that is cut along its rank."""
    p, q, r = shard(torch.ones(8, 6)), shard(torch.ones(8, 2), 1), torch.nn.Parameter(torch.ones(9, 4))
    if rank == 1:
        p.data[0, 0] = torch.nan
    p.grad = torch.ones(8, 6)
    calls = (
        lambda: Spectron([p], rank=2, pg_collection=groups_of()).step(),
        lambda: Spectron([p], rank=2),
        lambda: Spectron([factor_pairs([(q, r)])], pg_collection=groups_of()),
    )
    return list(map(message_of, calls))


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(on_two, 2)


def test_two_ranks_step_as_one(two_ranks):
    of_one, alone, _ = trained(0, 1, "duplicated")
    optimizer, without_bad, _ = trained(0, 1, "duplicated", bad_at=1)
    assert optimizer.skipped_steps() == {"tall along rows": 1}
    for rank, (found, same, messages, _) in enumerate(two_ranks):
        for tp_mode in TP_MODES:
            parameters, calls, errors = found[tp_mode]
            for name, (_, attributes) in {**CASES, **PAIRS}.items():
                expected = cut(alone[name].detach(), attributes, rank, 2)
                assert_close(parameters[name][0], expected, TOLERANCE, (tp_mode, rank, name))
            for name in ("tall along rows", "wide along columns", "expert"):
                for key, value in of_one.state[alone[name]].items():
                    dim = {"A": 0, "B": 1}.get(key.rpartition("_")[2])
                    parts = value.chunk(2) if dim == CASES[name][1]["partition_dim"] else (value, value)
                    assert_close(parameters[name][1][key], parts[rank], TOLERANCE, (tp_mode, rank, name, key))
            if tp_mode == "duplicated":
                assert calls["all_reduce"] == CALLS
            assert list(errors) == list(CASES)
        for name, (_, attributes) in {**CASES, **PAIRS}.items():
            assert_close(
                found["bad"][name], cut(without_bad[name].detach(), attributes, rank, 2), TOLERANCE, (rank, name)
            )
        assert same
        assert "cannot take factors from parameter 0 of group 0" in messages[0]
        assert "marked as sharded, but no process group completes it" in messages[1]
        assert "a factor (8, 4), is cut along its rank" in messages[2]


def test_what_ranks_hold_in_common_is_the_same_to_the_bit(two_ranks):
    (first, *_), (second, *_) = two_ranks
    states = [result["duplicated"][0] for result in (first, second)]
    for name, (shape, attributes) in CASES.items():
        dim = attributes["partition_dim"] - len(shape) + 2 if "partition_dim" in attributes else None
        for key, value in states[0][name][1].items():
            other = states[1][name][1][key]
            side = {"A": 0, "B": 1}.get(next((part for part in key.split("_") if part in ("A", "B")), None))
            if side is None or dim is None or side != dim:
                assert torch.equal(value, other), (name, key)
            elif value.numel():
                assert value.shape != other.shape or not torch.equal(value, other), (name, key)


@pytest.mark.wide
def test_four_ranks_step_as_one():
    _, alone, _ = trained(0, 1, "duplicated")
    # six rows and twenty columns do not fall to four ranks as the cases are
    kept = {name: case for name, case in {**CASES, **PAIRS}.items() if name != "few rows"}
    for rank, found in enumerate(run_ranks(on_four, 4)):
        for name, (_, attributes) in kept.items():
            assert_close(found[name], cut(alone[name].detach(), attributes, rank, 4), TOLERANCE, (rank, name))


def on_four(rank, world_size):
    generator = torch.Generator().manual_seed(0)
    cases = {**CASES, "few rows": (CASES["few rows"][0], {})}
    parameters, pairs = made(rank, world_size, cases, generator), made(rank, world_size, PAIRS, generator)
    optimizer = built(parameters, pairs, world_size, tp_mode="auto")
    everything = {**parameters, **pairs}
    steps(optimizer, everything, {**cases, **PAIRS}, rank, world_size, range(STEPS))
    return {name: p.detach() for name, p in everything.items()}


def gate_and_up(rank, world_size):
    """A SwiGLU's first layer, of which each shard has an equal part of gate and up."""
    x, gradient = drawn((2, 32, 12))
    attributes = sharded(0, logical_matrices=GATE_UP)
    p = placed(x, attributes, rank, world_size)
    optimizer = Spectron([p], lr=0.05, rank=3, fp32_matmul_prec="highest", pg_collection=groups_of(world_size))
    for _ in range(STEPS):
        p.grad = cut(gradient, attributes, rank, world_size)
        optimizer.step()
    return p.detach()


def test_gate_and_up_have_factors_of_their_own(two_ranks):
    alone = gate_and_up(0, 1)
    for rank, (*_, found) in enumerate(two_ranks):
        assert_close(found, cut(alone, sharded(0, logical_matrices=GATE_UP), rank, 2), TOLERANCE, rank)
