"""The engine: what it sums, gathers and agrees on, and how ranks end without one."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.exchange import Spread
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan
from megatron_eopt.parallel.rectangles import cut, cut_at
from megatron_eopt.parallel.schemes import SCHEMES
from tests.distributed.buckets import executed
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import part_of
from tests.optimizers.field import drawn

CPU, F32 = torch.device("cpu"), torch.float32
TIMEOUT = 5
"""Seconds of the groups in which a rank dies."""


# Sums, whole matrices, agreement.


def finished(generator):
    """How often a generator yields, and what it returns."""
    for waits in range(3):
        try:
            next(generator)
        except StopIteration as stop:
            return waits, stop.value
    raise AssertionError("it waits more than twice")


def summed_and_gathered(rank, ranks):
    pair = dist.new_group([0, 1])
    other = dist.new_group([1, 2])
    groups = {"all": dist.group.WORLD, **({"pair": pair} if rank < 2 else {}), **({"other": other} if rank else {})}
    # no layout, no iteration: such an engine only agrees and sums
    names = ["all", "pair", "other", "own"]
    of_each = [{name: groups[name]} if name in groups else {} for name in names]
    engine = Engine([ParamSpec(*each, groups=own) for *each, own in zip(names, [F32] * 4, of_each, strict=True)], CPU)
    assert engine.prepare() is None
    assert engine.groups == groups
    assert (engine.plan, engine.matrices, engine.works) == (Plan((), ()), [()] * 4, {})
    assert [engine.shares(i) for i in range(4)] == [True, rank < 2, rank > 0, False]
    counters.reset()
    agreed = engine.agree(torch.tensor(3 + rank, dtype=torch.int32), [True] * 4)
    assert agreed == 3
    assert counters.calls == {"agree": len(groups)}
    # of gradients that only some ranks have
    assert engine.agree(torch.tensor(1, dtype=torch.int32), [rank == 0, True, True, True]) == -1
    assert engine.agree(torch.tensor(1, dtype=torch.int32), [True, True, True, rank == 0]) == 1  # shared by nobody

    counters.reset()
    tensors = [torch.full((2, 3), 1.0 + rank), torch.tensor(10.0 * rank), torch.arange(2.0) + rank, torch.ones(4)]
    tensors += [torch.full((1, 2), rank, dtype=torch.float64), torch.empty(0)]
    labels = ["all", "pair" if rank < 2 else "", "all", "", "all", "all"]
    sums = engine.sums(tensors, labels)
    assert torch.equal(sums[0], torch.full((2, 3), 6.0))
    assert sums[1].item() == (10.0 if rank < 2 else 20.0)
    assert sums[1].shape == ()
    assert torch.equal(sums[2], torch.tensor([3.0, 6.0]))
    assert sums[3] is tensors[3]
    assert torch.equal(sums[4], torch.full((1, 2), 3.0, dtype=torch.float64))
    assert sums[5].shape == (0,)
    # one exchange for each group and dtype
    assert counters.calls == {"all_reduce": 3 if rank < 2 else 2}
    assert engine.sums([], []) == []

    # whole matrices of unequal shards, several stacks in one exchange, and back: to all ranks, and to one each
    uneven = [((7, 5), 0, [0, 4, 4, 7]), ((4, 6), 1, [0, 1, 3, 6])]
    layouts = [Layout(shape, cut_at(shape, *cut), dist.group.WORLD, "tp") for shape, *cut in uneven]
    engine = Engine([ParamSpec(str(each.shape), F32, each) for each in layouts], CPU)
    matrices = [of_parameter[0] for of_parameter in engine.matrices]
    whole = [torch.stack([drawn(m.shape, 10 * i + n) for n in range(3 + i)]) for i, m in enumerate(matrices)]
    shards = [
        torch.stack([part_of(x, m.rectangles[rank]) for x in stack]) for stack, m in zip(whole, matrices, strict=True)
    ]
    for numbers, collective in (([(), ()], "all_gather"), ([[0, 3, 0], [2, 1, 1]], "all_to_all")):
        counters.reset()
        spread, alone = [*map(Spread, matrices, map(len, whole), numbers), None], torch.tensor([[10.0 * rank]])
        waits, gathered = finished(engine.gather_whole([*([x] for x in shards), [alone]], spread))
        own = [stack.split(of)[rank] if of else stack for stack, of in zip(whole, numbers, strict=True)]
        for (found,), expected in zip(gathered, [*own, alone], strict=True):
            assert torch.equal(found, expected)
        waits_back, back = finished(engine.scatter_back(gathered, spread))
        for (found,), expected in zip(back, [*shards, alone], strict=True):
            assert torch.equal(found, expected)
            assert bool(numbers[0]) or found is alone or found._base is not None
        assert (waits, waits_back) == (1, 1)
        # where nothing is exchanged nothing is waited for
        assert finished(engine.gather_whole([[alone]], [None])) == (0, [[alone]])
        assert finished(engine.scatter_back([[], []], spread[:2])) == (0, [[], []])
        assert counters.calls == {collective: 2 if numbers[0] else 1}
    # fp32: what others compute goes there, a shard each, and from here the others' shards of what is computed here
    there, back = 0, 0
    for matrix, of_rank, stack in zip(matrices, own, whole, strict=True):
        here = matrix.rectangles[rank].numel
        there += (len(stack) - len(of_rank)) * here
        back += len(of_rank) * (matrix.shape[0] * matrix.shape[1] - here)
    assert counters.bytes == {"all_to_all": 4 * (there + back)}
    return True


def test_sums_whole_matrices_and_agreement():
    assert all(run_ranks(summed_and_gathered, 3))


# A rank that is gone.


def stopping(rank, ranks, folder, scheme):
    """Three buckets, twice; the last rank is gone when it goes on with the second one, in the middle of the step."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    matrix, run = Matrix("a", (32, 96), cut((32, 96), 1, ranks)), SCHEMES[scheme]
    plan = Plan((matrix,) * 6, tuple(Bucket((2 * index, 2 * index + 1), scheme, (1, 2)) for index in range(3)))
    shards = [torch.randn(matrix.rectangles[rank].shape) for _ in plan.matrices]

    def leaving(job, shards):
        running = run(job, shards)
        next(running)
        yield
        if rank == ranks - 1 and job.bucket == plan.buckets[1]:
            os._exit(0)
        return (yield from running)

    SCHEMES[scheme] = leaving
    start = time.monotonic()
    try:
        # what the others still needed of the first step may have been sent before; of the second nothing was
        for _ in range(2):
            executed(plan, shards, {"tp": dist.group.WORLD}, NewtonSchulz())
    except RuntimeError:
        (folder / f"{rank}").write_text(str(time.monotonic() - start))
        raise


@pytest.mark.parametrize("scheme", ["owner", "duplicated", "distributed", "gram_replicated", "gram_split"])
def test_a_rank_that_is_gone_ends_the_others(tmp_path, scheme):
    ranks = 3
    context = mp.get_context("forkserver")
    processes = [context.Process(target=stopping, args=(rank, ranks, tmp_path, scheme)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        *others, gone = [process.exitcode for process in processes]
        assert gone == 0
        assert all(others)  # neither None, which is a process that runs, nor 0
    finally:
        for process in processes:
            process.kill()
    for rank in range(ranks - 1):
        assert float((tmp_path / f"{rank}").read_text()) < TIMEOUT + 2
