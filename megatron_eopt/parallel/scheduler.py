"""How programs run in turns: one exchanges while another computes.

A program is an optimizer's algorithm for some parameters, which waits for the orthogonal factors of its updates.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.parallel.chunks import Chunk
from megatron_eopt.parallel.collectives import CollectiveError
from megatron_eopt.parallel.schemes import SCHEMES
from megatron_eopt.parallel.schemes.whole import Factors, Shapes, shards_of
from megatron_eopt.parallel.watched import Watched
from megatron_eopt.parallel.workspace import IN_FLIGHT

Shards = list[Tensor] | Callable[[list[Tensor]], None]
"""This rank's shards of logical matrices, or what writes them into tensors, which may have a narrower dtype."""

Program = Generator[Shards, list[Tensor], None]
"""Yields shards once, and receives their orthogonal factors.

Shards in a list are copied, and the list is emptied, so that they can be freed; factors have memory of their own, and
the shapes and dtypes of the updates. Where a program yields what writes, it receives views, of any strides and in the
dtype that is exchanged, which are not to be written to.
"""


def rounds(
    waiting: Iterator[Generator[Any, None, Any] | None],
    advance: Callable[[Generator[Any, None, Any]], object] = next,
) -> Iterator[None]:
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
                advance(running)
            except StopIteration:
                at_work.remove(running)
        yield


class StartedChunk:
    """A chunk at work: programs, waiting stacks, and finished factors."""

    def __init__(self, chunk: Chunk, program: Callable[[Sequence[int]], Program], device: torch.device) -> None:
        self.chunk = chunk
        self._factors: dict[int, Factors] = {}
        self._programs: list[tuple[Program, bool]] = []  # and whether it takes views
        stacks: list[tuple[Tensor, list[Tensor]]] = []
        for part in chunk.slices:
            running = program(part.parameters)
            if not isinstance(running, Generator):
                raise TypeError(
                    f"a program is a generator, which yields the updates of its matrices once, got {running!r}: see "
                    f"muon in megatron_eopt/optimizers/muon.py"
                )
            shards = next(running)
            self._programs.append((running, callable(shards)))
            stacks = stacks or [_room(device, job.shapes, job.dtype) for job in chunk.jobs]
            places = [stacks[bucket][1][row] for bucket, row in part.rows]
            if callable(shards):
                shards(places)
            else:
                torch._foreach_copy_(places, shards)
                shards.clear()
        self._stacks = [stack for stack, _ in stacks]

    def buckets(self, watched: Watched | None) -> Iterator[Generator[None, None, None]]:
        """What orthogonalizes each bucket, in order."""
        for number, job in enumerate(self.chunk.jobs):
            job = job if watched is None else replace(job, watched=watched)
            yield self._bucket(number, SCHEMES[job.bucket.scheme](job, self._stacks.pop(0)))

    def _bucket(self, number: int, running: Generator[None, None, Factors]) -> Generator[None, None, None]:
        try:
            self._factors[number] = yield from running
        except CollectiveError as error:
            job = self.chunk.jobs[number]
            error.add(f"{job.bucket.scheme} of {len(job.bucket.matrices)} matrices such as {job.matrix.name}")
            raise

    def finish(self) -> bool:
        """Resume each program with factors in its updates' dtypes, once all are there."""
        if len(self._factors) < len(self.chunk.jobs):
            return False
        last = self.chunk.slices[-1]
        rows = {n: list(factors) for n, factors in self._factors.items()}  # of a stack views, by one operation
        self._factors.clear()
        for part, (running, views) in zip(self.chunk.slices, self._programs, strict=True):
            factors = [rows[bucket][row] for bucket, row in part.rows]
            if not views:
                factors = _copies(factors, part.dtypes)
            if part is last:
                rows.clear()
            resume(running, factors)
        return True


def resume(program: Program, factors: list[Tensor]) -> None:
    """Run a program to its end with its factors."""
    try:
        program.send(factors)
    except StopIteration:
        return
    raise AssertionError("a program orthogonalizes once")


def _copies(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Contiguous copies, alike ones in one memory of their own."""
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for i, (x, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        alike.setdefault((x.shape, dtype), []).append(i)
    copies = list(tensors)
    for (shape, dtype), some in alike.items():
        _, places = _room(tensors[0].device, (len(some), *shape), dtype)
        for i, x in zip(some, places, strict=True):
            copies[i] = x
    torch._foreach_copy_(copies, list(tensors))
    return copies


def _room(device: torch.device, shapes: Shapes, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Memory of one stack, and its matrices."""
    if isinstance(shapes, tuple):
        stack = torch.empty(shapes, dtype=dtype, device=device)
        return stack, list(stack.unbind())
    stack = torch.empty(sum(rows * cols for rows, cols in shapes), dtype=dtype, device=device)
    return stack, list(shards_of(stack, shapes))
