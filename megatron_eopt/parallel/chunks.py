"""How a step runs: chunk by chunk as the workspace has room, several buckets at work at a time."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from megatron_eopt.parallel.records import Bucket, Matrix, Plan, Rectangle
from megatron_eopt.parallel.schemes import SCHEMES
from megatron_eopt.parallel.schemes.whole import Alike, Factors, Job, Shapes, shards_of
from megatron_eopt.parallel.watched import Watched
from megatron_eopt.parallel.workspace import IN_FLIGHT

Directions = Callable[[Sequence[int]], list[Tensor]]
"""Of some parameters this rank's shards of what is orthogonalized; they are not written to."""


@dataclass(frozen=True)
class Piece:
    """The matrices that a bucket and a part of a chunk have in common."""

    bucket: int  # among those of the chunk
    rows: list[int]  # of its stack, ascending
    at: list[int]  # among the shards of the part
    shapes: Shapes  # of the factors
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


@torch.no_grad()
def execute(
    chunks: Sequence[Chunk], directions: Directions, room: int, scaled: bool, watched: Watched | None = None
) -> Iterator[tuple[tuple[int, ...], list[Tensor]]]:
    """Yield the parts of chunks with the factors of their matrices, in the order in which these are there.

    The order in which buckets are resumed, and with it that of the collectives, follows from the plan alone, so it is
    the same on every rank: in each round the next bucket starts, and then those at work go on, the youngest first. A
    chunk starts with its first bucket, if there is ``room``, in bytes, beside those that are at work. A step that is
    ``watched`` does the same.
    """
    advance: Callable[[Generator[None, None, Factors]], None] = next
    if watched is not None:
        advance = watched.timed("exchange", advance)
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
                at_work.insert(0, (started, number, started.run(number, watched)))
        still, done = [], []
        for started, number, running in at_work:
            try:
                advance(running)
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
                made = [_empty(shards[0], job.shapes, each) for job, each in zip(chunk.jobs, chunk.dtypes, strict=True)]
                self._stacks = dict(enumerate(made))
            rows = {n: _rows(stack, chunk.jobs[n].shapes) for n, stack in self._stacks.items()}
            places = [(each.bucket, *place) for each in part.pieces for place in zip(each.rows, each.at, strict=True)]
            pairs = [(rows[bucket][row], shards[i]) for bucket, row, i in places]
            torch._foreach_copy_([row for row, _ in pairs], [shard for _, shard in pairs])

    def run(self, number: int, watched: Watched | None) -> Generator[None, None, Factors]:
        """Start a bucket, which takes its stack over."""
        job = self.chunk.jobs[number]
        if watched is not None:
            job = replace(job, watched=watched)
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
    out = _empty(factors[0], piece.shapes, dtype)
    results = _rows(out, piece.shapes)
    if isinstance(of_rows, Tensor):
        out.copy_(of_rows)
    else:
        torch._foreach_copy_(results, of_rows)
    if scaled and len(set(piece.scales)) > 1:
        torch._foreach_mul_(results, piece.scales)
    elif scaled and piece.scales[0] != 1:
        out.mul_(piece.scales[0])
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
