"""The schemes in which a rank has whole matrices: as they are, gathered by all ranks, or gathered by one of them."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import Iteration
from megatron_eopt.parallel.collectives import all_gather, all_to_all
from megatron_eopt.parallel.records import Bucket, Matrix, Rectangle, of_ranks


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
stack is contiguous, and its memory is the generator's own, to be written to and given back early. A zero matrix gives
zeros; one with an entry that is not finite gives no numbers on any rank, and the others of the bucket are not affected.
"""


def local(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``local``, where shards are whole matrices, and ``blockwise``, where each is taken for one: see :data:`Run`."""
    yield  # the next bucket starts its exchange before this one is computed
    return orthogonalized(stack, job.iteration)


def duplicated(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``duplicated``: shards may be any; smaller ones are padded. See :data:`Run`."""
    pending = gather([stack], [job.matrix], job.ranks)
    del stack
    yield
    (whole,) = pending()
    return cut_out(orthogonalized(whole, job.iteration), job.matrix.rectangles[job.ranks.rank()])


def owner(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``owner``: shards may be any, cut along both dimensions too. See :data:`Run`."""
    group, rectangles = job.ranks, job.matrix.rectangles
    rectangle = rectangles[group.rank()]
    of_rank = [[i for i, rank in enumerate(job.bucket.compute_ranks) if rank == each] for each in range(group.size())]
    count = len(of_rank[group.rank()])

    shards = stack.unbind()
    pending = all_to_all(
        [[shards[i] for i in indices] for indices in of_rank], [count * each.numel for each in rectangles], group
    )
    del stack, shards
    yield
    factors = orthogonalized(assemble(pending.wait(), job.matrix), job.iteration)
    back = [[cut_out(factors, each)] for each in rectangles]
    del factors
    pending = all_to_all(back, [len(indices) * rectangle.numel for indices in of_rank], group)
    del back
    yield
    parts = [
        part.view(len(indices), *rectangle.shape).unbind()
        for indices, part in zip(of_rank, pending.wait(), strict=True)
    ]
    by_index = {i: x for indices, each in zip(of_rank, parts, strict=True) for i, x in zip(indices, each, strict=True)}
    return [by_index[i] for i in range(len(by_index))]


def share(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``share``: computes before it first waits, while the results of the bucket before it are on their way."""
    group = job.ranks
    of_rank = of_ranks(job.bucket.compute_ranks, group.size())
    own, matrices = of_rank[group.rank()], stack.unbind()
    # as many matrices from every rank: the last one of some may stay empty
    sent = stack.new_zeros(max(map(len, of_rank)), *job.matrix.shape)
    if own:
        torch._foreach_copy_(list(sent.unbind())[: len(own)], [matrices[i] for i in own])
        del stack, matrices
        factors = orthogonalized(sent[: len(own)], job.iteration)
        if factors.data_ptr() != sent.data_ptr():
            sent[: len(own)].copy_(factors)
    pending = all_gather(sent, group)
    del sent
    yield
    parts = zip(of_rank, pending.wait().unbind(), strict=True)
    by_index = {i: x for indices, part in parts for i, x in zip(indices, part.unbind(), strict=False)}
    return [by_index[i] for i in range(len(by_index))]


def orthogonalized(stack: Tensor, iteration: Iteration) -> Tensor:
    """The orthogonal factors of a stack of matrices, as many at once as that is faster and there is memory for.

    There may be no matrices, or empty ones; the iteration is for matrices of their shape. The stack is written to.
    """
    if len(stack) == 1:
        return iteration.run(stack[0])[None]
    if not iteration.one_by_one and len(stack) <= iteration.chunk:
        return iteration.run(stack)
    if iteration.one_by_one or iteration.chunk == 1:
        for matrix in stack:
            matrix.copy_(iteration.run(matrix))
    else:
        for part in stack.split(iteration.chunk):
            part.copy_(iteration.run(part))
    return stack


def gather(stacks: Sequence[Tensor], matrices: Sequence[Matrix], group: ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start to gather matrices of which each rank of a group has a shard, by one all-gather, padded where they differ.

    A stack has this rank's shards (n x rows x cols) of ``n`` matrices that lie as the one does that is named for it;
    some may be empty. The result waits, and then gives for each stack the whole matrices, in memory of their own.
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
        return [assemble(of_ranks, matrix) for of_ranks, matrix in zip(zip(*rows, strict=True), matrices, strict=True)]

    return finish


def assemble(parts: Sequence[Tensor], matrix: Matrix) -> Tensor:
    """Whole matrices (n x rows x cols) that all lie alike, of what each rank has of all ``n``, one behind the other."""
    on_ranks = list(zip(parts, matrix.rectangles, strict=True))
    count = next((part.numel() // rectangle.numel for part, rectangle in on_ranks if rectangle.numel), 0)
    stack = parts[0].new_empty(count, *matrix.shape)
    for part, rectangle in on_ranks:
        cut_out(stack, rectangle).copy_(part.view(count, *rectangle.shape))
    return stack


def cut_out(x: Tensor, rectangle: Rectangle) -> Tensor:
    """The view of a shard of a matrix (rows x cols), or of each of a stack."""
    return x[..., rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]
