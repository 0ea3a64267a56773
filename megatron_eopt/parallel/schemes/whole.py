"""The schemes in which a rank has whole matrices."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import Iteration
from megatron_eopt.parallel.collectives import all_gather, exchange, packed
from megatron_eopt.parallel.records import Bucket, Matrix, Rectangle, Shape, cut_dimension
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

    @property
    def counts(self) -> bool:
        """Whether this rank reports its matrices, which one rank does."""
        return self.first if self.group is None else bool(self.bucket.compute_ranks) or self.group.rank() == 0

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
    group, here, ranks = job.ranks, job.layout_runs[job.ranks.rank()] or [(0, job.matrix)], range(job.ranks.size())
    copy = job.matrix.copy_of(group.rank())  # to whose compute ranks this rank's shards go
    sizes = [sum(count * matrix.rectangles[group.rank()].numel for count, matrix in runs) for runs in job.layout_runs]
    arriving = [[count * (rank in ranks[copy]) * m.rectangles[rank].numel for count, m in here] for rank in ranks]
    sent = stack.view(-1)[sum(sizes[: copy.start]) : sum(sizes[: copy.stop])]
    near = [size * (rank in ranks[copy]) for rank, size in enumerate(sizes)]
    pending = exchange(sent, near, [sum(counts) for counts in arriving], group)
    del stack, sent
    yield
    received, runs = pending.wait(), of_copy(here, copy)
    whole = assemble((by_copy[copy] for by_copy in _of_each(received, arriving)), runs, True, received)
    del received
    factors = orthogonalized(whole, job)
    del whole
    pairs = [(x, matrix.rectangles) for x, (_, matrix) in zip(_stacks(factors, here), here, strict=True)]
    back, of_each = packed([[cut_out(x, cuts[rank]) for x, cuts in pairs if cuts[rank].numel] for rank in ranks])
    del factors, pairs
    pending = exchange(back, of_each, sizes, group)
    del back
    yield
    return shards_of(pending.wait(), job.shapes)


def shards_of(flat: Tensor, shapes: Shapes) -> Factors:
    """Matrices back to back; a stack if their shapes agree."""
    if isinstance(shapes, tuple):
        return flat.view(shapes)
    return [x.view(shape) for x, shape in zip(flat.split([rows * cols for rows, cols in shapes]), shapes, strict=True)]


def share(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``share``: computes before it waits, while earlier results travel."""
    group, counts = job.ranks, [job.bucket.compute_ranks.count(rank) for rank in range(job.ranks.size())]
    first, count = sum(counts[: group.rank()]), counts[group.rank()]
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
    iteration, run = job.iteration, job.iteration.run
    if job.watched is not None:
        run = job.watched.run(iteration, job.counts)
    if not iteration.one_by_one and len(stack) <= iteration.chunk:
        return run(stack, own=True)
    # a matrix alone, where stacks are not worked on as such, takes another kernel than a stack of one
    for part in stack.unbind() if iteration.one_by_one else stack.split(iteration.chunk):
        part.copy_(run(part, own=True))
    return stack


def gather(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], group: ProcessGroup, short_first: bool = False
) -> Callable[[], list[Tensor]]:
    """Start to gather matrices on every rank, by all-gather.

    A stack has this rank's shards (n x rows x cols) of ``n`` matrices like that of ``matrices``. The result waits.
    """
    pairs, ranks = list(zip(stacks, matrices, strict=True)), range(group.size())
    counts = [[len(stack) * matrix.rectangles[rank].numel for stack, matrix in pairs] for rank in ranks]
    flat = stacks[0].reshape(-1) if len(stacks) == 1 else torch.cat([stack.reshape(-1) for stack in stacks])
    missing, numbers = max(sum(of_rank) for of_rank in counts) - flat.numel(), [len(stack) for stack in stacks]
    pending = all_gather(torch.nn.functional.pad(flat, (0, missing)) if missing else flat, group)

    def finish() -> list[Tensor]:
        received = pending.wait()
        rows = [row[: sum(sizes)].split(sizes) for row, sizes in zip(received, counts, strict=True)]
        whole = zip(zip(*rows, strict=True), numbers, matrices, strict=True)
        return [assemble([of_ranks], [(number, matrix)], short_first, received) for of_ranks, number, matrix in whole]

    return finish


def bring(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], numbers: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start to bring each matrix to one rank, by all-to-all."""
    ranks, copy = range(group.size()), matrices[0].copy_of(group.rank())
    here = ranks[copy]
    parts = zip(*(stack.split(list(of)) for stack, of in zip(stacks, numbers, strict=True)), strict=True)
    sent = [[x if rank in here else x[:0] for x in to] for rank, to in enumerate(parts)]
    pairs = [(of[group.rank()], matrix) for of, matrix in zip(numbers, matrices, strict=True)]
    sizes = [[count * (rank in here) * matrix.rectangles[rank].numel for count, matrix in pairs] for rank in ranks]
    wait = _exchange(sent, sizes, group)
    mine = of_copy(pairs, copy)
    return lambda: [assemble([parts[copy]], [matrix]) for parts, matrix in zip(wait(), mine, strict=True)]


def hand_out(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], numbers: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start the way back from :func:`bring`, to stacks of shards."""
    shards = [matrix.rectangles[group.rank()] for matrix in matrices]
    sent, sizes = [], []
    for rank in range(group.size()):
        sent.append([cut_out(x, matrix.rectangles[rank]) for x, matrix in zip(stacks, matrices, strict=True)])
        sizes.append([of[rank] * shard.numel for of, shard in zip(numbers, shards, strict=True)])
    wait = _exchange(sent, sizes, group)
    return lambda: [
        torch.cat(parts).view(sum(of), *shard.shape) for parts, of, shard in zip(wait(), numbers, shards, strict=True)
    ]


def _exchange(
    sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], Iterator[tuple[Tensor, ...]]]:
    pending = exchange(*packed(sent), [sum(of_rank) for of_rank in sizes], group)
    return lambda: _of_each(pending.wait(), sizes)


def _of_each(received: Tensor, sizes: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, ...]]:
    """For each stack, its parts from all ranks."""
    flat = [size for of_rank in sizes for size in of_rank]
    return zip(*batched(received.split(flat), len(sizes[0])), strict=True)


def of_copy(runs: LayoutRuns, copy: slice) -> LayoutRuns:
    """The runs as the ranks of one copy hold them."""
    if len(runs[0][1].rectangles[copy]) == runs[0][1].ranks:
        return runs
    return [(count, replace(matrix, rectangles=matrix.rectangles[copy])) for count, matrix in runs]


def assemble(
    parts: Iterable[Sequence[Tensor]], runs: LayoutRuns, short_first: bool = False, received: Tensor | None = None
) -> Tensor:
    """Whole matrices from ranks' parts; ``short_first`` stores tall ones transposed.

    The memory in which the parts ``received`` lie, in order, is that of the result if it is the matrix already.
    """
    shape, rectangles = runs[0][1].shape, runs[0][1].rectangles
    transposed = short_first and shape[0] > shape[1]
    alone = received is not None and received.numel() == shape[0] * shape[1] and not transposed
    if received is not None and alone and cut_dimension(shape, rectangles) == 0:
        return received.view(1, *shape)
    parts = list(parts)
    stack = parts[0][0].new_empty(sum(count for count, _ in runs), *(shape[::-1] if transposed else shape))
    stack = stack.mT if transposed else stack
    for of_ranks, x, (count, matrix) in zip(parts, _stacks(stack, runs), runs, strict=True):
        for part, rectangle in zip(of_ranks, matrix.rectangles, strict=True):
            if rectangle.numel:
                cut_out(x, rectangle).copy_(part.view(count, *rectangle.shape))
    return stack


def _stacks(stack: Tensor, runs: LayoutRuns) -> Sequence[Tensor]:
    return stack.split([count for count, _ in runs]) if len(runs) > 1 else [stack]


def cut_out(x: Tensor, rectangle: Rectangle) -> Tensor:
    """The view of a shard of matrices, perhaps stacked."""
    return x[..., rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]
