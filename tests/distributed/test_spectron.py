"""Pairs of factors of Spectron on several ranks, and the weights that it refuses."""

import pytest
import torch

from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, message_of, placed, shard, sharded
from tests.optimizers.field import assert_close, drawn

STEPS, RANK = 4, 4
PAIRS = {
    "A": ((48, RANK), sharded(0)),
    "B": ((20, RANK), {}),
    "C": ((20, RANK), {}),
    "D transposed": ((RANK, 48), sharded(1)),
}
WEIGHT = {"weight": ((48, 20), sharded(0))}
ALL = {**PAIRS, **WEIGHT}


def trained(rank, ranks):
    """Pairs beside a weight after some steps, of which the second is skipped."""
    named = {name: placed(drawn(shape, i), of, rank, ranks) for i, (name, (shape, of)) in enumerate(ALL.items())}
    pairs = list(named.items())[:4]
    groups = [
        factor_pairs(list(zip(pairs[::2], pairs[1::2], strict=True)), lr=0.1),
        {"params": [("weight", named["weight"])]},
    ]
    optimizer = Spectron(groups, lr=0.05, rank=RANK, fp32_matmul_prec="highest", pg_collection=groups_of(ranks))
    for step in range(STEPS):
        for i, (name, (shape, attributes)) in enumerate(ALL.items()):
            gradient = drawn(shape, 100 * (1 + step) + i)
            if (step, name) == (1, "A"):
                gradient[0, 0] = torch.nan
            named[name].grad = cut(gradient, attributes, rank, ranks)
        optimizer.step()
    state = {name: dict(optimizer.state[named[name]]) for name in PAIRS}
    return {name: p.detach() for name, p in named.items()}, state, list(optimizer.projection_errors)


def refused(rank):
    """What a weight of which one rank alone has bad entries does, and a factor that is cut along its rank."""
    p, q, r = shard(torch.ones(8, 6)), shard(torch.ones(8, 2), 1), torch.nn.Parameter(torch.ones(9, 4))
    if rank == 1:
        p.data[0, 0] = torch.nan
    p.grad = torch.ones(8, 6)
    return (
        message_of(lambda: Spectron([p], rank=2, pg_collection=groups_of()).step()),
        message_of(lambda: Spectron([factor_pairs([(q, r)])], pg_collection=groups_of())),
    )


def on_ranks(rank, ranks):
    return trained(rank, ranks), refused(rank) if ranks == 2 else None


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_pairs_take_the_steps_of_one_rank(ranks):
    expected, of_one, errors = trained(0, 1)
    of_ranks = run_ranks(on_ranks, ranks)
    for rank, ((found, state, projected), messages) in enumerate(of_ranks):
        for name, (_, attributes) in ALL.items():
            assert_close(found[name], cut(expected[name], attributes, rank, ranks), 1e-6, (rank, name))
            if not attributes:
                assert torch.equal(found[name], of_ranks[0][0][0][name])
        for name, (_, attributes) in PAIRS.items():
            momentum = cut(of_one[name]["momentum_buffer"], attributes, rank, ranks)
            assert_close(state[name]["momentum_buffer"], momentum, 1e-6, (rank, name))
            u = of_one[name]["u"].chunk(ranks)[rank] if attributes else of_one[name]["u"]
            assert_close(state[name]["u"], u, 1e-6, (rank, name))
        assert projected == errors
        if messages:
            assert "cannot take factors from parameter 0 of group 0" in messages[0]
            assert "a factor (8, 4), is cut along its rank" in messages[1]
