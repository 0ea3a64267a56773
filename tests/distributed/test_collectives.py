"""The collectives: what they give, and what they count."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.parallel import collectives
from megatron_eopt.parallel.collectives import counters
from tests.distributed import shards
from tests.distributed.ranks import run_ranks


def counted():
    found = shards.counted()
    counters.reset()
    return found


def every_collective(rank, ranks):
    group = dist.group.WORLD
    counters.reset()
    numbers = torch.arange(2.0 * ranks) + rank
    total = ranks * torch.arange(2.0 * ranks) + sum(range(ranks))

    # rank r sends r + 1 entries to each rank but the first, which gets none
    parts = [torch.tensor([10.0 * rank + to, *[-1.0] * rank] if to else []) for to in range(ranks)]
    sizes = [other + 1 if rank else 0 for other in range(ranks)]
    received = collectives.all_to_all(torch.cat(parts), list(map(len, parts)), sizes, group).wait()
    for other, part in enumerate(received.split(sizes)):
        assert part.tolist() == ([10.0 * other + rank, *[-1.0] * other] if rank else [])
    assert counted() == {"all_to_all": (1, 4 * (rank + 1) * (ranks - 1 - (rank > 0)))}

    gathered = collectives.all_gather(numbers.view(ranks, 2).mT, group).wait()
    assert torch.equal(gathered, torch.stack([(numbers - rank + other).view(ranks, 2).mT for other in range(ranks)]))
    assert counted() == {"all_gather": (1, (ranks - 1) * 8 * ranks)}

    assert torch.equal(collectives.all_reduce(numbers.clone(), group).wait(), total)
    assert torch.equal(collectives.lowest(numbers, group), numbers - rank)
    assert counted() == {"all_reduce": (1, 2 * (ranks - 1) * 8), "agree": (1, 2 * (ranks - 1) * 8)}

    part = collectives.reduce_scatter(numbers.view(2 * ranks, 1), group).wait()
    assert torch.equal(part, total.view(ranks, 2, 1)[rank])
    assert counted() == {"reduce_scatter": (1, (ranks - 1) * 8)}

    # from and to every rank, of which the others are written over; a transposed one is copied
    x = numbers.view(ranks, 2).mT
    for root in range(ranks):
        reduced = collectives.reduce(x.clone(), root, group).wait()
        assert reduced is None if rank != root else torch.equal(reduced, total.view(ranks, 2).mT)
        handed_out = collectives.broadcast(x, root, group).wait()
        assert torch.equal(handed_out, (numbers - rank + root).view(ranks, 2).mT)
    # each is the end of one chain
    sent = (ranks - 1) * 8 * ranks
    assert counted() == {"reduce": (ranks, sent), "broadcast": (ranks, sent)}

    # a sum that bf16 would round away crosses in fp32
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([1.0 if rank == 0 else 2.0**-12] * ranks, dtype=dtype)
        exact = 1 + (ranks - 1) * 2.0**-12
        for result in (collectives.all_reduce(x, group).wait(), collectives.reduce_scatter(x, group).wait()):
            assert result.dtype == dtype
            assert torch.equal(result, torch.full_like(result, exact))
        reduced = collectives.reduce(x, 0, group).wait()
        assert reduced is None if rank else (reduced.dtype == dtype and torch.equal(reduced, torch.full_like(x, exact)))
    assert counted() == {
        "all_reduce": (2, 2 * 2 * (ranks - 1) * 4),
        "reduce_scatter": (2, 2 * (ranks - 1) * 4),
        "reduce": (2, 2 * ranks * 4 if rank else 0),
    }

    # flags on the CPU, in groups that are made with a name for each device, or for one of them
    for name in ("cpu:gloo", "gloo", None):
        made = dist.new_group(backend=name)
        assert torch.equal(collectives.lowest(numbers, made), numbers - rank)

    # nothing to send is a collective too
    assert collectives.all_gather(numbers[:0], group).wait().shape == (ranks, 0)
    assert collectives.all_to_all(numbers[:0], [0] * ranks, [0] * ranks, group).wait().numel() == 0
    return True


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(ranks):
    assert all(run_ranks(every_collective, ranks))


def alone(rank, ranks):
    """What rank 0 is told of each collective in which rank 1 takes no part."""
    x, told = torch.ones(2, 3), {}
    calls = {
        "all_to_all of 12 bytes": lambda group: collectives.all_to_all(torch.ones(6), [3, 3], [3, 3], group).wait(),
        "all_gather of 24 bytes": lambda group: collectives.all_gather(x, group).wait(),
        "all_reduce of 24 bytes": lambda group: collectives.all_reduce(x, group).wait(),
        "reduce_scatter of 12 bytes": lambda group: collectives.reduce_scatter(x, group).wait(),
        "reduce of 0 bytes": lambda group: collectives.reduce(x, 0, group).wait(),
        "broadcast of 0 bytes": lambda group: collectives.broadcast(x, 1, group).wait(),
        "agree of 24 bytes": lambda group: collectives.lowest(x, group),
        "agree of 16 bytes": lambda group: collectives.gather_numbers([1, 2], group),
    }
    counters.reset()
    for name, call in calls.items():
        group = dist.new_group(timeout=timedelta(seconds=1))
        dist.barrier(group)  # which connects them
        if rank == 0:
            with pytest.raises(collectives.CollectiveError) as error:
                call(group)
            told[name] = str(error.value)
    return told


def test_a_collective_that_fails_is_named():
    """By its bytes, by its number among those of the process, and by the step, with what the backend says."""
    told, _ = run_ranks(alone, 2)
    for number, (name, message) in enumerate(told.items(), 1):
        assert message.startswith(f"{name} among 2 ranks failed: ")
        assert "1000ms" in message
        assert f"collective {number} of this process" in message


class Group:
    """What a group says of itself; torch's meta device stands for a GPU."""

    def __init__(self, *devices):
        self._device_types = [torch.device(each) for each in devices]

    def size(self):
        return 2


@pytest.mark.parametrize(
    ("group", "of_cpu"),
    [
        (Group("meta"), "meta"),  # init_process_group() on a GPU, "nccl", "cuda:nccl"
        (Group("meta", "cpu"), "cpu"),  # "gloo", "cpu:gloo,cuda:nccl", in whatever order torch lists them
        (Group("cpu", "meta"), "cpu"),
        (Group(), "cpu"),  # nothing was sent yet, and the backend is made when something is
    ],
)
def test_tensors_are_sent_from_a_device_of_the_group(group, of_cpu, monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group: sent.append(x.device.type))
    with pytest.raises(NotImplementedError, match="out of meta tensor") if of_cpu == "meta" else nullcontext():
        assert torch.equal(collectives.lowest(torch.ones(3), group), torch.ones(3))
    assert sent == [of_cpu]
    if group._device_types != [torch.device("cpu")]:  # what is on the GPU stays there
        assert collectives.lowest(torch.ones(3, device="meta"), group).is_meta
        assert sent == [of_cpu, "meta"]
