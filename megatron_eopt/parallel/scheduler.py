"""How programs run in turns: one exchanges while another computes.

A program is an optimizer's algorithm for some parameters, which waits for the orthogonal factors of its updates.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.parallel.chunks import BucketSlice, Chunk
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


def rounds(waiting: Iterator[Generator[Any, None, Any]]) -> Iterator[None]:
    """Run generators that yield where they wait; yields after each round.

    In a round the next one starts, if fewer than :data:`IN_FLIGHT` are at work, and then all of these go on, the
    youngest first. So the order of collectives is the same on every rank.
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


class StartedChunk:
    """A chunk at work: programs, waiting stacks, and finished factors."""

    def __init__(self, chunk: Chunk, program: Callable[[Sequence[int]], Program], device: torch.device) -> None:
        self.chunk = chunk
        self.factors: dict[int, Factors] = {}
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
            places = {i: stacks[b.bucket][1][row] for b in part.buckets for row, i in zip(b.rows, b.at, strict=True)}
            if callable(shards):
                shards([places[i] for i in range(len(places))])
            else:
                torch._foreach_copy_(list(places.values()), [shards[i] for i in places])
                shards.clear()
        self.stacks = {n: stack for n, (stack, _) in enumerate(stacks)}

    def next_bucket(self, watched: Watched | None) -> tuple[int, Generator[None, None, Factors]]:
        """The first waiting bucket, and what orthogonalizes it."""
        number = next(iter(self.stacks))
        job = self.chunk.jobs[number] if watched is None else replace(self.chunk.jobs[number], watched=watched)
        return number, SCHEMES[job.bucket.scheme](job, self.stacks.pop(number))

    def finish(self) -> None:
        """Resume each program with factors in its updates' dtypes."""
        for number, (part, (running, views)) in enumerate(zip(self.chunk.slices, self._programs, strict=True), 1):
            by_position: dict[int, Tensor] = {}
            for bucket in part.buckets:
                take = _rows if views else _taken
                by_position |= zip(bucket.at, take(self.factors[bucket.bucket], bucket), strict=True)
            factors = [by_position[i] for i in range(len(by_position))]
            del by_position
            if number == len(self.chunk.slices):
                self.factors.clear()
            resume(running, factors)


def resume(program: Program, factors: list[Tensor]) -> None:
    """Run a program to its end with its factors."""
    try:
        program.send(factors)
    except StopIteration:
        return
    raise AssertionError("a program orthogonalizes once")


def _rows(factors: Factors, bucket: BucketSlice) -> list[Tensor]:
    """A slice's factors, where they are."""
    of_rows = factors.unbind() if isinstance(factors, Tensor) else factors
    return [of_rows[i] for i in bucket.rows]


def _taken(factors: Factors, bucket: BucketSlice) -> list[Tensor]:
    """A slice's factors, contiguous, in memory of their own."""
    of_rows = factors if len(bucket.rows) == len(factors) else [factors[i] for i in bucket.rows]
    out, results = _room(factors[0].device, bucket.shapes, bucket.widest)
    if isinstance(of_rows, Tensor):
        out.copy_(of_rows)
    else:
        torch._foreach_copy_(results, of_rows)
    return [x if x.dtype == dtype else x.to(dtype) for x, dtype in zip(results, bucket.dtypes, strict=True)]


def _room(device: torch.device, shapes: Shapes, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Memory of one stack, and its matrices."""
    if isinstance(shapes, tuple):
        stack = torch.empty(shapes, dtype=dtype, device=device)
        return stack, list(stack.unbind())
    stack = torch.empty(sum(rows * cols for rows, cols in shapes), dtype=dtype, device=device)
    return stack, list(shards_of(stack, shapes))
