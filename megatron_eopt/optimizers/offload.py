"""State in host memory: which is kept there, and its way over the device in a step, chunk by chunk.

On a GPU host memory is pinned, and each direction has a stream: the state of the next chunk arrives while this one is
computed, and what this one is done with leaves meanwhile. No step waits on the host. On a CPU copies are made at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megatron_eopt.optimizers.muon import Batch, Chunk
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program, resume

Event = torch.cuda.Event | None  # None on a CPU, where all that was asked for is done

_ALIGNED = 256  # bytes: where tensors begin in a slot


def on_host(sizes: Iterable[int], fraction: float) -> Iterator[bool]:
    """Of parameters with state of these ``sizes``, in bytes, whether it is kept in host memory.

    They are spread evenly over the list: of its first parameters, however many, at least ``fraction`` of the bytes are
    kept there, and without the last of those that are, less.
    """
    total = there = 0
    for size in sizes:
        total += size
        taken = there < fraction * total
        there += size * taken
        yield taken


def host_zeros(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the shape of a parameter in host memory, pinned where the parameter is on a GPU."""
    return torch.zeros(parameter.shape, dtype=dtype, device="cpu", pin_memory=parameter.device.type == "cuda")


class Streamed:
    """The way of state from host memory to a device and back, in each step anew.

    In a step two slots on the device take turns: when the first parameters of a chunk are asked for, the one before it
    is computed, and the state of the one after it takes its place. So each is as large as every other chunk needs.

    Attributes:
        fetched: bytes that were copied to the device so far.
        stored: bytes that were copied back.
        held: bytes of the slots of the last step.
    """

    def __init__(self, device: torch.device) -> None:
        self.fetched = self.stored = self.held = 0
        self._device = device
        self._arriving, self._leaving = (_Lane(device) for _ in range(2))
        self._left: Event = None  # comes when all is at home that was taken back
        self._slots: list[Tensor] = []
        self._waiting: list[list[Tensor]] = []  # the state of each chunk, at home
        self._pairs: list[tuple[Tensor, Tensor]] = []  # of the chunk that arrives: at home, and on the device
        self._here: dict[int, Tensor] = {}  # of the chunk at work: the id of what is at home, and what is on the device
        self._home: dict[int, Tensor] = {}  # and the other way round

    def begin(self, batches: Sequence[Batch], chunks: Sequence[Sequence[int]], kept: Callable[[Tensor], bool]) -> None:
        """Start a step: the state of its first chunk is on its way then.

        Args:
            batches: what the step works on; their state is in host memory, for the parameters that are ``kept`` there.
            chunks: the parameters of each chunk, by their indices, in the order in which :meth:`bring` will be asked.
            kept: whether what has the shape of a parameter is kept in host memory.
        """
        self.end()  # of a step that failed
        homes: dict[int, list[Tensor]] = {}
        for batch in batches:
            each = zip(batch.indices, batch.parameters, batch.weights, batch.momenta, batch.further, strict=True)
            homes |= {i: [x for x in (m, *further) if x.shape == w.shape] for i, p, w, m, further in each if kept(p)}
        self._chunk_of = {i: number for number, chunk in enumerate(chunks) for i in chunk}
        self._waiting = [[x for i in chunk for x in homes.get(i, ())] for chunk in chunks] if homes else []
        sizes = [sum(map(_room, each)) for each in self._waiting]
        of_slots = [max(sizes[number::2], default=0) for number in range(2)]
        self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in of_slots]
        self.held = sum(of_slots)
        self._chunk = -1
        self._fetch(0)

    def bring(self, batches: list[Batch]) -> list[Batch]:
        """The batches of parameters of one chunk, with their state on the device."""
        if not self._waiting:
            return batches
        number = self._chunk_of[batches[0].indices[0]]
        if number != self._chunk:
            if self._arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(self._arrived)
            self._chunk = number
            self._here = {id(home): here for home, here in self._pairs}
            self._home = {id(here): home for home, here in self._pairs}
            self._fetch(number + 1)

        def here(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [self._here.get(id(x), x) for x in tensors]

        # a momentum stands in for a gradient that is missing
        found = ((each, here(each.momenta), here(each.gradients), list(map(here, each.further))) for each in batches)
        return [replace(each, momenta=m, gradients=g, further=further) for each, m, g, further in found]

    def around(self, chunk: Chunk, engine: Engine, program: Callable[[Chunk, Engine], Program]) -> Program:
        """A program with the state of its chunk on the device: momenta until they are averaged, the rest to its end."""
        chunk = replace(chunk, batches=self.bring(chunk.batches))
        running = program(chunk, engine)
        shards = next(running)
        self.take_back(chain(*(batch.momenta for batch in chunk.batches)))
        resume(running, (yield shards))
        self.take_back(chain(*(tensors for batch in chunk.batches for tensors in batch.further)))

    def take_back(self, tensors: Iterable[Tensor]) -> None:
        """Let those of the tensors that :meth:`bring` gave go home, as they are now: nobody writes to them again."""
        pairs = [(self._home[id(x)], x) for x in tensors if id(x) in self._home]
        if pairs:
            self._left = self._leaving.copy(pairs, [_now(self._device)])
            self.stored += sum(x.nbytes for _, x in pairs)

    def end(self) -> None:
        """Give the slots back, for when all has left."""
        for slot in self._slots:
            self._leaving.keep(slot)
        self._slots, self._waiting, self._pairs, self._here, self._home = [], [], [], {}, {}

    def wait(self) -> None:
        """Wait, on the host, until all is at home: before anybody reads it."""
        if self._left is not None:
            self._left.synchronize()

    def _fetch(self, number: int) -> None:
        """Let the state of a chunk arrive, once the one that had its slot is computed, and all is at home again."""
        if number >= len(self._waiting):
            return
        slot, start, self._pairs = self._slots[number % 2], 0, []
        for home in self._waiting[number]:
            here = slot[start : start + home.nbytes].view(home.dtype).view(home.shape)
            self._pairs.append((home, here))
            start += _room(home)
        to_here = [(here, home) for home, here in self._pairs]
        self._arrived = self._arriving.copy(to_here, [_now(self._device), self._left])
        self.fetched += sum(home.nbytes for home in self._waiting[number])


class _Lane:
    """Copies one way, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Event]) -> Event:
        """Copy into the first of each pair the second, once events have come; the result comes when that is done."""
        if self._stream is None:
            for to, x in pairs:
                to.copy_(x)
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            for to, x in pairs:
                to.copy_(x, non_blocking=True)
            return self._stream.record_event()

    def keep(self, slot: Tensor) -> None:
        """Let nobody have the memory of a tensor before the copies are done."""
        if self._stream is not None:
            slot.record_stream(self._stream)


def _now(device: torch.device) -> Event:
    """What comes when the device has computed what it was asked to."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _room(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNED) * _ALIGNED
