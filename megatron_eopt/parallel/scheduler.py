"""How programs run: chunk by chunk as the workspace has room, several exchanges at work at a time.

A program is the algorithm of an optimizer for some parameters, from gradients to weights, as a generator. It yields
what is to be orthogonalized, and goes on with the factors. What waits for an exchange is a generator, too: a bucket of
matrices at work, or a program that exchanges by itself. :func:`rounds` runs these, so that one exchanges while another
computes.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.parallel.records import Bucket, Matrix, Plan, Rectangle
from megatron_eopt.parallel.schemes import SCHEMES
from megatron_eopt.parallel.schemes.whole import Alike, Factors, Job, Shapes, shards_of
from megatron_eopt.parallel.watched import Watched
from megatron_eopt.parallel.workspace import IN_FLIGHT

Program = Generator[list[Tensor], list[Tensor], None]
"""Yields this rank's shards of matrices once, and gets those of their orthogonal factors, in the same order.

The list that is yielded is emptied, so that shards are freed when they were copied. Factors have memory of their own.
"""


@dataclass(frozen=True)
class Piece:
    """The matrices that a bucket and a part of a chunk have in common."""

    bucket: int  # among those of the chunk
    rows: list[int]  # of its stack, ascending
    at: list[int]  # among the shards of the part
    shapes: Shapes  # of the factors
    dtypes: list[torch.dtype]  # of the updates


@dataclass(frozen=True)
class Part:
    """As many parameters of a chunk as one program works on."""

    parameters: tuple[int, ...]
    pieces: list[Piece]


@dataclass(frozen=True)
class Chunk:
    """Buckets that are worked on together, all decided; ``bytes`` are what they take."""

    jobs: list[Job]
    dtypes: list[torch.dtype]  # in which their stacks are exchanged
    parts: list[Part]
    bytes: int


def in_order(plan: Plan, bucket: Bucket) -> tuple[list[int], list[Alike]]:
    """The order of a bucket's matrices in its stack, and those of each compute rank where it is sent to these as it is.

    In such a stack they are ordered by compute ranks, and those of one rank that lie alike follow one another.
    """
    indices = range(len(bucket.matrices))
    if bucket.scheme not in ("owner", "share"):
        return list(indices), []
    first: dict[tuple[Rectangle, ...], int] = {}
    dealt = zip(bucket.compute_ranks, bucket.matrices, strict=True)
    kinds = [(rank, first.setdefault(plan.matrices[i].rectangles, i)) for rank, i in dealt]
    order = sorted(indices, key=kinds.__getitem__)
    alike: list[list[tuple[int, Matrix]]] = [[] for _ in range(plan.matrices[bucket.matrices[0]].ranks)]
    for (rank, i), same in groupby(order, kinds.__getitem__):
        alike[rank].append((len(list(same)), plan.matrices[i]))
    return order, list(alike)


def rounds(
    waiting: Iterator[Generator[Any, None, Any] | None],
    advance: Callable[[Generator[Any, None, Any]], Any] = next,
) -> Iterator[None]:
    """Run generators that yield where they wait for an exchange; yields after each round.

    In a round the next generator starts, if fewer than :data:`IN_FLIGHT` are at work, and then all of these go on, the
    youngest first. None in place of the next one lets a round pass. So the order of collectives is that of the
    generators, the same on every rank.
    """
    at_work: list[Generator[Any, None, Any]] = []
    more = True
    while more or at_work:
        if more and len(at_work) < IN_FLIGHT:
            try:
                started = next(waiting)
            except StopIteration:
                more = False
            else:
                at_work = at_work if started is None else [started, *at_work]
        still = []
        for running in at_work:
            try:
                advance(running)
                still.append(running)
            except StopIteration:
                pass
        at_work = still
        yield


@torch.no_grad()
def run(
    chunks: Sequence[Chunk],
    program: Callable[[Sequence[int]], Program],
    room: int,
    watched: Watched | None = None,
) -> None:
    """Run the programs of all chunks.

    A chunk starts with its first bucket, if there is ``room``, in bytes, beside those that are at work. Its programs go
    on, one after the other, when all of its buckets are done. A step that is ``watched`` does the same.

    Args:
        chunks: in the order of the plan.
        program: starts the program of some parameters.
        room: bytes that all chunks at work may take; one is always at work.
        watched: the step, where somebody watches it.
    """
    at_work: list[_Started] = []

    def buckets() -> Iterator[Generator[None, None, None] | None]:
        for chunk in chunks:
            while at_work and sum(started.chunk.bytes for started in at_work) + chunk.bytes > room:
                yield None
            started = _Started(chunk, program)
            at_work.append(started)
            yield from (started.run(number, watched) for number in range(len(chunk.jobs)))

    for _ in rounds(buckets(), next if watched is None else watched.timed("exchange", next)):
        for started in [each for each in at_work if each.done]:
            started.finish()
            at_work.remove(started)


class _Started:
    """A chunk at work: its programs, the stacks of buckets that wait, and the factors of those that are done."""

    def __init__(self, chunk: Chunk, program: Callable[[Sequence[int]], Program]) -> None:
        self.chunk = chunk
        self._programs: list[Program] = []
        self._factors: dict[int, Factors] = {}
        self._stacks: dict[int, Tensor] = {}
        for part in chunk.parts:
            running = program(part.parameters)
            self._programs.append(running)
            shards = next(running)
            if not self._stacks:
                made = [_empty(shards[0], job.shapes, each) for job, each in zip(chunk.jobs, chunk.dtypes, strict=True)]
                self._stacks = dict(enumerate(made))
            rows = {n: _rows(stack, chunk.jobs[n].shapes) for n, stack in self._stacks.items()}
            places = [(each.bucket, *place) for each in part.pieces for place in zip(each.rows, each.at, strict=True)]
            pairs = [(rows[bucket][row], shards[i]) for bucket, row, i in places]
            torch._foreach_copy_([row for row, _ in pairs], [shard for _, shard in pairs])
            shards.clear()
            del pairs

    @property
    def done(self) -> bool:
        return len(self._factors) == len(self.chunk.jobs)

    def run(self, number: int, watched: Watched | None) -> Generator[None, None, None]:
        """Orthogonalize a bucket, which takes its stack over."""
        job = self.chunk.jobs[number]
        if watched is not None:
            job = replace(job, watched=watched)
        self._factors[number] = yield from SCHEMES[job.bucket.scheme](job, self._stacks.pop(number))

    def finish(self) -> None:
        """Let each program go on with its factors, in the dtypes of the updates."""
        for number, (part, running) in enumerate(zip(self.chunk.parts, self._programs, strict=True), 1):
            found: dict[int, Tensor] = {}
            for piece in part.pieces:
                found |= zip(piece.at, _taken(self._factors[piece.bucket], piece), strict=True)
            factors = [found[i] for i in range(len(found))]
            del found
            if number == len(self.chunk.parts):
                self._factors.clear()
            resume(running, factors)


def resume(program: Program, factors: list[Tensor]) -> None:
    """Let a program go on to its end with the factors that it waits for."""
    try:
        program.send(factors)
    except StopIteration:
        return
    raise AssertionError("a program orthogonalizes once")


def _taken(factors: Factors, piece: Piece) -> list[Tensor]:
    """The factors of a piece, in memory of their own: contiguous, for multi-tensor operations."""
    of_rows = factors if len(piece.rows) == len(factors) else [factors[i] for i in piece.rows]
    out = _empty(factors[0], piece.shapes, widest(piece.dtypes))
    results = _rows(out, piece.shapes)
    if isinstance(of_rows, Tensor):
        out.copy_(of_rows)
    else:
        torch._foreach_copy_(results, of_rows)
    return [x if x.dtype == own else x.to(own) for x, own in zip(results, piece.dtypes, strict=True)]


def _empty(like: Tensor, shapes: Shapes, dtype: torch.dtype) -> Tensor:
    size = shapes if isinstance(shapes, tuple) else (sum(rows * cols for rows, cols in shapes),)
    return like.new_empty(size, dtype=dtype)


def _rows(stack: Tensor, shapes: Shapes) -> list[Tensor]:
    """The matrices of a stack."""
    return list(stack.unbind() if isinstance(shapes, tuple) else shards_of(stack, shapes))


def widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that holds what is in any of these."""
    found, *others = set(dtypes)
    for each in others:
        found = torch.promote_types(found, each)
    return found
