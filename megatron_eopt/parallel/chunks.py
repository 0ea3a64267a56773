"""How a step runs: chunk by chunk as the workspace has room, several buckets at work at a time."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_eopt.parallel.records import Bucket
from megatron_eopt.parallel.schemes import SCHEMES
from megatron_eopt.parallel.schemes.whole import Factors, Job
from megatron_eopt.parallel.workspace import IN_FLIGHT

Directions = Callable[[Sequence[int]], list[Tensor]]
"""Of some parameters this rank's shards of what is orthogonalized; they are not written to."""


@dataclass(frozen=True)
class Piece:
    """The matrices that a bucket and a part of a chunk have in common."""

    bucket: int  # among those of the chunk
    rows: list[int]  # of its stack, ascending
    at: list[int]  # among the shards of the part
    scales: list[float]
    dtypes: list[torch.dtype]  # of the updates


@dataclass(frozen=True)
class Part:
    """As many parameters of a chunk as hooks work on at once."""

    parameters: tuple[int, ...]
    pieces: list[Piece]


@dataclass(frozen=True)
class Chunk:
    """Buckets that are worked on together, all decided; ``bytes`` are what they take."""

    jobs: list[Job]
    shapes: list[tuple[int, ...]]  # of the stack of each bucket
    dtypes: list[torch.dtype]  # in which these are exchanged
    parts: list[Part]
    bytes: int


def in_order(bucket: Bucket) -> list[int]:
    """The order of a bucket's matrices in its stack: by compute ranks, where it is sent to these as it is."""
    indices = range(len(bucket.matrices))
    return (
        sorted(indices, key=bucket.compute_ranks.__getitem__) if bucket.scheme in ("owner", "share") else list(indices)
    )


@torch.no_grad()
def execute(
    chunks: Sequence[Chunk], directions: Directions, room: int, scaled: bool
) -> Iterator[tuple[tuple[int, ...], list[Tensor]]]:
    """Yield the parts of chunks with the factors of their matrices, in the order in which these are there.

    The order in which buckets are resumed, and with it that of the collectives, follows from the plan alone, so it is
    the same on every rank: in each round the next bucket starts, and then those at work go on, the youngest first. A
    chunk starts with its first bucket, if there is ``room``, in bytes, beside those that are at work.
    """
    to_start, waiting = deque(chunks), deque[tuple[_Started, int]]()
    at_work: list[tuple[_Started, int, Generator[None, None, Factors]]] = []
    while to_start or waiting or at_work:
        if len(at_work) < IN_FLIGHT:
            held = sum({id(each): each.chunk.bytes for each, *_ in at_work}.values())
            if not waiting and to_start and (not held or held + to_start[0].bytes <= room):
                started = _Started(to_start.popleft(), directions)
                waiting.extend((started, number) for number in range(len(started.chunk.jobs)))
            if waiting:
                started, number = waiting.popleft()
                at_work.insert(0, (started, number, started.run(number)))
        still, done = [], []
        for started, number, running in at_work:
            try:
                next(running)
                still.append((started, number, running))
            except StopIteration as stop:
                started.factors[number] = stop.value
                done += [started] if len(started.factors) == len(started.chunk.jobs) else []
        at_work = still
        for started in done:
            yield from started.parts(scaled)


class _Started:
    """A chunk at work: stacks of buckets that wait, and the factors of those that are done."""

    def __init__(self, chunk: Chunk, directions: Directions) -> None:
        self.chunk = chunk
        self.factors: dict[int, Factors] = {}
        self._stacks: dict[int, Tensor] = {}
        for part in chunk.parts:
            shards = directions(part.parameters)
            if not self._stacks:
                self._stacks = {
                    number: shards[0].new_empty(shape, dtype=dtype)
                    for number, (shape, dtype) in enumerate(zip(chunk.shapes, chunk.dtypes, strict=True))
                }
            rows = {number: stack.unbind() for number, stack in self._stacks.items()}
            pairs = [
                (rows[each.bucket][row], shards[i])
                for each in part.pieces
                for row, i in zip(each.rows, each.at, strict=True)
            ]
            torch._foreach_copy_([row for row, _ in pairs], [shard for _, shard in pairs])

    def run(self, number: int) -> Generator[None, None, Factors]:
        """Start a bucket, which takes its stack over."""
        job = self.chunk.jobs[number]
        return SCHEMES[job.bucket.scheme](job, self._stacks.pop(number))

    def parts(self, scaled: bool) -> Iterator[tuple[tuple[int, ...], list[Tensor]]]:
        """Parts with factors times scales, in the dtypes of the updates: contiguous, for multi-tensor operations."""
        for number, part in enumerate(self.chunk.parts, 1):
            found: dict[int, Tensor] = {}
            for piece in part.pieces:
                found |= zip(piece.at, _taken(self.factors[piece.bucket], piece, scaled), strict=True)
            if number == len(self.chunk.parts):
                self.factors.clear()
            yield part.parameters, [found[i] for i in range(len(found))]
            del found


def _taken(factors: Factors, piece: Piece, scaled: bool) -> list[Tensor]:
    """The factors of a piece, in memory of their own."""
    dtype = widest(piece.dtypes)
    of_rows = factors if len(piece.rows) == len(factors) else [factors[i] for i in piece.rows]
    out = factors[0].new_empty(len(piece.rows), *factors[0].shape, dtype=dtype)
    results = list(out.unbind())
    if isinstance(of_rows, Tensor):
        out.copy_(of_rows)
    else:
        torch._foreach_copy_(results, of_rows)
    if scaled and len(set(piece.scales)) > 1:
        torch._foreach_mul_(results, piece.scales)
    elif scaled and piece.scales[0] != 1:
        out.mul_(piece.scales[0])
    return [x if x.dtype == own else x.to(own) for x, own in zip(results, piece.dtypes, strict=True)]


def widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that holds what is in any of these."""
    found, *others = set(dtypes)
    for each in others:
        found = torch.promote_types(found, each)
    return found
