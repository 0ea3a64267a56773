"""The schemes in which a rank has whole matrices."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.forms import Iteration
from megatron_eopt.parallel.collectives import all_gather
from megatron_eopt.parallel.exchange import (
    Factors,
    LayoutRuns,
    OwnerExchange,
    Shapes,
    assemble,
    by_run,
    cut_out,
    cut_up,
    gather,
    shards_of,
)
from megatron_eopt.parallel.plan_records import Bucket, Matrix


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

    @property
    def ranks(self) -> ProcessGroup:
        """The group, where something is exchanged."""
        assert self.group is not None, "the engine checks that a bucket which exchanges has a group"
        return self.group

    @cached_property
    def owners(self) -> OwnerExchange:
        """The exchange of ``owner``."""
        return OwnerExchange(self.runs, self.matrix, self.ranks)


SchemeFunction = Callable[[Job, Tensor], Generator[None, None, Factors]]
"""``(job, stack)``, with this rank's shards of the bucket's matrices, of :data:`Shapes`, which may be empty.

The generator starts an exchange, yields, and takes the result when it is resumed; equally often on every rank. It
returns the shards of the orthogonal factors, in ``Iteration.factor_dtype``, which has as many bytes as the stack's, and
is exchanged, too. The stack is contiguous, and the generator writes to it and frees it. For ``owner`` and ``share`` its
matrices, and those of the result, are in the order of their compute ranks. A zero matrix gives zeros; one with an entry
that is not finite gives NaN on all ranks, without effect on the others."""


def local(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``local``, and ``blockwise``, which takes shards for whole matrices."""
    yield  # the next bucket starts its exchange before this one is computed
    if not job.bucket.compute_ranks:
        return orthogonalized(stack, job)
    # others have the rest: what is here lies back to back
    factors = orthogonalized(stack.view(-1, *job.matrix.shape), job)
    return shards_of(factors.reshape(-1), job.shapes)


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
    owners = job.owners
    pending = owners.send(stack.view(-1))
    del stack
    yield
    (whole,) = assemble(pending.wait(), [owners.arriving], short_first=True)
    factors = orthogonalized(whole, job)
    del whole
    back = cut_up(by_run(factors, owners.here), owners.here)
    del factors
    pending = owners.send_back(back)
    del back
    yield
    return shards_of(pending.wait(), job.shapes)


def share(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``share``: computes before it waits, while earlier results travel."""
    group = job.ranks
    dtype = job.iteration.factor_dtype(stack.dtype)
    counts = [job.bucket.compute_ranks.count(rank) for rank in range(group.size())]
    first = sum(counts[: group.rank()])
    count = counts[group.rank()]
    # as many matrices from every rank: the last one of some may stay empty
    sent = stack.new_zeros(max(counts), *job.matrix.shape)
    mine = sent[:count].copy_(stack[first : first + count])
    del stack
    orthogonalized(mine, job)
    pending = all_gather(sent.view(dtype), group)
    del sent, mine
    yield
    factors_of_all = list[Tensor]()
    for of_rank, count in zip(pending.wait(), counts, strict=True):
        factors_of_all += of_rank[:count].unbind()
    return factors_of_all


def orthogonalized(stack: Tensor, job: Job) -> Tensor:
    """Orthogonal factors of a stack, perhaps empty, in its memory."""
    iteration = job.iteration
    factors = stack.view(iteration.factor_dtype(stack.dtype))
    if iteration.one_by_one:
        # a matrix alone, where stacks are not worked on as such, takes another kernel than a stack of one
        parts = zip(stack.unbind(), factors.unbind(), strict=True)
    else:
        parts = zip(stack.split(iteration.chunk), factors.split(iteration.chunk), strict=True)
    for part, of_part in parts:
        iteration.run(part, of_part)
    return factors
