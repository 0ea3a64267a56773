"""How programs run in turns: one exchanges while another computes.

A program is an optimizer's algorithm for some parameters, which waits for the orthogonal factors of its updates.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from megatron_eopt.parallel.chunks import CompiledChunk, ParamSlice
from megatron_eopt.parallel.collectives import CollectiveError
from megatron_eopt.parallel.exchange import Factors, Shapes, shards_of
from megatron_eopt.parallel.schemes import SCHEMES
from megatron_eopt.parallel.workspace import IN_FLIGHT


class Rows(Sequence[Tensor]):
    """Matrices of stacks, as views made when they are read.

    Args:
        stacks: of buckets.
        rows: of each matrix its stack, and its row there.
    """

    def __init__(self, stacks: Sequence[Factors], rows: Sequence[tuple[int, int]]) -> None:
        self.stacks = stacks
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return list(self)[index]
        stack, row = self.rows[index]
        return self.stacks[stack][row]

    def __iter__(self) -> Iterator[Tensor]:
        matrices = list(map(list, self.stacks))  # of a stack by one operation
        return (matrices[stack][row] for stack, row in self.rows)


Shards = list[Tensor] | Callable[[Sequence[Tensor]], None]
"""This rank's shards of logical matrices, or what writes them into tensors, which may have a narrower dtype."""

Program = Generator[Shards, Any, None]
"""Yields shards once, and receives their orthogonal factors.

Shards in a list are copied, and the list is emptied, so that they can be freed; factors have memory of their own, and
the shapes and dtypes of the updates. Where a program yields what writes, it receives :class:`Rows`, of any strides and
in the dtype that is exchanged, which are not to be written to.
"""


def rounds(waiting: Iterator[Generator[Any, None, Any] | None]) -> Iterator[None]:
    """Run generators that yield where they wait; yields after each round.

    In a round the next one starts, if fewer than :data:`IN_FLIGHT` are at work, and then all of these go on, the
    youngest first. So the order of collectives is the same on every rank. None is waiting for one that ends.
    """
    at_work: list[Generator[Any, None, Any]] = []
    while True:
        if len(at_work) < IN_FLIGHT and (started := next(waiting, None)) is not None:
            at_work.insert(0, started)
        if not at_work:
            return
        for running in tuple(at_work):
            try:
                next(running)
            except StopIteration:
                at_work.remove(running)
        yield


def run_chunks(
    chunks: Sequence[CompiledChunk],
    program: Callable[[Sequence[int]], Program],
    device: torch.device,
    room: int,
) -> None:
    """Run the programs of chunks, whose buckets take turns.

    A chunk starts with its first bucket, if there is ``room`` for its bytes beside those at work; one always is. Its
    programs go on in turn when all of its buckets are done: in the same order on every rank.
    """
    at_work: list[StartedChunk] = []

    def buckets() -> Iterator[Generator[None, None, None] | None]:
        for chunk in chunks:
            while at_work and chunk.bytes + sum(other.chunk.bytes for other in at_work) > room:
                yield None
            started = StartedChunk(chunk, program, device)
            at_work.append(started)
            for number in range(len(chunk.jobs)):
                yield started.bucket(number)

    for _ in rounds(buckets()):
        for started in list(at_work):
            if started.left == 0:
                at_work.remove(started)
                started.finish()


ONCE = "a rule that steps momenta yields stack.orthogonalize(u) once"


class _Running(NamedTuple):
    """A program that waits for its factors."""

    program: Program
    part: ParamSlice
    takes_views: bool


class StartedChunk:
    """A chunk at work: programs, waiting stacks, and finished factors.

    Attributes:
        left: number of buckets that are not done.
    """

    def __init__(self, chunk: CompiledChunk, program: Callable[[Sequence[int]], Program], device: torch.device) -> None:
        self.chunk = chunk
        self.left = len(chunk.jobs)
        self._factors: dict[int, Factors] = {}  # by the number of the bucket
        self._programs: list[_Running] = []
        self._stacks: list[Tensor] = []
        rooms: list[Factors] = []  # shards of each stack
        for part in chunk.slices:
            running = program(part.parameters)
            shards = begin(running)
            self._programs.append(_Running(running, part, callable(shards)))
            if not self._stacks:
                for job in chunk.jobs:
                    stack, room = _room(device, job.shapes, job.dtype)
                    self._stacks.append(stack)
                    rooms.append(room)
            stacked = Rows(rooms, part.rows)
            if callable(shards):
                shards(stacked)
            else:
                torch._foreach_copy_(list(stacked), shards)
                shards.clear()

    def bucket(self, number: int) -> Generator[None, None, None]:
        """Orthogonalize a bucket, the first that is left."""
        job = self.chunk.jobs[number]
        try:
            self._factors[number] = yield from SCHEMES[job.bucket.scheme](job, self._stacks.pop(0))
        except CollectiveError as error:
            error.add(f"{job.bucket.scheme} of {len(job.bucket.matrices)} matrices such as {job.matrix.name}")
            raise
        self.left -= 1

    def finish(self) -> None:
        """Resume each program with factors in its updates' dtypes."""
        stacks = [self._factors[number] for number in range(len(self._factors))]
        self._factors.clear()
        last = self._programs[-1]
        for running in self._programs:
            views = Rows(stacks, running.part.rows)
            if running.takes_views:
                resume(running.program, views)
                continue
            factors = _owned(views, running.part.dtypes)
            if running is last:
                stacks.clear()
            resume(running.program, factors)


def begin(program: Program) -> Shards:
    """Run a program until it waits for its factors."""
    for shards in program:
        return shards
    raise TypeError(f"{ONCE}, got none")


def resume(program: Program, factors: Sequence[Tensor]) -> None:
    """Run a program to its end with its factors."""
    try:
        program.send(factors)
    except StopIteration:
        return
    raise TypeError(f"{ONCE}, got it twice")


def _owned(factors: Rows, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Contiguous matrices in memory of their own; neighbours in a stack are copied together.

    What has its dtype and lies back to back stays where it is: each row of a stack belongs to one program.
    """
    places = sorted(range(len(dtypes)), key=factors.rows.__getitem__)
    owned = list(factors)
    alike: dict[tuple[int, torch.dtype, torch.Size], list[int]] = {}
    for place in places:
        alike.setdefault((factors.rows[place][0], dtypes[place], owned[place].shape), []).append(place)
    for (number, dtype, _), some in alike.items():
        stack = factors.stacks[number]
        first = factors.rows[some[0]][1]
        last = factors.rows[some[-1]][1]
        if isinstance(stack, Tensor) and last - first + 1 == len(some):
            matrices = stack[first : last + 1]
        else:
            matrices = torch.stack([owned[place] for place in some])
        for place, x in zip(some, matrices.contiguous().to(dtype).unbind(), strict=True):
            owned[place] = x
    return owned


def _room(device: torch.device, shapes: Shapes, dtype: torch.dtype) -> tuple[Tensor, Factors]:
    """Memory of one stack, and its matrices."""
    if isinstance(shapes, tuple):
        stack = torch.empty(shapes, dtype=dtype, device=device)
        return stack, stack
    entries = sum(rows * cols for rows, cols in shapes)
    stack = torch.empty(entries, dtype=dtype, device=device)
    return stack, shards_of(stack, shapes)
