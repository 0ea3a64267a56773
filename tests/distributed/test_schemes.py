"""Every scheme, on real ranks, gives what one process computes with the same settings, and sends what was predicted."""

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan
from megatron_eopt.parallel.rectangles import Rectangle, cut
from tests.distributed.buckets import (
    CASES,
    InFp16,
    assert_close,
    executed,
    matrices_of,
    own_parts,
    plan_of,
    rectangles_of,
    scale,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import part_of
from tests.optimizers.field import drawn
from tests.parallel import plans


def on_ranks(rank, ranks, cases):
    """Shards and counters of each case, and the shards where all cases of equal settings are one plan."""
    groups, results = {"tp": dist.group.WORLD}, []
    for case in cases:
        plan = plan_of([case], ranks)
        shards = own_parts(case, ranks, rank)
        before = [shard.clone() for shard in shards]
        counters.reset()
        rectangles = executed(plan, list(shards), groups, case.settings)
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(shards, before, strict=True))
        results.append(([rectangle.clone() for rectangle in rectangles], dict(counters.calls), dict(counters.bytes)))
    together = [case for case in cases if case.settings == cases[0].settings]
    plan = plan_of(together, ranks)
    shards = [shard for case in together for shard in own_parts(case, ranks, rank)]
    return results, executed(plan, shards, groups, cases[0].settings)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.wide), 4])
def run(request):
    return request.param, run_ranks(on_ranks, request.param, CASES)


SCHEMES = tuple(dict.fromkeys(case.scheme for case in CASES))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_and_bytes_are_those_that_are_predicted(run, scheme):
    ranks, results = run
    for index, case in enumerate(CASES):
        if case.scheme == scheme:
            assert_results(case, ranks, [of_rank[0][index][0] for of_rank in results])
            for rank, of_rank in enumerate(results):
                _, calls, sent = of_rank[0][index]
                expected = predicted(case, ranks, rank)
                assert {name: (calls[name], sent[name]) for name in calls} == expected, case
                work = Work(case.settings)
                assert plans.predicted(plan_of([case], ranks), rank, plans.Alike({"": work})) == expected, (
                    case
                )  # as plans are priced


def assert_results(case, ranks, results):
    rectangles = rectangles_of(case, ranks)
    for number, x in enumerate(matrices_of(case)):
        of_whole = case.settings(x) * scale(*case.shape)
        for rectangle, result in zip(rectangles * (ranks // len(rectangles)), results, strict=True):
            actual = result[number]
            assert (actual.shape, actual.dtype, actual.is_contiguous()) == (rectangle.shape, x.dtype, True), case
            if number == 1 and case.special in ("nan", "inf"):
                assert actual.isnan().all(), case
            elif rectangle.numel:
                expected = part_of(of_whole, rectangle)
                if case.scheme == "blockwise":
                    expected = case.settings(part_of(x, rectangle).contiguous()) * scale(*rectangle.shape)
                assert_close(actual, expected, case, of_whole.abs().max())


def summed(size, ranks):
    """What a rank sends of a sum over a ring: every part of the buffer but one, twice."""
    return -(-2 * (ranks - 1) * size // ranks)


def predicted(case, ranks, rank):
    """Calls and bytes of each collective."""
    # in the dtype of the matrices, or of products where that is narrower
    rectangles, item = rectangles_of(case, ranks), min(case.dtype.itemsize, 2 if case.precision == "medium" else 4)
    compute_ranks = [(ranks - 1 - index) % ranks for index in range(case.count)]
    each = -(-case.count // ranks)
    rows, cols = case.shape
    if case.scheme in ("local", "blockwise"):
        return {}
    if case.scheme == "owner":
        to_owners = sum(rectangles[rank].numel for owner in compute_ranks if owner != rank)
        back = compute_ranks.count(rank) * sum(
            rectangle.numel for other, rectangle in enumerate(rectangles) if other != rank
        )
        return {"all_to_all": (2, (to_owners + back) * item)}
    if case.scheme == "duplicated":
        return {"all_gather": (1, (ranks - 1) * max(rectangle.numel for rectangle in rectangles) * case.count * item)}
    if case.scheme == "share":
        return {"all_gather": (1, (ranks - 1) * each * rows * cols * item)}
    n = case.shape[1 - case.how]
    if case.scheme == "distributed":
        of_step = summed(case.count * n * n * 4, ranks)
        return {"all_reduce": (1 + case.steps, summed(case.count * 8, ranks) + case.steps * of_step)}
    segments = len(case.settings.restarts) + 1
    if case.scheme == "gram_replicated":
        return {"all_reduce": (segments, segments * summed(case.count * n * n * 4, ranks))}
    rounds, gram, found = case.count // ranks, n * n * 4, {}
    if rounds:
        sent = segments * (ranks - 1) * rounds * gram
        found |= {"reduce_scatter": (segments, sent), "all_gather": (segments, sent)}
    if rest := compute_ranks[rounds * ranks :]:
        calls = segments * len(rest)
        # all but the owner send their part of a sum, all but the one before the owner pass on what comes of it
        found["reduce"] = (calls, segments * gram * (len(rest) - rest.count(rank)))
        found["broadcast"] = (calls, segments * gram * (len(rest) - rest.count((rank + 1) % ranks)))
    return found


def test_one_plan_gives_what_its_buckets_give_alone(run):
    _, results = run
    together = [index for index, case in enumerate(CASES) if case.settings == CASES[0].settings]
    for alone, at_once in results:
        expected = [rectangle for index in together for rectangle in alone[index][0]]
        assert len(at_once) == len(expected) > 100
        for actual, rectangle in zip(at_once, expected, strict=True):
            assert torch.equal(actual, rectangle) or rectangle.isnan().all()


# Further properties of schemes, on two ranks.


def small_rows(rank, ranks):
    """How far the factors of small rows beside large ones are off in fp16, relative to their norm."""
    x = drawn((64, 1024))
    x[32:] *= 1e-4
    rectangles = cut(x.shape, 1, ranks)
    expected = part_of(NewtonSchulz(fp32_matmul_prec="highest")(x.double()) * scale(64, 1024), rectangles[rank])[32:]
    plan = Plan((Matrix("a", x.shape, rectangles),), (Bucket((0,), "gram_replicated"),))
    shards = [part_of(x, rectangles[rank]).contiguous()]
    (found,) = executed(plan, shards, {"tp": dist.group.WORLD}, InFp16(fp32_matmul_prec="highest"))
    return ((found[32:] - expected).norm() / expected.norm()).item()


UNEVEN = Matrix("a", (4, 8), (Rectangle(0, 4, 0, 6), Rectangle(0, 4, 6, 8)))


def dealt_unevenly(rank, ranks):
    """How far shards of factors are off whose matrices all have one compute rank, by scheme."""
    settings = NewtonSchulz(fp32_matmul_prec="highest")
    whole = [drawn((4, 8), seed) for seed in range(3)]
    found = {}
    for scheme in ("owner", "gram_split"):
        plan = Plan((UNEVEN,) * 3, (Bucket((0, 1, 2), scheme, (1, 1, 1)),))
        shards = [part_of(x, UNEVEN.rectangles[rank]) for x in whole]
        factors = executed(plan, shards, {"tp": dist.group.WORLD}, settings)
        expected = [part_of(settings(x), UNEVEN.rectangles[rank]) * scale(4, 8) for x in whole]
        found[scheme] = max((x - y).abs().max().item() for x, y in zip(factors, expected, strict=True))
    return found


def further(rank, ranks):
    return tuple(each(rank, ranks) for each in (small_rows, dealt_unevenly))


def test_small_rows_and_uneven_dealings():
    for off, dealt in run_ranks(further, 2):
        assert off < 2e-3
        assert all(error < 1e-5 for error in dealt.values()), dealt
