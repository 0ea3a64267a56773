"""Fused parameters of every kind: the update at TP=k is that of their matrices, stored separately on one rank."""

import pytest
import torch

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, marked, sharded
from tests.matrices.models import kinds
from tests.optimizers.field import assert_close

KINDS = kinds()
COLS = 24
MODES = ("duplicated", "owner", "normuon")


def optimizer(parameters, mode, groups=None):
    settings = {"lr": 0.1, "scale_mode": "shape_scaling", "fp32_matmul_prec": "highest", "pg_collection": groups}
    if mode == "normuon":
        return TensorParallelAdaptiveMuon(parameters, moment2_method="normuon", tp_mode="auto", **settings)
    return TensorParallelMuon(parameters, tp_mode=mode, **settings)


def stepped(made, parameters, gradients):
    for step in range(2):
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g * (1 + step)
        made.step()
    return [p.detach() for p in parameters]


def on_ranks(rank, world_size):
    results = {}
    for mode in MODES:
        parameters, gradients = [], []
        for kind in KINDS.values():
            own, gradient = (kind.store(kind.whole(COLS, seed), world_size)[rank] for seed in (0, 1))
            parameters.append(marked(own.contiguous(), **sharded(kind.partition_dim, logical_matrices=kind.split)))
            gradients.append(gradient)
        made = optimizer(list(zip(KINDS, parameters, strict=True)), mode, groups_of())
        results[mode] = dict(zip(KINDS, stepped(made, parameters, gradients), strict=True))
    return results


def expected(kind, mode, ranks):
    parameters = [torch.nn.Parameter(x) for x in kind.whole(COLS)]
    return kind.store(stepped(optimizer(parameters, mode), parameters, kind.whole(COLS, 1)), ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_split_update_is_that_of_matrices_stored_apart(ranks):
    results = run_ranks(on_ranks, ranks)
    for mode in MODES:
        for name, kind in KINDS.items():
            for result, own in zip(results, expected(kind, mode, ranks), strict=True):
                assert_close(result[mode][name], own, what=(mode, name))
