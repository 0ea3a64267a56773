"""The collectives: what they give, what they count, and how they end where a rank is gone."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_eopt.parallel.execute import execute

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel import collectives as exchange
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.plan import Bucket, Matrix, Plan
from megatron_eopt.parallel.records import cut
from tests.distributed.ranks import run_ranks

TIMEOUT = 5
"""Seconds of the groups in which a rank dies."""


def counted():
    found = {name: (counters.calls[name], counters.bytes[name]) for name in counters.calls}
    counters.reset()
    return found


def collectives(rank, ranks):
    group = dist.group.WORLD
    counters.reset()
    numbers = torch.arange(2.0 * ranks) + rank
    total = ranks * torch.arange(2.0 * ranks) + sum(range(ranks))

    # rank r sends r + 1 entries, in two tensors, to each rank but the first, which gets none
    parts = [[torch.full((1,), 10.0 * rank + to), torch.full((rank,), -1.0)] if to else [] for to in range(ranks)]
    received = exchange.all_to_all(parts, [other + 1 if rank else 0 for other in range(ranks)], group).wait()
    for other, part in enumerate(received):
        assert part.tolist() == ([10.0 * other + rank, *[-1.0] * other] if rank else [])
    assert counted() == {"all_to_all": (1, 4 * (rank + 1) * (ranks - 1 - (rank > 0)))}

    gathered = exchange.all_gather(numbers.view(ranks, 2).mT, group).wait()
    assert torch.equal(gathered, torch.stack([(numbers - rank + other).view(ranks, 2).mT for other in range(ranks)]))
    assert counted() == {"all_gather": (1, (ranks - 1) * 8 * ranks)}

    assert torch.equal(exchange.all_reduce(numbers.clone(), group).wait(), total)
    assert torch.equal(exchange.lowest(numbers, group), numbers - rank)
    assert counted() == {"all_reduce": (1, 2 * (ranks - 1) * 8), "agree": (1, 8 * ranks)}

    part = exchange.reduce_scatter(numbers.view(2 * ranks, 1), group).wait()
    assert torch.equal(part, total.view(ranks, 2, 1)[rank])
    assert counted() == {"reduce_scatter": (1, (ranks - 1) * 8)}
    with pytest.raises(ValueError, match=f"{2 * ranks + 1} parts cannot be scattered evenly over {ranks} ranks"):
        exchange.reduce_scatter(torch.ones(2 * ranks + 1), group)

    # from and to every rank, of which the others are written over; a transposed one is copied
    x = numbers.view(ranks, 2).mT
    for root in range(ranks):
        reduced = exchange.reduce(x.clone(), root, group).wait()
        assert reduced is None if rank != root else torch.equal(reduced, total.view(ranks, 2).mT)
        handed_out = exchange.broadcast(x, root, group).wait()
        assert torch.equal(handed_out, (numbers - rank + root).view(ranks, 2).mT)
    # each is the end of one chain
    sent = (ranks - 1) * 8 * ranks
    assert counted() == {"reduce": (ranks, sent), "broadcast": (ranks, sent)}

    # a sum that bf16 would round away crosses in fp32
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([1.0 if rank == 0 else 2.0**-12] * ranks, dtype=dtype)
        exact = 1 + (ranks - 1) * 2.0**-12
        for result in (exchange.all_reduce(x, group).wait(), exchange.reduce_scatter(x, group).wait()):
            assert result.dtype == dtype
            assert torch.equal(result, torch.full_like(result, exact))
        reduced = exchange.reduce(x, 0, group).wait()
        assert reduced is None if rank else (reduced.dtype == dtype and torch.equal(reduced, torch.full_like(x, exact)))
    assert counted() == {
        "all_reduce": (2, 2 * 2 * (ranks - 1) * 4),
        "reduce_scatter": (2, 2 * (ranks - 1) * 4),
        "reduce": (2, 2 * ranks * 4 if rank else 0),
    }

    # several at once, taken in another order than they were started
    pending = [exchange.all_reduce(numbers + step, group) for step in range(8)]
    for step in reversed(range(8)):
        assert torch.equal(pending[step].wait(), total + ranks * step)

    # nothing to send is a collective too
    assert exchange.all_gather(numbers[:0], group).wait().shape == (ranks, 0)
    assert [part.numel() for part in exchange.all_to_all([[numbers[:0]]] * ranks, [0] * ranks, group).wait()] == [
        0
    ] * ranks
    return True


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives(ranks):
    assert all(run_ranks(collectives, ranks))


def stopping(rank, ranks, folder, scheme):
    """Three buckets, twice; the last rank is gone when it scales the second one, that is in the middle of the step."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    matrix, scaled = Matrix("a", (32, 96), cut((32, 96), 1, ranks)), []
    plan = Plan((matrix,) * 6, tuple(Bucket((2 * index, 2 * index + 1), scheme, (1, 2)) for index in range(3)))
    shards = [torch.randn(matrix.pieces[rank].shape) for _ in plan.matrices]

    def scale(rows, cols):
        scaled.append(rows)
        if rank == ranks - 1 and len(scaled) == 2:
            os._exit(0)
        return 1.0

    start = time.monotonic()
    try:
        # what the others still needed of the first step may have been sent before; of the second nothing was
        for _ in range(2):
            execute(plan, shards, {"tp": dist.group.WORLD}, NewtonSchulz(), scale)
    except RuntimeError:
        (folder / f"{rank}").write_text(str(time.monotonic() - start))
        raise


@pytest.mark.parametrize("scheme", ["owner", "duplicated", "distributed", "gram_replicated", "gram_split"])
def test_a_rank_that_is_gone_ends_the_others(tmp_path, scheme):
    ranks = 3
    context = mp.get_context("spawn")
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
