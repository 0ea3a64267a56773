"""A step computes and exchanges what its plan prints, exactly: a layer with grouped queries."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.cost import bucket_flops
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import counted, groups_of, placed, sharded
from tests.parallel.plans import predicted

# rows, columns, the dimension that is cut: hidden 512, ffn 1792, eight heads in two query groups
SHAPES = [(512, 512, 0), (128, 512, 0), (512, 512, 1), (1792, 512, 0), (1792, 512, 0), (512, 1792, 1)]
MODES = ("owner", "gram", "auto", "duplicated", "distributed", "blockwise")
RUNS = [*((mode, precision, None) for mode in MODES for precision in ("highest", "medium"))]
RUNS += [("gram", "fp64", None), ("distributed", "fp64", None)]  # of parameters in fp64
RUNS += [("auto", "medium", "torch"), ("auto", "highest", "torch"), ("gram", "medium", "blocked")]


def steps(rank, world_size):
    """Operations and traffic of a step, as counted and as planned, of each run."""
    found = []
    for tp_mode, precision, kernel in RUNS:
        dtype = torch.float64 if precision == "fp64" else torch.float32
        parameters = [
            placed(torch.randn(rows, cols, dtype=dtype), sharded(dim), rank, world_size) for rows, cols, dim in SHAPES
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = TensorParallelMuon(
            parameters,
            fp32_matmul_prec="highest" if precision == "fp64" else precision,
            coefficient_type="cubic5" if kernel is None else "quintic",
            pg_collection=groups_of(),
            tp_mode=tp_mode,
            execution=Execution(symmetric_products=kernel),
        )
        engine = optimizer.prepare()
        counters.reset()
        with FlopCounterMode(display=False) as flops:
            optimizer.step()
        traffic = counted()
        del traffic["agree"]  # on gradients that are not finite, which is in no plan
        planned = sum(bucket_flops(engine.plan, bucket, rank, engine.works) for bucket in engine.plan.buckets)
        found.append((flops.get_total_flops(), planned, traffic, predicted(engine.plan, rank, engine.works)))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_a_step_does_what_its_plan_says(world_size):
    for of_rank in run_ranks(steps, world_size):
        for run, (flops, planned, traffic, expected) in zip(RUNS, of_rank, strict=True):
            assert flops == planned, run
            assert traffic == expected, run
