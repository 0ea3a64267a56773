"""State in host memory, copied to devices by chunks.

On a GPU each direction has a stream: the next chunk's state arrives, and the last one's leaves, while this one is
computed. The host never waits. State of a chunk lies together in pinned memory, so that one copy moves it. On a CPU
copies are made at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest

import torch
from torch import Tensor

from megatron_eopt.parallel.scheduler import Program, begin, resume
from megatron_eopt.step.momenta.momentum_stack import MomentumStack
from megatron_eopt.step.parameters import local
from megatron_eopt.step.stacks import Chunk
from megatron_eopt.step.state import MOMENTUM_BUFFER

Event = torch.cuda.Event | None  # None on a CPU, where all that was asked for is done

_ALIGNED = 256  # bytes: where tensors begin in a memory


class Streamed:
    """Moves state from host memory to a device and back."""

    def __init__(self, device: torch.device) -> None:
        self.fetched = 0  # bytes copied to the device so far
        self.stored = 0  # and back
        self.held = 0  # bytes of the slots of the last step
        self._device = device
        self._arriving = _Lane(device)
        self._leaving = _Lane(device)
        self._left: Event = None  # comes when all is at home that was taken back
        self._slots: list[Tensor] = []  # two, in turn: while a chunk is computed, the next one's state arrives
        self._waiting: list[list[Tensor]] = []  # the state of each chunk, at home
        self._pairs: list[tuple[Tensor, Tensor]] = []  # of the chunk that arrives: at home, and on the device
        self._here: dict[int, Tensor] = {}  # of the chunk at work: the id of what is at home, and what is on the device
        self._home: dict[int, Tensor] = {}  # and the other way round

    def begin(self, chunks: Sequence[Sequence[int]], homes: Mapping[int, Sequence[Tensor]]) -> None:
        """Start a step with its ``chunks`` of indices, in order; ``homes`` has the state that moves, by index."""
        self.end()  # of a step that failed
        self._chunk_of = {i: number for number, chunk in enumerate(chunks) for i in chunk}
        if homes:
            for chunk in chunks:
                by_parameter = (homes.get(i, ()) for i in chunk)
                by_key = chain(*zip_longest(*by_parameter))  # as they leave: all momenta first
                self._waiting.append([x for x in by_key if x is not None])
        if self._device.type == "cuda":
            for tensors in self._waiting:
                _pin([x for x in tensors if not x.is_pinned()])  # before the first step, and what was loaded
        sizes = [sum(map(_room, tensors)) for tensors in self._waiting]
        of_slots = [max(sizes[number::2], default=0) for number in range(2)]
        self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in of_slots]
        self.held = sum(of_slots)
        self._chunk = -1
        self._fetch(0)

    def bring(self, chunk: Chunk[MomentumStack]) -> None:
        """Let a chunk read its state on the device."""
        if not self._waiting:
            return
        number = self._chunk_of[chunk.indices[0]]
        if number != self._chunk:
            if self._arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(self._arrived)
            self._chunk = number
            self._here = {id(home): here for home, here in self._pairs}
            self._home = {id(here): home for home, here in self._pairs}
            self._fetch(number + 1)
        chunk.on_device = self._on_device

    def _on_device(self, x: Tensor) -> Tensor:
        return self._here.get(id(x), x)

    def around(self, chunk: Chunk[MomentumStack], worked: Callable[[Chunk[MomentumStack]], Program]) -> Program:
        """Wrap the step of a chunk with its state on the device."""
        self.bring(chunk)
        running = worked(chunk)
        shards = begin(running)
        momenta = list(chunk.wholes(MOMENTUM_BUFFER).values())
        further = list[Tensor]()
        for p in chunk.parameters.values():
            state = chunk.optimizer.state[p]
            further += [self._on_device(local(x)) for key, x in state.items() if key != MOMENTUM_BUFFER]

        def written(updates: Sequence[Tensor]) -> None:
            assert callable(shards)
            shards(updates)
            self.take_back(momenta)

        if not callable(shards):
            self.take_back(momenta)
        resume(running, (yield written if callable(shards) else shards))
        self.take_back(further)

    def take_back(self, tensors: Iterable[Tensor]) -> None:
        """Start to copy finished state back to the host."""
        pairs = [(self._home[id(x)], x) for x in tensors if id(x) in self._home]
        if pairs:
            self._left = self._leaving.copy(pairs, [_now(self._device)])
            self.stored += sum(x.nbytes for _, x in pairs)

    def end(self) -> None:
        """Release the slots when all copies are done."""
        for slot in self._slots:
            self._arriving.keep(slot)  # a step that failed may not have waited for it
            self._leaving.keep(slot)
        self._slots = []
        self._waiting = []
        self._pairs = []
        self._here = {}
        self._home = {}

    def wait(self) -> None:
        """Block the host until all state is back."""
        if self._left is not None:
            self._left.synchronize()

    def _fetch(self, number: int) -> None:
        if number >= len(self._waiting):
            return
        homes = self._waiting[number]
        self._pairs = list(zip(homes, _like(homes, self._slots[number % 2]), strict=True))
        to_here = [(here, home) for home, here in self._pairs]
        self._arrived = self._arriving.copy(to_here, [_now(self._device), self._left])
        self.fetched += sum(home.nbytes for home in homes)


class _Lane:
    """Copies one way, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Event]) -> Event:
        """Copy into the first of each pair, after events."""
        if self._stream is None:
            for to, x in pairs:
                to.copy_(x)
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            for to, x in _joined(pairs):
                to.copy_(x, non_blocking=True)
            return self._stream.record_event()

    def keep(self, slot: Tensor) -> None:
        """Keep a tensor's memory until the copies are done."""
        if self._stream is not None:
            slot.record_stream(self._stream)


def _now(device: torch.device) -> Event:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _room(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNED) * _ALIGNED


def _like(tensors: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Tensors of the same shapes in a memory of bytes, one after another."""
    made = []
    start = 0
    for x in tensors:
        made.append(memory.view(x.dtype).as_strided(x.shape, x.stride(), start // x.itemsize))
        start += _room(x)
    return made


def _pin(tensors: Sequence[Tensor]) -> None:
    """Move tensors to pinned memory, one after another."""
    if not tensors:
        return
    memory = torch.zeros(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=True)
    for x, pinned in zip(tensors, _like(tensors, memory), strict=True):
        x.data = pinned.copy_(x)


def _joined(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The memory of pairs, of those that follow one another on both sides as one."""
    runs: list[list[tuple[Tensor, Tensor]]] = []
    for pair in pairs:
        if runs and all(map(_follows, pair, runs[-1][-1])):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    for run in runs:
        to, x = zip(*run, strict=True)
        yield _memory(to), _memory(x)


def _follows(x: Tensor, other: Tensor) -> bool:
    """Whether a tensor lies behind another one in the same memory."""
    if x.data_ptr() != other.data_ptr() + _room(other):
        return False
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _memory(tensors: Sequence[Tensor]) -> Tensor:
    """All from the first tensor to the last, in the dtype of the first."""
    first = tensors[0]
    nbytes = tensors[-1].data_ptr() + tensors[-1].nbytes - first.data_ptr()
    return first.as_strided((-(-nbytes // first.itemsize),), (1,))
