"""The collectives, each counted, and groups over several axes.

Those that return a :class:`Pending` return at once, and its :meth:`Pending.wait` gives the result; the others return
when they are finished. Where the backend raises (if a rank is gone, or after the group's timeout), a
:class:`CollectiveError` names the collective. bf16 and fp16 are summed in fp32.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class Counters:
    """Calls of collectives and bytes this rank sent, by name.

    Attributes:
        step: the step of this process that began last.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    step: str = "the start"

    def count(self, name: str, sent: int) -> None:
        """Add one call."""
        self.calls[name] += 1
        self.bytes[name] += sent

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.bytes.clear()


counters = Counters()


def sent_bytes(
    collective: str,
    size: int,
    ranks: int,
    rank: int = 0,
    root: int = 0,
) -> int:
    """Bytes that a rank sends in a collective.

    By ring algorithms (Thakur, Rabenseifner and Gropp, 2005); a reduce and a broadcast are chains. ``size`` is what
    each rank, or the root of a broadcast, gives.
    """
    return {
        "all_gather": (ranks - 1) * size,
        "reduce_scatter": -(-(ranks - 1) * size // ranks),
        "all_reduce": -(-2 * (ranks - 1) * size // ranks),
        "reduce": 0 if rank == root else size,
        "broadcast": 0 if (rank + 1) % ranks == root else size,
    }[collective]


class CollectiveError(RuntimeError):
    """What the backend raised in a collective, and which one it was."""

    def add(self, what: str) -> None:
        """Say first what the collective was a part of."""
        self.args = (f"{what}: {self}",)


class Counted:
    """A collective that is counted, and named where it fails."""

    def __init__(self, name: str, sent: int, group: ProcessGroup) -> None:
        counters.count(name, sent)
        self._what = name, sent, group.size(), counters.calls.total()

    def run[Result](self, call: Callable[[], Result]) -> Result:
        """Start it, or wait for it."""
        try:
            return call()
        except RuntimeError as error:
            name, sent, ranks, number = self._what
            raise CollectiveError(
                f"{name} of {sent} bytes among {ranks} ranks failed: {error}. It is collective {number} of this "
                f"process, and {counters.step} began last. After a timeout, look for a rank that did not take part: it "
                f"ended, or is in another collective, which its own error names, as where a setting of a group changed "
                f"on it alone"
            ) from error


class Pending[Result]:
    """A started collective; it keeps what is sent until :meth:`wait`."""

    def __init__(self, wait: Callable[[], object] | None, finish: Callable[[], Result], *sent: Tensor) -> None:
        self._started: tuple[Callable[[], object] | None, Callable[[], Result], tuple[Tensor, ...]] | None
        self._started = (wait, finish, sent)

    def wait(self) -> Result:
        """The result, once; a GPU's stream waits, not the host."""
        assert self._started is not None, "it was waited for before"
        wait, finish, _ = self._started
        if wait is not None:
            wait()
        self._started = None
        return finish()


def _start(
    name: str,
    sent: int,
    group: ProcessGroup,
    call: Callable[..., dist.Work | None],
) -> Callable[[], object] | None:
    """Start a collective that sends so many bytes; returns what waits for it."""
    collective = Counted(name, sent, group)
    work = collective.run(partial(call, group=group, async_op=True))
    if work is None:
        return None
    return lambda: collective.run(work.wait)


def _sent(
    name: str,
    x: Tensor,
    group: ProcessGroup,
    root: int = 0,
) -> int:
    """Bytes that this rank sends."""
    return sent_bytes(name, x.nbytes, group.size(), group.rank(), root)


def all_to_all(
    sent: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: ProcessGroup,
) -> Pending[Tensor]:
    """All-to-all of 1-D tensors; sizes are entries for each rank."""
    received = sent.new_empty(sum(receive_sizes))
    call = partial(dist.all_to_all_single, received, sent, list(receive_sizes), list(send_sizes))
    bytes_sent = (sent.numel() - send_sizes[group.rank()]) * sent.element_size()
    wait = _start("all_to_all", bytes_sent, group, call)
    return Pending(wait, lambda: received, sent)


def all_gather(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """``x`` of all ranks: (ranks x *shape of x)."""
    x = x.contiguous()
    gathered = x.new_empty(group.size() * x.numel())
    call = partial(dist.all_gather_into_tensor, gathered, x.view(-1))
    wait = _start("all_gather", _sent("all_gather", x, group), group, call)
    return Pending(wait, lambda: gathered.view(group.size(), *x.shape))


def all_reduce(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """Sum over the ranks; ``x`` may be written to."""
    wide = _wide(x)
    wait = _start("all_reduce", _sent("all_reduce", wide, group), group, partial(dist.all_reduce, wide))
    return Pending(wait, lambda: wide.to(x.dtype))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """This rank's n of the (ranks * n) summed rows."""
    wide = _wide(x)
    part = wide.new_empty(x.size(0) // group.size(), *x.shape[1:])
    call = partial(dist.reduce_scatter_tensor, part, wide)
    wait = _start("reduce_scatter", _sent("reduce_scatter", wide, group), group, call)
    return Pending(wait, lambda: part.to(x.dtype), wide)


def reduce(x: Tensor, dst: int, group: ProcessGroup) -> Pending[Tensor | None]:
    """Sum on rank ``dst``, else None; ``x`` may be overwritten."""
    wide = _wide(x)
    wait = _start("reduce", _sent("reduce", wide, group, dst), group, partial(dist.reduce, wide, group_dst=dst))
    return Pending(wait, lambda: wide.to(x.dtype) if group.rank() == dst else None, wide)


def broadcast(x: Tensor, src: int, group: ProcessGroup) -> Pending[Tensor]:
    """``x`` of rank ``src``; that of others is overwritten."""
    sent = x.contiguous()
    call = partial(dist.broadcast, sent, group_src=src)
    wait = _start("broadcast", _sent("broadcast", sent, group, src), group, call)
    return Pending(wait, lambda: sent)


def lowest(x: Tensor, group: ProcessGroup) -> Tensor:
    """Element-wise minimum, finished on return; counted as ``agree``."""
    return _agreed(x, dist.ReduceOp.MIN, group)


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, otherwise as :func:`lowest`."""
    return _agreed(x, dist.ReduceOp.SUM, group)


def gather_numbers(numbers: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """The numbers of each rank, of 64 bits and equally many; finished on return."""
    sent = _on_device(torch.tensor(numbers, dtype=torch.int64), group)
    found = sent.new_empty(group.size() * len(numbers))
    collective = Counted("agree", sent_bytes("all_gather", sent.nbytes, group.size()), group)
    collective.run(partial(dist.all_gather_into_tensor, found, sent, group=group))
    return found.view(group.size(), -1).tolist()


def values_of(ranks: Sequence[int], value: Any, group: ProcessGroup) -> list[Any]:
    """The values of some ranks of the group, on all; finished on return.

    What is sent grows with these values, and not with the ranks of the group.
    """
    own = pickle.dumps(value) if group.rank() in ranks else b""
    sizes = [size for (size,) in gather_numbers([len(own)], group)]
    several = torch.zeros(sum(sizes), dtype=torch.uint8)
    if own:
        several.split(sizes)[group.rank()].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    parts = total(several, group).split(sizes)  # each entry is that of one rank
    return [pickle.loads(parts[rank].numpy().tobytes()) for rank in ranks]


def _agreed(x: Tensor, op: Any, group: ProcessGroup) -> Tensor:
    sent = _on_device(x, group, copy=True)
    collective = Counted("agree", sent_bytes("all_reduce", sent.nbytes, group.size()), group)
    collective.run(partial(dist.all_reduce, sent, op, group=group))
    return sent.to(x.device)


def _on_device(x: Tensor, group: ProcessGroup, copy: bool = False) -> Tensor:
    # NCCL takes no tensors on the CPU; the group's name may be "undefined", so its devices are asked
    known = [device.type for device in group._device_types]
    reaches = not known or x.device.type in known
    return x.to(x.device if reaches else known[0], copy=copy)


def _wide(x: Tensor) -> Tensor:
    """``x``, contiguous, in the dtype in which it is summed."""
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    return x.contiguous()


Partition = tuple[tuple[int, ...], ...]  # global ranks of each of several groups

# over several axes, by world, since all their ranks make one together
_groups: WeakKeyDictionary[ProcessGroup, dict[Partition, ProcessGroup]] = WeakKeyDictionary()


def joint_group(partition: Partition, ranks: tuple[int, ...]) -> ProcessGroup:
    """The group of ``ranks``, one part of a partition.

    All ranks of the partition make it at the first call; ``ValueError`` where other ranks would have to join.
    """
    world = dist.group.WORLD
    assert world is not None, "a DTensor has a process group"
    if len(ranks) == world.size():
        return world
    if sum(map(len, partition)) == world.size():
        wanted = partition
        local = False
    elif getattr(world, "bound_device_id", None) is None:
        wanted = (ranks,)
        local = True
    else:
        raise ValueError(
            f"ranks {ranks} need a group, but only some of the {world.size()} ranks ask for it, and all have to take "
            f"part where init_process_group was given a device_id: leave that out"
        )
    known = _groups.setdefault(world, {})
    if wanted not in known:
        for members in wanted:
            group = dist.new_group(list(members), use_local_synchronization=local)
            if members == ranks:
                known[wanted] = group  # type: ignore[assignment]
    return known[wanted]
