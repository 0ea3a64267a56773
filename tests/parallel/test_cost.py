"""Costs against published figures, and of a plan against those of its ranks."""

from collections import Counter

import pytest
from hypothesis import given

from megatron_eopt.kernels.products import Products
from megatron_eopt.parallel.cost import (
    Costs,
    bucket_flops,
    bucket_traffic,
    cost_of,
    plan_cost,
    whole_flops,
)
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.plan_records import Bucket, Plan
from tests.parallel.plans import QUINTIC, WORK, matrices, modes, some, work_of, works

DENSE = work_of(QUINTIC, Products())
# The largest of Llama-3 70B: hidden 8192, ffn 28672, cut along the long side over 8 ranks.
N, M, T = 8192, 28672, 8


def rank_cost(plan, bucket, rank, work):
    """By itself, and not with those of equals."""
    return cost_of(bucket_flops(plan, bucket, rank, work), bucket_traffic(plan, bucket, rank, work))


def planned(count, scheme, compute_ranks=(), *args, **settings):
    """One bucket under a scheme, whatever a plan would have chosen."""
    return Plan(tuple(some(count, *args, **settings)), (Bucket(tuple(range(count)), scheme, compute_ranks),))


def of_llama(scheme, work, itemsize, count=1, compute_ranks=()):
    plan = planned(count, scheme, compute_ranks, (N, M), 1, T, itemsize=itemsize)
    cost = Costs(plan, {"": work}).of_bucket(plan.buckets[0])
    return cost.flops / count / 1e12, cost.bytes / count / 1e6


@pytest.mark.parametrize(
    ("scheme", "work", "itemsize", "count", "compute_ranks", "expected"),
    [
        # dense products in the standard form, as upstream; one matrix
        ("duplicated", DENSE, 4, 1, (), (44.0, 822)),
        ("distributed", DENSE, 2, 1, (), (10.3, 2349)),
        # each of eight, by Gram form with symmetric products, momentum in bf16
        ("owner", WORK, 2, 8, (*range(8),), (2.41, 103)),
        ("gram_split", WORK, 2, 8, (*range(8),), (2.41, 940)),
        ("blockwise", DENSE, 4, 1, (), (2.57, 0)),
    ],
)
def test_a_matrix_of_llama_3_70b(scheme, work, itemsize, count, compute_ranks, expected):
    flops, sent = of_llama(scheme, work, itemsize, count, compute_ranks)
    assert flops == pytest.approx(expected[0], rel=5e-3)
    assert sent == pytest.approx(expected[1], rel=5e-3, abs=0.5)


def test_a_whole_matrix_takes_the_cheaper_form_that_may_run():
    assert whole_flops((512, 64), WORK) == 6 * 64**2 * 512 + 14 * 64**3
    assert whole_flops((64, 512), work_of(QUINTIC)) == 15 * 64**2 * 512 + 5 * 64**3
    assert whole_flops((64, 64), work_of(products=Products())) == 30 * 64**3


@given(matrices(), modes, works)
def test_a_plan_costs_what_its_ranks_do(given_matrices, mode, work):
    plan = make_plan(given_matrices, mode, work)
    sums = Counter()
    for bucket in plan.buckets:
        first = plan.matrices[bucket.matrices[0]]
        costs = [rank_cost(plan, bucket, rank, work) for rank in range(first.ranks)]
        of_bucket = Costs(plan, work).of_bucket(bucket)
        assert of_bucket.bytes == max(cost.bytes for cost in costs)
        assert of_bucket.flops == max(cost.flops for cost in costs)
        sums["flops"] += of_bucket.flops
        sums["bytes"] += of_bucket.bytes
        sums["collectives"] += of_bucket.collectives
    total = plan_cost(plan, work)
    assert total.collectives == sums["collectives"]
    assert total.bytes <= sums["bytes"]
    assert total.flops <= sums["flops"] * (1 + 1e-9)
