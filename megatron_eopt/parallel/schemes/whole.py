"""The schemes in which a rank has whole matrices: as they are, gathered by all ranks, or gathered by one of them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import Iteration
from megatron_eopt.parallel.collectives import all_gather, exchange, packed
from megatron_eopt.parallel.records import Bucket, Matrix, Rectangle, copies


@dataclass(frozen=True, eq=False)
class Job:
    """A bucket at work.

    Attributes:
        matrix: one of those of the bucket, all of which have its shape and shards.
        group: the ranks; None where nothing is exchanged.
        iteration: for matrices of the shape that is orthogonalized, in the form that the scheme has.
    """

    bucket: Bucket
    matrix: Matrix
    group: ProcessGroup | None
    iteration: Iteration

    @property
    def ranks(self) -> ProcessGroup:
        """The group, where something is exchanged."""
        assert self.group is not None, "the engine checks that a bucket which exchanges has a group"
        return self.group


Factors = Tensor | list[Tensor]
"""A stack (n x rows x cols), or its matrices; of any strides."""

Run = Callable[[Job, Tensor], Generator[None, None, Factors]]
"""``(job, stack)``, with this rank's shards of the matrices of the bucket, (n x rows x cols), which may be empty.

The generator starts an exchange, yields, and takes the result when it is resumed; equally often on every rank. It
returns the shards of the orthogonal factors. They are exchanged in the dtype of the stack, and come back in it. The
stack is contiguous, and its memory is the generator's own, to be written to and given back early. For ``owner`` and
``share`` its matrices, and those of the result, are in the order of their compute ranks. A zero matrix gives zeros; one
with an entry that is not finite gives no numbers on any rank, and the others of the bucket are not affected.
"""


def local(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``local``, where shards are whole matrices, and ``blockwise``, where each is taken for one: see :data:`Run`."""
    yield  # the next bucket starts its exchange before this one is computed
    return orthogonalized(stack, job.iteration)


def duplicated(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``duplicated``: shards may be any; smaller ones are padded. See :data:`Run`."""
    pending = gather([stack], [job.matrix], job.ranks, short_first=True)
    del stack
    yield
    (whole,) = pending()
    del pending
    return cut_out(orthogonalized(whole, job.iteration), job.matrix.rectangles[job.ranks.rank()])


def owner(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``owner``: shards may be any, cut along both dimensions too. See :data:`Run`."""
    group, rectangles = job.ranks, job.matrix.rectangles
    rectangle, counts = rectangles[group.rank()], [job.bucket.compute_ranks.count(rank) for rank in range(group.size())]
    sizes, count, own = [each * rectangle.numel for each in counts], len(stack), counts[group.rank()]

    arriving = [own * each.numel for each in rectangles]
    pending = exchange(stack.view(-1), sizes, arriving, group)
    del stack
    yield
    factors = orthogonalized(assemble(pending.wait().split(arriving), job.matrix, True), job.iteration)
    back, of_each = packed([[cut_out(factors, each)] for each in rectangles])
    del factors
    pending = exchange(back, of_each, sizes, group)
    del back
    yield
    return pending.wait().view(count, *rectangle.shape)


def share(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``share``: computes before it first waits, while the results of the bucket before it are on their way."""
    group, counts = job.ranks, [job.bucket.compute_ranks.count(rank) for rank in range(job.ranks.size())]
    first, own = sum(counts[: group.rank()]), counts[group.rank()]
    # as many matrices from every rank: the last one of some may stay empty
    sent = stack.new_zeros(max(counts), *job.matrix.shape)
    mine = sent[:own].copy_(stack[first : first + own])
    del stack
    if own:
        factors = orthogonalized(mine, job.iteration)
        if factors is not mine:
            mine.copy_(factors)
        del factors
    pending = all_gather(sent, group)
    del sent, mine
    yield
    return [x for each, count in zip(pending.wait(), counts, strict=True) for x in each[:count].unbind()]


def orthogonalized(stack: Tensor, iteration: Iteration) -> Tensor:
    """The orthogonal factors of a stack of matrices, as many at once as that is faster and there is memory for.

    There may be no matrices, or empty ones; the iteration is for matrices of their shape. The stack is written to.
    """
    if not iteration.one_by_one and len(stack) <= iteration.chunk:
        return iteration.run(stack, own=True)
    # a matrix alone, where stacks are not worked on as such, takes another kernel than a stack of one
    for part in stack.unbind() if iteration.one_by_one else stack.split(iteration.chunk):
        part.copy_(iteration.run(part, own=True))
    return stack


def gather(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], group: ProcessGroup, short_first: bool = False
) -> Callable[[], list[Tensor]]:
    """Start to gather matrices of which each rank of a group has a shard, by one all-gather, padded where they differ.

    A stack has this rank's shards (n x rows x cols) of ``n`` matrices that lie as the one does that is named for it;
    some may be empty. The result waits, and then gives for each stack the whole matrices, in memory of their own: see
    :func:`assemble`.
    """
    counts = [
        [len(stack) * matrix.rectangles[rank].numel for stack, matrix in zip(stacks, matrices, strict=True)]
        for rank in range(group.size())
    ]
    own = stacks[0].reshape(-1) if len(stacks) == 1 else torch.cat([stack.reshape(-1) for stack in stacks])
    missing = max(sum(of_rank) for of_rank in counts) - own.numel()
    pending = all_gather(torch.nn.functional.pad(own, (0, missing)) if missing else own, group)

    def finish() -> list[Tensor]:
        rows = [row[: sum(each)].split(each) for row, each in zip(pending.wait(), counts, strict=True)]
        whole = zip(zip(*rows, strict=True), matrices, strict=True)
        return [assemble(of_ranks, matrix, short_first) for of_ranks, matrix in whole]

    return finish


def bring(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], numbers: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start to bring matrices together, each on one rank of a group, by one all-to-all: see ``Engine.gather_whole``.

    Where the group holds several copies of a matrix, one behind the other, a rank gets the shards of the copy that it
    has a part of.
    """
    ranks = range(group.size())
    size = len(ranks) // copies(matrices[0].shape, matrices[0].rectangles)  # ranks that hold a copy
    first = group.rank() // size * size
    here = ranks[first : first + size]
    parts = zip(*(stack.split(list(of)) for stack, of in zip(stacks, numbers, strict=True)), strict=True)
    sent = [[x if rank in here else x[:0] for x in to] for rank, to in enumerate(parts)]
    pairs = [(of[group.rank()], matrix) for of, matrix in zip(numbers, matrices, strict=True)]
    sizes = [[count * (rank in here) * matrix.rectangles[rank].numel for count, matrix in pairs] for rank in ranks]
    wait = _exchange(sent, sizes, group)
    copy = slice(here.start, here.stop)
    own = [replace(matrix, rectangles=matrix.rectangles[copy]) for matrix in matrices]
    return lambda: [assemble(parts[copy], matrix) for parts, matrix in zip(wait(), own, strict=True)]


def hand_out(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], numbers: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start the way back from :func:`bring`, by one all-to-all: the result has stacks of this rank's shards."""
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
    """Start an all-to-all of stacks, of which each rank sends so many entries; the result has the parts of each."""
    pending = exchange(*packed(sent), [sum(each) for each in sizes], group)
    flat = [size for of_rank in sizes for size in of_rank]
    return lambda: zip(*batched(pending.wait().split(flat), len(sizes[0])), strict=True)


def assemble(parts: Sequence[Tensor], matrix: Matrix, short_first: bool = False) -> Tensor:
    """Whole matrices (n x rows x cols) that all lie alike, of what each rank has of all ``n``, one behind the other.

    With ``short_first`` tall ones are transposed in memory, as an iteration works on them.
    """
    on_ranks = list(zip(parts, matrix.rectangles, strict=True))
    count = next((part.numel() // rectangle.numel for part, rectangle in on_ranks if rectangle.numel), 0)
    transposed = short_first and matrix.shape[0] > matrix.shape[1]
    stack = parts[0].new_empty(count, *(matrix.shape[::-1] if transposed else matrix.shape))
    stack = stack.mT if transposed else stack
    for part, rectangle in on_ranks:
        cut_out(stack, rectangle).copy_(part.view(count, *rectangle.shape))
    return stack


def cut_out(x: Tensor, rectangle: Rectangle) -> Tensor:
    """The view of a shard of a matrix (rows x cols), or of each of a stack."""
    return x[..., rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]
