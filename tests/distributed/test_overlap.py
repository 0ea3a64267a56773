"""While sums of one bucket are on their way, another bucket multiplies; told by the order of events, not by time."""

import itertools
from collections import Counter
from itertools import count

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.kernels.products import Blocked
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.collectives import Pending, counters
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan
from megatron_eopt.parallel.rectangles import cut
from megatron_eopt.parallel.schemes import SCHEMES
from tests.distributed.buckets import executed
from tests.distributed.ranks import run_ranks

RANKS, MATRICES = 3, 4  # so that gram_split has a full round, and one matrix beside it
CASES = [*itertools.product(("gram_replicated", "gram_split", "distributed", "owner"), (1, 3))]
EACH = pytest.mark.parametrize(("scheme", "chunks"), CASES)
SHAPES = ((24, 96), (32, 96), (40, 96))  # of the buckets
ITERATION = NewtonSchulz(fp32_matmul_prec="highest")


class Spy:
    """Notes what happens: (what, the bucket that is resumed, number of the exchange or name of the collective)."""

    def __init__(self, scheme, patch):
        self.events, self.bucket, self.numbers = [], None, count()
        run, start, wait, counted = SCHEMES[scheme], Pending.__init__, Pending.wait, counters.count

        def observed(job, stack):
            running, bucket = run(job, stack), SHAPES.index(job.matrix.shape)
            while True:
                self.bucket = bucket
                try:
                    next(running)
                except StopIteration as done:
                    self.note("end")
                    return done.value
                yield

        def started(pending, *args):
            pending.number = next(self.numbers)
            self.note("start", pending.number)
            start(pending, *args)

        def waited(pending):
            self.note("wait", pending.number)
            return wait(pending)

        def named(name, sent):
            self.note("collective", name)
            counted(name, sent)

        patch.setitem(SCHEMES, scheme, observed)
        patch.setattr(Pending, "__init__", started)
        patch.setattr(Pending, "wait", waited)
        patch.setattr(counters, "count", named)
        for name in ("gram", "addmm"):
            patch.setattr(Blocked, name, self.noted(getattr(Blocked, name)))

    def note(self, what, which=None):
        self.events.append((what, self.bucket, which))

    def noted(self, product):
        def noted(*args, **kwargs):
            self.note("product")
            return product(*args, **kwargs)

        return noted


def observed(rank, ranks, scheme, chunks):
    """The events of a plan of three buckets, in one chunk or in three."""
    matrices = [Matrix(f"{shape} {i}", shape, cut(shape, 1, ranks), "tp") for shape in SHAPES for i in range(MATRICES)]
    of_bucket = [tuple(range(MATRICES * i, MATRICES * (i + 1))) for i in range(len(SHAPES))]
    compute_ranks = tuple(i % ranks for i in range(MATRICES)) if scheme in ("gram_split", "owner") else ()
    buckets = (Bucket(each, scheme, compute_ranks, i * (chunks > 1)) for i, each in enumerate(of_bucket))
    shards = [torch.randn(matrix.rectangles[rank].shape) for matrix in matrices]
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(scheme, patch)
        executed(Plan(tuple(matrices), tuple(buckets)), shards, {"tp": dist.group.WORLD}, ITERATION)
    return spy.events


def of_cases(rank, ranks):
    return {case: observed(rank, ranks, *case) for case in CASES}


@pytest.fixture(scope="module")
def found():
    return run_ranks(of_cases, RANKS)


@EACH
def test_another_bucket_multiplies_during_an_exchange(found, scheme, chunks):
    segments, rest = len(ITERATION.restarts) + 1, 1
    sums = {
        "gram_replicated": segments,
        "gram_split": segments * (2 + 2 * rest),  # to the compute ranks, and back
        "distributed": 1 + ITERATION.steps,
        "owner": 2,
    }[scheme]
    for of_rank in found:
        events = of_rank[scheme, chunks]
        starts = {which: at for at, (what, _, which) in enumerate(events) if what == "start"}
        waits = {which: at for at, (what, _, which) in enumerate(events) if what == "wait"}
        assert Counter(events[at][1] for at in starts.values()) == dict.fromkeys(range(len(SHAPES)), sums)
        assert starts.keys() == waits.keys()
        ends = {bucket: at for at, (what, bucket, _) in enumerate(events) if what == "end"}
        first = {bucket: next(n for n, at in starts.items() if events[at][1] == bucket) for bucket in ends}
        for number, start in starts.items():
            bucket, wait = events[start][1], waits[number]
            others = {b for what, b, _ in events[start:wait] if what == "product" and b != bucket}
            alone = all(ends[other] < wait for other in ends if other != bucket)
            begins = scheme in ("distributed", "owner") and number == first[bucket]  # nothing to multiply yet
            assert others or alone or begins, (number, bucket)


@EACH
def test_every_rank_starts_the_same_collectives(found, scheme, chunks):
    orders = [[event for event in of_rank[scheme, chunks] if event[0] == "collective"] for of_rank in found]
    assert orders[0]
    assert all(order == orders[0] for order in orders)
