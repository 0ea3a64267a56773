"""The plan predicts what is exchanged, to the byte: a model of four layers with grouped queries at TP=2 and 4."""

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import counted, groups_of, placed, sharded
from tests.parallel.plans import predicted

LAYERS = 4
# rows, columns, the dimension that is cut: hidden 512, ffn 1792, eight heads in two query groups
SHAPES = {"q": (512, 512, 0), "k": (128, 512, 0), "v": (128, 512, 0), "o": (512, 512, 1)}
SHAPES |= {"gate": (1792, 512, 0), "up": (1792, 512, 0), "down": (512, 1792, 1)}
MODES = ("owner", "gram", "auto", "duplicated", "distributed", "blockwise")
RUNS = [*((mode, "highest") for mode in MODES), ("owner", "medium"), ("duplicated", "medium")]
RUNS += [("gram", "fp64"), ("distributed", "fp64")]  # of parameters in fp64


def steps(rank, world_size):
    """What each mode and precision exchanges in one step, as counted and as predicted, and its number of buckets."""
    torch.manual_seed(0)
    found = {}
    for tp_mode, precision in RUNS:
        parameters = []
        dtype = torch.float64 if precision == "fp64" else torch.float32
        for layer in range(LAYERS):
            for name, (rows, cols, dim) in SHAPES.items():
                parameter = placed(torch.randn(rows, cols, dtype=dtype), sharded(dim), rank, world_size)
                parameter.grad = torch.randn_like(parameter)
                parameters.append((f"{layer}.{name}", parameter))
        optimizer = TensorParallelMuon(
            parameters,
            coefficient_type="cubic5",
            fp32_matmul_prec="highest" if precision == "fp64" else precision,
            pg_collection=groups_of(),
            tp_mode=tp_mode,
        )
        plan, works = optimizer.prepare().plan, optimizer.prepare().works
        counters.reset()
        optimizer.step()
        found[tp_mode, precision] = (counted(), predicted(plan, rank, works), len(plan.buckets))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_exchanges_what_the_plan_says(world_size):
    entries = sum(rows * cols for rows, cols, _ in SHAPES.values()) * LAYERS
    for found in run_ranks(steps, world_size):
        for (tp_mode, precision), (sent_by, expected, buckets) in found.items():
            weight = entries * (2 if precision == "medium" else 4)  # bytes, where they are exchanged
            # one agreement per step, over 3 numbers of 4 bytes
            agreed = sent_by.pop("agree", (0, 0))
            assert agreed == (1, 2 * (world_size - 1) * 12 // world_size)
            assert sent_by == expected, (tp_mode, precision)
            calls, sent = (sum(figures) for figures in zip(*sent_by.values(), strict=True)) if sent_by else (0, 0)
            if tp_mode == "owner":
                assert set(sent_by) == {"all_to_all"}
                assert calls <= 2 * buckets <= 10
                # of all matrices each rank sends the others' part of its shards, and of its results
                assert sent <= 2 * weight * (world_size - 1) / world_size**2 * 1.01
            if tp_mode == "duplicated":
                assert sent == weight * (world_size - 1) / world_size
