"""The schemes in which a rank has whole matrices."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import mul

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.forms import Watch
from megatron_eopt.orthogonalize.newton_schulz import Iteration
from megatron_eopt.parallel.collectives import Pending, all_gather, exchange
from megatron_eopt.parallel.records import Bucket, Matrix, Rectangle, Shape, cut_dimension, strips
from megatron_eopt.parallel.watched import Watched

Shapes = tuple[int, int, int] | list[Shape]  # (n x rows x cols), or of matrices that lie back to back

LayoutRuns = Sequence[tuple[int, Matrix]]  # equal layouts in order: (how many, the first)


@dataclass(frozen=True, eq=False)
class Job:
    """A bucket at work."""

    bucket: Bucket
    matrix: Matrix  # one of the bucket, which have its shape, and, but under owner, its shards
    group: ProcessGroup | None  # the ranks; None where nothing is exchanged
    iteration: Iteration  # for matrices of the shape that is orthogonalized, in the form that the scheme has
    shapes: Shapes  # of this rank's shards
    dtype: torch.dtype  # in which they are exchanged
    layout_runs: Sequence[LayoutRuns] = ()  # the matrices of each compute rank, in the order of the stack
    first: bool = True  # whether this rank reports what nobody shares
    watched: Watched | None = None  # the step, where somebody watches it

    def phase(self) -> AbstractContextManager[None]:
        """A context whose time is that of orthogonalization."""
        return nullcontext() if self.watched is None else self.watched.phase("orthogonalize")

    def watch(self) -> Watch | None:
        """What watches the iteration, on the one rank that reports a matrix."""
        if self.group is None:
            counts = self.first
        else:
            counts = bool(self.bucket.compute_ranks) or self.group.rank() == 0
        return self.watched.grams(self.iteration) if self.watched is not None and counts else None

    @property
    def runs_here(self) -> LayoutRuns:
        """The matrices that this rank computes."""
        return self.layout_runs[self.ranks.rank()] or [(0, self.matrix)]

    @cached_property
    def sizes(self) -> list[int]:
        """Entries of this rank's shards of the matrices of each rank."""
        here = self.ranks.rank()
        return [sum(count * matrix.rectangles[here].numel for count, matrix in runs) for runs in self.layout_runs]

    @property
    def ranks(self) -> ProcessGroup:
        """The group, where something is exchanged."""
        assert self.group is not None, "the engine checks that a bucket which exchanges has a group"
        return self.group


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
    group = job.ranks
    here = job.runs_here
    sizes = job.sizes
    copy = job.matrix.copy_of(group.rank())
    pending = _to_copy(stack.view(-1), sizes, here, copy, group)
    del stack
    yield
    (whole,) = assemble(pending.wait(), [of_copy(here, copy)], short_first=True)
    factors = orthogonalized(whole, job)
    del whole
    back = cut_up(_stacks(factors, here), here)
    del factors
    pending = exchange(back, entries_of(here), sizes, group)
    del back
    yield
    return shards_of(pending.wait(), job.shapes)


def _to_copy(flat: Tensor, sizes: Sequence[int], runs: LayoutRuns, copy: slice, group: ProcessGroup) -> Pending[Tensor]:
    """Send shards to the compute ranks of this rank's copy, which has all of each matrix."""

    def within(of_all: Sequence[int]) -> list[int]:
        return [size if copy.start <= rank < copy.stop else 0 for rank, size in enumerate(of_all)]

    sent = flat[sum(sizes[: copy.start]) : sum(sizes[: copy.stop])]
    return exchange(sent, within(sizes), within(entries_of(runs)), group)


def shards_of(flat: Tensor, shapes: Shapes) -> Factors:
    """Matrices back to back; a stack if their shapes agree."""
    if isinstance(shapes, tuple):
        return flat.view(shapes)
    return [x.view(shape) for x, shape in zip(flat.split([rows * cols for rows, cols in shapes]), shapes, strict=True)]


def share(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``share``: computes before it waits, while earlier results travel."""
    group = job.ranks
    counts = [job.bucket.compute_ranks.count(rank) for rank in range(job.ranks.size())]
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
    return [x for stack, count in zip(pending.wait(), counts, strict=True) for x in stack[:count].unbind()]


def orthogonalized(stack: Tensor, job: Job) -> Tensor:
    """Orthogonal factors of a stack, perhaps empty, in its memory."""
    iteration = job.iteration
    watch = job.watch()

    def run(x: Tensor) -> Tensor:
        with job.phase():
            return iteration.run(x, watch, own=True)

    if not iteration.one_by_one and len(stack) <= iteration.chunk:
        return run(stack)
    # a matrix alone, where stacks are not worked on as such, takes another kernel than a stack of one
    for part in stack.unbind() if iteration.one_by_one else stack.split(iteration.chunk):
        part.copy_(run(part))
    return stack


def gather(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], group: ProcessGroup, short_first: bool = False
) -> Callable[[], list[Tensor]]:
    """Start to gather matrices on every rank, by all-gather.

    A stack has this rank's shards (n x rows x cols) of ``n`` matrices like that of ``matrices``. The result waits.
    """
    runs = [(len(stack), matrix) for stack, matrix in zip(stacks, matrices, strict=True)]
    flat = stacks[0].reshape(-1) if len(stacks) == 1 else torch.cat([stack.reshape(-1) for stack in stacks])
    missing = max(entries_of(runs)) - flat.numel()
    pending = all_gather(torch.nn.functional.pad(flat, (0, missing)) if missing else flat, group)
    return lambda: assemble(pending.wait(), [[run] for run in runs], short_first)


def bring(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], numbers: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start to bring each matrix to one rank, by all-to-all."""
    rank = group.rank()
    copy = matrices[0].copy_of(group.rank())
    runs = [(of[rank], matrix) for of, matrix in zip(numbers, matrices, strict=True)]
    pending = _to_copy(_by_rank(stacks, numbers), _sizes(numbers, matrices, rank), runs, copy, group)
    return lambda: assemble(pending.wait(), [[run] for run in of_copy(runs, copy)])


def hand_out(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], numbers: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start the way back from :func:`bring`, to stacks of shards."""
    rank = group.rank()
    runs = [(of[rank], matrix) for of, matrix in zip(numbers, matrices, strict=True)]
    shapes = [(sum(of), *matrix.rectangles[rank].shape) for of, matrix in zip(numbers, matrices, strict=True)]
    pending = exchange(cut_up(stacks, runs), entries_of(runs), _sizes(numbers, matrices, rank), group)
    return lambda: _of_stacks(pending.wait(), numbers, shapes)


def _sizes(numbers: Sequence[Sequence[int]], matrices: Sequence[Matrix], rank: int) -> list[int]:
    """Entries of a rank's shards of the matrices of each rank."""
    entries = [matrix.rectangles[rank].numel for matrix in matrices]
    return [sum(map(mul, of_rank, entries)) for of_rank in zip(*numbers, strict=True)]


def _by_rank(stacks: Sequence[Tensor], numbers: Sequence[Sequence[int]]) -> Tensor:
    """Stacks as one tensor, rank by rank."""
    if len(stacks) == 1:
        return stacks[0].reshape(-1)
    parts = [x.split(list(of)) for x, of in zip(stacks, numbers, strict=True)]
    return torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank])


def _of_stacks(flat: Tensor, numbers: Sequence[Sequence[int]], shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """The inverse of :func:`_by_rank`."""
    if len(shapes) == 1:
        return [flat.view(shapes[0])]
    sizes = []
    for of_rank in zip(*numbers, strict=True):
        sizes += [count * rows * cols for count, (_, rows, cols) in zip(of_rank, shapes, strict=True)]
    parts = flat.split(sizes)
    return [torch.cat(parts[i :: len(shapes)]).view(shape) for i, shape in enumerate(shapes)]


def of_copy(runs: LayoutRuns, copy: slice) -> LayoutRuns:
    """The runs as the ranks of one copy hold them."""
    if len(runs[0][1].rectangles[copy]) == runs[0][1].ranks:
        return runs
    return [(count, replace(matrix, rectangles=matrix.rectangles[copy])) for count, matrix in runs]


def entries_of(runs: LayoutRuns) -> list[int]:
    """Entries of each rank's shards."""
    found: list[int] = []
    for strip in strips(_cuts(runs)):
        held = sum(count * rectangle.numel for (count, _), rectangle in zip(runs, strip.rectangles, strict=True))
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
        shape = group[0][1].shape
        transposed = short_first and shape[0] > shape[1]
        by_rows = [count for count, _ in runs] == [1] and cut_dimension(shape, runs[0][1].rectangles) == 0
        if by_rows and not transposed and received.numel() == prod(shape):  # no row is padded
            return [received.view(1, *shape)]
        stack = received.new_empty(sum(count for count, _ in group), *(shape[::-1] if transposed else shape))
        stacks.append(stack.mT if transposed else stack)
        of_runs += _stacks(stacks[-1], group)
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
        sizes = [count * r.numel // strip.ranks for (count, _), r in zip(runs, strip.rectangles, strict=True)]
        size = sum(sizes)
        rows = flat[rank:, :size] if flat.ndim == 2 else flat[start:][: size * strip.ranks].view(strip.ranks, size)
        parts = rows[: strip.ranks].split(sizes, dim=1)
        for part, stack, dim, rectangle in zip(parts, stacks, strip.dims, strip.rectangles, strict=True):
            if part.numel():  # the ranks as the first dimension of both
                place = cut_out(stack, rectangle).unflatten(dim + 1, (strip.ranks, -1)).movedim(dim + 1, 0)
                yield part.view(place.shape), place
        rank = rank + strip.ranks
        start = start + size * strip.ranks


def _cuts(runs: LayoutRuns) -> tuple[tuple[Rectangle, ...], ...]:
    return tuple(matrix.rectangles for _, matrix in runs)


def _stacks(stack: Tensor, runs: LayoutRuns) -> Sequence[Tensor]:
    return stack.split([count for count, _ in runs]) if len(runs) > 1 else [stack]


def cut_out(x: Tensor, rectangle: Rectangle) -> Tensor:
    """The view of a shard of matrices, perhaps stacked."""
    return x[..., rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]
