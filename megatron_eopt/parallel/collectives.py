"""The collectives, each counted, and groups over several axes: tests and benchmarks read :data:`counters`.

Every function but :func:`lowest` and :func:`total` starts a collective and returns at once; :meth:`Pending.wait` gives
its result, and raises what the backend raises: where a rank of the group is gone, the others end within the timeout of
the group. bf16 and fp16 are summed in fp32, and come back in their own dtype.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class Counters:
    """Collectives of this process since the last :meth:`reset`, by name: how many, and the bytes this rank sent."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, sent: int) -> None:
        """Add one call."""
        self.calls[name] += 1
        self.bytes[name] += sent

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.bytes.clear()


counters = Counters()


def sent_bytes(collective: str, size: int, ranks: int, rank: int = 0, root: int = 0) -> int:
    """Bytes that a rank sends in a collective over so many ranks: what plans predict, and what is counted.

    They are those of the ring algorithms (Thakur, Rabenseifner and Gropp, 2005): an all-reduce is a reduce-scatter and
    an all-gather, and a reduce to a root and a broadcast from it are chains along that ring. ``size`` are the bytes
    that every rank gives, or the root of a broadcast.
    """
    return {
        "all_gather": (ranks - 1) * size,
        "reduce_scatter": -(-(ranks - 1) * size // ranks),
        "all_reduce": -(-2 * (ranks - 1) * size // ranks),
        "reduce": 0 if rank == root else size,
        "broadcast": 0 if (rank + 1) % ranks == root else size,
    }[collective]


class Pending[Result]:
    """A collective that was started; it holds what is sent until the result is taken."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], Result], *sent: Tensor) -> None:
        self._started: tuple[dist.Work | None, Callable[[], Result], tuple[Tensor, ...]] | None = (work, finish, sent)

    def wait(self) -> Result:
        """The result, of which nothing is held any longer; on a GPU the current stream waits, not the host.

        To be called once.
        """
        assert self._started is not None, "it was waited for before"
        work, finish, _ = self._started
        if work is not None:
            work.wait()
        self._started = None
        return finish()


def packed(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[int]]:
    """What :func:`exchange` sends, as one 1-D tensor, and how many entries of it go to each rank.

    ``parts`` are for each rank the tensors that go to it, one behind the other; of one dtype and any strides, at least
    one of them somewhere, which may be empty.
    """
    tensors = [tensor for to in parts for tensor in to]
    sizes = [sum(tensor.numel() for tensor in to) for to in parts]
    sent = tensors[0].new_empty(sum(sizes))
    places = sent.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_([place.view(x.shape) for place, x in zip(places, tensors, strict=True)], tensors)
    return sent, sizes


def exchange(
    sent: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: ProcessGroup
) -> Pending[Tensor]:
    """What comes from each rank, one rank's behind the other's, as many entries as ``receive_sizes`` say, 1-D.

    ``sent`` is 1-D, and has as many entries for each rank as ``send_sizes`` say.
    """
    received = sent.new_empty(sum(receive_sizes))
    counters.count("all_to_all", (sent.numel() - send_sizes[group.rank()]) * sent.element_size())
    work = dist.all_to_all_single(received, sent, list(receive_sizes), list(send_sizes), group=group, async_op=True)
    return Pending(work, lambda: received, sent)


def all_gather(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """``x`` of all ranks, which has the same shape on each: (ranks x *shape of x)."""
    x = x.contiguous()
    counters.count("all_gather", sent_bytes("all_gather", x.nbytes, group.size()))
    gathered = x.new_empty(group.size() * x.numel())
    work = dist.all_gather_into_tensor(gathered, x.view(-1), group=group, async_op=True)
    return Pending(work, lambda: gathered.view(group.size(), *x.shape))


def all_reduce(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """Sum over the ranks. ``x`` may be written to: it is what is sent, if it is contiguous and needs no wider dtype."""
    wide = _wide(x)
    counters.count("all_reduce", sent_bytes("all_reduce", wide.nbytes, group.size()))
    work = dist.all_reduce(wide, group=group, async_op=True)
    return Pending(work, lambda: wide.to(x.dtype))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """The sum over the ranks of this rank's part of ``x``: (ranks * n x ...) becomes (n x ...)."""
    if x.size(0) % group.size():
        raise ValueError(f"{x.size(0)} parts cannot be scattered evenly over {group.size()} ranks")
    wide = _wide(x)
    counters.count("reduce_scatter", sent_bytes("reduce_scatter", wide.nbytes, group.size()))
    part = wide.new_empty(x.size(0) // group.size(), *x.shape[1:])
    work = dist.reduce_scatter_tensor(part, wide, group=group, async_op=True)
    return Pending(work, lambda: part.to(x.dtype), wide)


def reduce(x: Tensor, dst: int, group: ProcessGroup) -> Pending[Tensor | None]:
    """The sum over the ranks, on rank ``dst`` of the group; None on the others. ``x`` may be written to on any."""
    wide = _wide(x)
    counters.count("reduce", sent_bytes("reduce", wide.nbytes, group.size(), group.rank(), dst))
    work = dist.reduce(wide, group=group, group_dst=dst, async_op=True)
    return Pending(work, lambda: wide.to(x.dtype) if group.rank() == dst else None, wide)


def broadcast(x: Tensor, src: int, group: ProcessGroup) -> Pending[Tensor]:
    """``x`` of rank ``src`` of the group, where those of the others have its shape and dtype, and may be written to."""
    sent = x.contiguous()
    counters.count("broadcast", sent_bytes("broadcast", sent.nbytes, group.size(), group.rank(), src))
    work = dist.broadcast(sent, group=group, group_src=src, async_op=True)
    return Pending(work, lambda: sent)


def lowest(x: Tensor, group: ProcessGroup) -> Tensor:
    """Element-wise minimum of ``x`` over the ranks of a group, in a new tensor where ``x`` is; it is there on return.

    Not among the exchanges that a plan predicts; counted as ``agree``, with the bytes of ``x``.
    """
    return _agreed(x, dist.ReduceOp.MIN, group)


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``x``, as :func:`lowest` has the minimum."""
    return _agreed(x, dist.ReduceOp.SUM, group)


def _agreed(x: Tensor, op: Any, group: ProcessGroup) -> Tensor:
    # a group over NCCL knows no tensors on the CPU, by whatever name it was made: torch calls one without "undefined"
    known = [device.type for device in group._device_types]
    sent = x.to(known[0] if known and x.device.type not in known else x.device, copy=True)
    counters.count("agree", sent.nbytes)
    dist.all_reduce(sent, op, group=group)
    return sent.to(x.device)


def _wide(x: Tensor) -> Tensor:
    """``x``, contiguous, in a dtype in which sums over ranks keep what the entries have."""
    return x.float().contiguous() if x.dtype in (torch.bfloat16, torch.float16) else x.contiguous()


Partition = tuple[tuple[int, ...], ...]
"""Global ranks of each of several groups."""

_groups: WeakKeyDictionary[ProcessGroup, dict[Partition, ProcessGroup]] = WeakKeyDictionary()
"""Groups over several dimensions or axes, made once for each world: it takes all their ranks to make one."""


def joint_group(partition: Partition, own: tuple[int, ...]) -> ProcessGroup:
    """The group of this rank's part of a partition: all ranks, or one made at the first call of all ranks of the mesh.

    The partition is of the ranks that call together, or this rank's part alone. A ValueError says where only some ranks
    of the world have the mesh, and its groups are made by splitting communicators.
    """
    world = dist.group.WORLD
    assert world is not None, "a DTensor has a process group"
    if len(own) == world.size():
        return world
    if sum(map(len, partition)) == world.size():
        wanted, local = partition, False
    elif getattr(world, "bound_device_id", None) is None:
        wanted, local = (own,), True
    else:
        raise ValueError(
            f"ranks {own} need a group, but only some of the {world.size()} ranks ask for it, and all have to take "
            f"part where init_process_group was given a device_id: leave that out"
        )
    known = _groups.setdefault(world, {})
    if wanted not in known:
        made = [dist.new_group(ranks, use_local_synchronization=local) for ranks in map(list, wanted)]
        known[wanted] = made[wanted.index(own)]  # type: ignore[assignment]
    return known[wanted]
