"""The schemes in which a rank has whole matrices."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.forms import Iteration, Watch
from megatron_eopt.parallel.collectives import Pending, all_gather, exchange
from megatron_eopt.parallel.records import Bucket, Matrix, Rectangle, Shape, cut_dimension, strips
from megatron_eopt.parallel.watched import Watched

Shapes = tuple[int, int, int] | list[Shape]  # (n x rows x cols), or of matrices that lie back to back

LayoutRuns = Sequence[tuple[int, Matrix]]  # equal layouts in order: (how many, the first)


class Dealt:
    """Which matrices each rank of a group computes, and the ways there and back.

    Of several copies of a matrix the shards of one come, and those of all go.

    Attributes:
        here: the matrices that this rank computes.
        arriving: the same, as the ranks of one copy hold them.
    """

    def __init__(self, runs: Sequence[LayoutRuns], matrix: Matrix, group: ProcessGroup) -> None:
        rank = group.rank()
        self.here = self.arriving = runs[rank] or [(0, matrix)]
        self._copy = matrix.copy_of(rank)
        self._group = group
        if matrix.copies > 1:
            self.arriving = [(count, replace(x, rectangles=x.rectangles[self._copy])) for count, x in self.here]
        self._sent = []  # entries of this rank's shards of the matrices of each rank
        for of_rank in runs:
            self._sent.append(sum(count * x.rectangles[rank].numel for count, x in of_rank))
        self._received = entries_of(self.here)

    def send(self, flat: Tensor) -> Pending[Tensor]:
        """Send shards, rank by rank, to the compute ranks of this rank's copy, which has all of each matrix."""
        first = sum(self._sent[: self._copy.start])
        end = sum(self._sent[: self._copy.stop])
        return exchange(flat[first:end], self._near(self._sent), self._near(self._received), self._group)

    def send_back(self, flat: Tensor) -> Pending[Tensor]:
        """Send what :func:`cut_up` made of matrices here; shards arrive as they were sent."""
        return exchange(flat, self._received, self._sent, self._group)

    def _near(self, sizes: Sequence[int]) -> list[int]:
        near = range(self._copy.start, self._copy.stop)
        return [size if rank in near else 0 for rank, size in enumerate(sizes)]


@dataclass(frozen=True, eq=False)
class Job:
    """A bucket at work."""

    bucket: Bucket
    matrix: Matrix  # one of the bucket, which have its shape, and, but under owner, its shards
    group: ProcessGroup | None  # the ranks; None where nothing is exchanged
    iteration: Iteration  # for matrices of the shape that is orthogonalized, in the form that the scheme has
    shapes: Shapes  # of this rank's shards
    dtype: torch.dtype  # in which they are exchanged
    runs: Sequence[LayoutRuns] = ()  # the matrices of each compute rank, in the order of the stack
    first: bool = True  # whether this rank reports what nobody shares
    watched: Watched | None = None  # the step, where somebody watches it

    def phase(self) -> AbstractContextManager[None]:
        """A context whose time is that of orthogonalization."""
        return nullcontext() if self.watched is None else self.watched.phase("orthogonalize")

    def watch(self) -> Watch | None:
        """What watches the iteration, on the one rank that reports a matrix."""
        if self.watched is None:
            return None
        counts = self.first
        if self.group is not None:
            counts = bool(self.bucket.compute_ranks) or self.group.rank() == 0
        return self.watched.grams(self.iteration) if counts else None

    @property
    def ranks(self) -> ProcessGroup:
        """The group, where something is exchanged."""
        assert self.group is not None, "the engine checks that a bucket which exchanges has a group"
        return self.group

    @cached_property
    def dealt(self) -> Dealt:
        """The exchange of ``owner``."""
        return Dealt(self.runs, self.matrix, self.ranks)


Factors = Tensor | list[Tensor]  # a stack (n x rows x cols), or its matrices; of any strides

Run = Callable[[Job, Tensor], Generator[None, None, Factors]]
"""``(job, stack)``, with this rank's shards of the bucket's matrices, of :data:`Shapes`, which may be empty.

The generator starts an exchange, yields, and takes the result when it is resumed; equally often on every rank. It
returns the shards of the orthogonal factors, in the dtype of the stack, in which they are exchanged. The stack is
contiguous, and the generator writes to it and frees it. For ``owner`` and ``share`` its matrices, and those of the
result, are in the order of their compute ranks. A zero matrix gives zeros; one with an entry that is not finite gives
NaN on all ranks, without effect on the others."""


def local(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``local``, and ``blockwise``, which takes shards for whole matrices."""
    yield  # the next bucket starts its exchange before this one is computed
    return orthogonalized(stack, job)


def duplicated(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``duplicated``: any shards; smaller ones are padded."""
    pending = gather([stack], [job.matrix], job.ranks, short_first=True)
    del stack
    yield
    (whole,) = pending()
    del pending
    return cut_out(orthogonalized(whole, job), job.matrix.rectangles[job.ranks.rank()])


def owner(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``owner``: any shards, cut along both dimensions or in copies."""
    dealt = job.dealt
    pending = dealt.send(stack.view(-1))
    del stack
    yield
    (whole,) = assemble(pending.wait(), [dealt.arriving], short_first=True)
    factors = orthogonalized(whole, job)
    del whole
    back = cut_up(_stacks(factors, dealt.here), dealt.here)
    del factors
    pending = dealt.send_back(back)
    del back
    yield
    return shards_of(pending.wait(), job.shapes)


def shards_of(flat: Tensor, shapes: Shapes) -> Factors:
    """Matrices back to back; a stack if their shapes agree."""
    if isinstance(shapes, tuple):
        return flat.view(shapes)
    parts = flat.split([rows * cols for rows, cols in shapes])
    return [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]


def share(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``share``: computes before it waits, while earlier results travel."""
    group = job.ranks
    counts = [job.bucket.compute_ranks.count(rank) for rank in range(group.size())]
    first = sum(counts[: group.rank()])
    count = counts[group.rank()]
    # as many matrices from every rank: the last one of some may stay empty
    sent = stack.new_zeros(max(counts), *job.matrix.shape)
    mine = sent[:count].copy_(stack[first : first + count])
    del stack
    if count:
        factors = orthogonalized(mine, job)
        if factors is not mine:
            mine.copy_(factors)
        del factors
    pending = all_gather(sent, group)
    del sent, mine
    yield
    factors_of_all = list[Tensor]()
    for of_rank, count in zip(pending.wait(), counts, strict=True):
        factors_of_all += of_rank[:count].unbind()
    return factors_of_all


def orthogonalized(stack: Tensor, job: Job) -> Tensor:
    """Orthogonal factors of a stack, perhaps empty, in its memory."""
    iteration = job.iteration
    watch = job.watch()
    with job.phase():
        if iteration.one_by_one:
            # a matrix alone, where stacks are not worked on as such, takes another kernel than a stack of one
            parts = stack.unbind()
        elif len(stack) > iteration.chunk:
            parts = stack.split(iteration.chunk)
        else:
            return iteration.run(stack, watch, own=True)
        for part in parts:
            part.copy_(iteration.run(part, watch, own=True))
    return stack


Exchanged = Callable[[], list[Tensor]]
"""Waits for an exchange that is under way, and returns its stacks."""


def gather(
    stacks: Sequence[Tensor],
    matrices: Sequence[Matrix],
    group: ProcessGroup,
    short_first: bool = False,
) -> Exchanged:
    """Start to gather matrices on every rank, by all-gather.

    A stack has this rank's shards (n x rows x cols) of ``n`` matrices like that of ``matrices``.
    """
    runs = [(len(stack), matrix) for stack, matrix in zip(stacks, matrices, strict=True)]
    flat = stacks[0].reshape(-1)
    if len(stacks) > 1:
        flat = torch.cat([stack.reshape(-1) for stack in stacks])
    missing = max(entries_of(runs)) - flat.numel()
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    pending = all_gather(flat, group)
    return lambda: assemble(pending.wait(), [[run] for run in runs], short_first)


@dataclass(frozen=True)
class Spread:
    """How equal matrices are spread over a group."""

    matrix: Matrix  # one of them, with entries, cut or held in copies
    numbers: Sequence[int]  # how many each rank works on, in order; empty where each rank works on all


def bring(stacks: Sequence[Tensor], spread: Sequence[Spread], group: ProcessGroup) -> Exchanged:
    """Start to bring matrices where they are worked on, from stacks of shards."""
    if not spread[0].numbers:
        return gather(stacks, [kind.matrix for kind in spread], group)
    dealt = _dealt(spread, group)
    pending = dealt.send(_by_rank(stacks, spread))
    return lambda: assemble(pending.wait(), [[run] for run in dealt.arriving])


def hand_out(stacks: Sequence[Tensor], spread: Sequence[Spread], group: ProcessGroup) -> Exchanged:
    """Start the way back from :func:`bring`, to stacks of shards."""
    own = [kind.matrix.rectangles[group.rank()] for kind in spread]
    if not spread[0].numbers:
        return lambda: [cut_out(x, rectangle) for x, rectangle in zip(stacks, own, strict=True)]
    shapes = [(sum(kind.numbers), *rectangle.shape) for kind, rectangle in zip(spread, own, strict=True)]
    dealt = _dealt(spread, group)
    pending = dealt.send_back(cut_up(stacks, dealt.here))
    return lambda: _of_stacks(pending.wait(), spread, shapes)


def _dealt(spread: Sequence[Spread], group: ProcessGroup) -> Dealt:
    runs = [[(kind.numbers[rank], kind.matrix) for kind in spread] for rank in range(group.size())]
    return Dealt(runs, spread[0].matrix, group)


def _by_rank(stacks: Sequence[Tensor], spread: Sequence[Spread]) -> Tensor:
    """Stacks as one tensor, rank by rank."""
    if len(stacks) == 1:
        return stacks[0].reshape(-1)
    parts = [x.split(list(kind.numbers)) for x, kind in zip(stacks, spread, strict=True)]
    flat = list[Tensor]()
    for of_rank in zip(*parts, strict=True):
        flat += [part.reshape(-1) for part in of_rank]
    return torch.cat(flat)


def _of_stacks(flat: Tensor, spread: Sequence[Spread], shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """The inverse of :func:`_by_rank`."""
    if len(shapes) == 1:
        return [flat.view(shapes[0])]
    sizes = []
    for rank in range(len(spread[0].numbers)):
        for kind, (_, rows, cols) in zip(spread, shapes, strict=True):
            sizes.append(kind.numbers[rank] * rows * cols)
    parts = flat.split(sizes)
    return [torch.cat(parts[i :: len(shapes)]).view(shape) for i, shape in enumerate(shapes)]


def entries_of(runs: LayoutRuns) -> list[int]:
    """Entries of each rank's shards."""
    found: list[int] = []
    for strip in strips(_cuts(runs)):
        held = 0
        for (count, _), rectangle in zip(runs, strip.rectangles, strict=True):
            held += count * rectangle.numel
        found += [held // strip.ranks] * strip.ranks
    return found


def assemble(received: Tensor, groups: Sequence[LayoutRuns], short_first: bool = False) -> list[Tensor]:
    """A stack of whole matrices of each group, whose shape is the same, from all ranks' parts.

    Args:
        received: parts of all groups, rank by rank; 1-D, or with a row for each rank, which may be padded. It is the
            result if it is the matrix already.
        groups: layouts of the matrices.
        short_first: store tall matrices transposed.
    """
    runs = [run for group in groups for run in group]
    stacks = list[Tensor]()
    of_runs = list[Tensor]()
    for group in groups:
        _, matrix = group[0]
        rows, cols = matrix.shape
        transposed = short_first and rows > cols
        count = sum(count for count, _ in group)
        is_alone = count == len(runs) == 1 and received.numel() == rows * cols  # no row is padded
        if is_alone and not transposed and cut_dimension(matrix.shape, matrix.rectangles) == 0:
            return [received.view(1, rows, cols)]
        stack = received.new_empty(count, cols, rows).mT if transposed else received.new_empty(count, rows, cols)
        stacks.append(stack)
        of_runs += _stacks(stack, group)
    for part, place in _pairs(received, of_runs, runs):
        place.copy_(part)
    return stacks


def cut_up(stacks: Sequence[Tensor], runs: LayoutRuns) -> Tensor:
    """All ranks' parts of stacks of whole matrices, rank by rank."""
    flat = stacks[0].new_empty(sum(entries_of(runs)))
    for part, place in _pairs(flat, stacks, runs):
        part.copy_(place)
    return flat


def _pairs(flat: Tensor, stacks: Sequence[Tensor], runs: LayoutRuns) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of what several ranks have of a stack, in ``flat`` and in the stack."""
    rank = 0
    start = 0
    for strip in strips(_cuts(runs)):
        sizes = []
        for (count, _), rectangle in zip(runs, strip.rectangles, strict=True):
            sizes.append(count * rectangle.numel // strip.ranks)
        size = sum(sizes)
        if flat.ndim == 2:
            rows = flat[rank : rank + strip.ranks, :size]
        else:
            rows = flat[start : start + size * strip.ranks].view(strip.ranks, size)
        parts = rows.split(sizes, dim=1)
        for part, stack, dim, rectangle in zip(parts, stacks, strip.dims, strip.rectangles, strict=True):
            if part.numel():  # the ranks as the first dimension of both
                place = cut_out(stack, rectangle).unflatten(dim + 1, (strip.ranks, -1)).movedim(dim + 1, 0)
                yield part.view(place.shape), place
        rank += strip.ranks
        start += size * strip.ranks


def _cuts(runs: LayoutRuns) -> tuple[tuple[Rectangle, ...], ...]:
    return tuple(matrix.rectangles for _, matrix in runs)


def _stacks(stack: Tensor, runs: LayoutRuns) -> Sequence[Tensor]:
    return stack.split([count for count, _ in runs]) if len(runs) > 1 else [stack]


def cut_out(x: Tensor, rectangle: Rectangle) -> Tensor:
    """The view of a shard of matrices, perhaps stacked."""
    return x[..., rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]
