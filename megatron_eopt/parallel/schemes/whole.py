"""The schemes in which a rank has whole matrices: as they are, gathered by all ranks, or gathered by one of them."""

from collections.abc import Callable, Generator, Iterator, Sequence
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
        scales: of each matrix, what its orthogonal factor is multiplied by.
    """

    bucket: Bucket
    matrix: Matrix
    group: ProcessGroup | None
    iteration: Iteration
    scales: Sequence[float]

    @property
    def ranks(self) -> ProcessGroup:
        """The group, where something is exchanged."""
        assert self.group is not None, "the engine checks that a bucket which exchanges has a group"
        return self.group


Run = Callable[[Job, list[Tensor]], Generator[None, None, list[Tensor]]]
"""``(job, shards)``, with this rank's shard of each matrix of the bucket.

A shard is 2-D, of the shape that its matrix says, and may be empty; the shards of a bucket are of one dtype. The
generator starts an exchange, yields, and takes the result when it is resumed; equally often on every rank. It returns
the shards of the orthogonal factors, of the dtype of the shards, times their scales. Shards are not written to. A zero
matrix gives zeros; one with an entry that is not finite gives no numbers on any rank, and the others of the bucket are
not affected.
"""


def local(job: Job, shards: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """``local``, where shards are whole matrices, and ``blockwise``, where each is taken for one: see :data:`Run`."""
    yield  # the next bucket starts its exchange before this one is computed
    # those of tall matrices come transposed, and multi-tensor operations are slow where strides differ
    return [factor.contiguous() for factor in orthogonalized(shards, job.iteration, job.scales)]


def duplicated(job: Job, shards: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """``duplicated``: shards may be any; smaller ones are padded. See :data:`Run`."""
    own = job.matrix.rectangles[job.ranks.rank()]
    pending = gather([torch.stack(shards)], [job.matrix], job.ranks)
    yield
    (stack,) = pending()
    factors = orthogonalized(stack, job.iteration, job.scales)
    # copies: a view would keep the whole matrix
    return [cut_out(factor, own).clone(memory_format=torch.contiguous_format) for factor in factors]


def owner(job: Job, shards: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """``owner``: shards may be any, cut along both dimensions too. See :data:`Run`."""
    group, rectangles = job.ranks, job.matrix.rectangles
    rectangle = rectangles[group.rank()]
    of_rank = [[i for i, rank in enumerate(job.bucket.compute_ranks) if rank == each] for each in range(group.size())]
    own = of_rank[group.rank()]

    sent = [[shards[i] for i in indices] for indices in of_rank]
    pending = all_to_all(sent, [len(own) * each.numel for each in rectangles], group)
    yield
    factors = orthogonalized(assemble(pending.wait(), job.matrix), job.iteration, [job.scales[i] for i in own])
    # an empty tensor tells the dtype where there is nothing to send
    back = [[shards[0].new_empty(0), *(cut_out(factor, each) for factor in factors)] for each in rectangles]
    pending = all_to_all(back, [len(indices) * rectangle.numel for indices in of_rank], group)
    del factors, back
    yield
    results = list(shards)
    for indices, part in zip(of_rank, pending.wait(), strict=True):
        for i, entries in zip(indices, part.view(len(indices), *rectangle.shape), strict=True):
            results[i] = entries
    return results


def share(job: Job, shards: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """``share``: computes before it first waits, while the results of the bucket before it are on their way."""
    group = job.ranks
    of_rank = of_ranks(job.bucket.compute_ranks, group.size())
    own = of_rank[group.rank()]
    # as many matrices from every rank: the last one of some may stay empty
    sent = shards[0].new_zeros(max(map(len, of_rank)), *job.matrix.shape)
    factors = orthogonalized([shards[i] for i in own], job.iteration, [job.scales[i] for i in own])
    for entries, factor in zip(sent, factors, strict=False):
        entries.copy_(factor)
    pending = all_gather(sent, group)
    del sent, factors
    yield
    results = list(shards)
    for indices, part in zip(of_rank, pending.wait(), strict=True):
        for i, result in zip(indices, part, strict=False):
            results[i] = result
    return results


def orthogonalized(matrices: Sequence[Tensor] | Tensor, iteration: Iteration, scales: Sequence[float]) -> list[Tensor]:
    """The orthogonal factors of equal matrices times their scales, computed as stacks as far as that is faster.

    There may be no matrices, or empty ones; the iteration is for matrices of their shape.
    """
    size = 1 if iteration.one_by_one else iteration.chunk
    results: list[Tensor] = []
    for start in range(0, len(matrices), size):
        part, of_part = matrices[start : start + size], scales[start : start + size]
        if len(part) == 1:
            results.append(iteration.run(part[0]).mul_(of_part[0]))
            continue
        factors = iteration.run(part if isinstance(part, Tensor) else torch.stack(list(part)))
        if len(set(of_part)) == 1:
            results += factors.mul_(of_part[0]).unbind()
        else:
            each = list(factors.unbind())
            torch._foreach_mul_(each, list(of_part))
            results += each
    return results


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


def bring(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], numbers: Sequence[Sequence[int]], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start to bring matrices together, each on one rank of a group, by one all-to-all: see ``Engine.gather_whole``."""
    sent = list(zip(*(stack.split(list(of)) for stack, of in zip(stacks, numbers, strict=True)), strict=True))
    pairs = [(of[group.rank()], matrix) for of, matrix in zip(numbers, matrices, strict=True)]
    sizes = [[count * matrix.rectangles[rank].numel for count, matrix in pairs] for rank in range(group.size())]
    wait = _exchange(sent, sizes, group)
    return lambda: [assemble(parts, matrix) for parts, matrix in zip(wait(), matrices, strict=True)]


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
    pending = all_to_all(sent, [sum(each) for each in sizes], group)
    return lambda: zip(*(part.split(list(each)) for part, each in zip(pending.wait(), sizes, strict=True)), strict=True)


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
