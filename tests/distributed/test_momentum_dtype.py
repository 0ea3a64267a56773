"""Momenta in bf16 have the same bits wherever their entries lie; for DTensors see test_dtensor_state."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.matrices import ATTRIBUTE, GATE_UP, query_key_value
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed, sharded
from tests.optimizers.field import drawn

STEPS = 4
BF16, KEY = torch.bfloat16, "momentum_buffer"
TP_MODES = ("duplicated", "distributed", "owner", "gram", "auto", "blockwise")
QKV = query_key_value([8, 4, 4])

CASES = {
    "rows": ((48, 20), sharded(0)),
    "columns": ((20, 512), sharded(1)),
    "query, key and value": ((64, 12), sharded(0, **{ATTRIBUTE: QKV})),
    "heads": ((64, 12), sharded(0, **{ATTRIBUTE: query_key_value([8, 4, 4], per_head=True)})),
    "gate and up": ((32, 12), sharded(0, **{ATTRIBUTE: GATE_UP})),
    "whole": ((12, 150), {}),
}


def of_step(shape, step):
    return drawn(shape, shape[0] + 1000 * step)


def trained(rank, ranks, tp_mode):
    """The momenta of all cases on a rank, by name."""
    named = {name: placed(of_step(shape, 0), attributes, rank, ranks) for name, (shape, attributes) in CASES.items()}
    optimizer = TensorParallelMuon(
        named.items(),
        lr=0.01,
        pg_collection=groups_of(ranks),
        tp_mode=tp_mode,
        execution=Execution(momentum_dtype=BF16),
    )
    for step in range(STEPS):
        for name, (shape, attributes) in CASES.items():
            named[name].grad = cut(of_step(shape, 1 + step), attributes, rank, ranks)
        optimizer.step()
    assert optimizer.state[named["rows"]][KEY].dtype == BF16
    return {name: optimizer.state[p][KEY] for name, p in named.items()}


def tensor_parallel(rank, ranks):
    found = {tp_mode: trained(rank, ranks, tp_mode) for tp_mode in TP_MODES}
    copies = dist.group.WORLD if ranks > 1 else None
    shared = TensorParallelMuon(
        [("w", nn.Parameter(of_step((10, 6), 0)))], execution=Execution(momentum_dtype=BF16, data_parallel_group=copies)
    )
    (p,) = shared.param_groups[0]["params"]
    for step in range(STEPS):
        p.grad = of_step((10, 6), 1 + step)
        shared.step()
    return found, shared.state[p][KEY]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_tensor_parallel_momenta_have_the_bits_of_one_rank(ranks):
    found = run_ranks(tensor_parallel, ranks)
    of_one, of_copies = tensor_parallel(0, 1)
    for rank, (of_rank, shared) in enumerate(found):
        assert torch.equal(shared, of_copies)
        for tp_mode, momenta in of_rank.items():
            for name, x in of_one["auto"].items():
                expected = cut(x, CASES[name][1], rank, ranks)
                assert torch.equal(momenta[name], expected), (tp_mode, name, rank)
