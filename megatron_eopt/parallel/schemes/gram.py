"""The schemes that sum Gram matrices over the ranks: the Gram form, and the standard form in every step.

The shards are cut along one dimension, for the Gram form the long side. The ranks exchange matrices of the side that is
not cut.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.forms import gram_factor, iterate_standard, nonzero, normalized
from megatron_eopt.orthogonalize.newton_schulz import Iteration
from megatron_eopt.orthogonalize.products import Products, square_work
from megatron_eopt.parallel.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from megatron_eopt.parallel.records import cut_dimension, in_rounds
from megatron_eopt.parallel.schemes.whole import Job

_Factors = Callable[[Tensor, int], None]
_Exchange = Callable[[Tensor, _Factors, int], Generator[None, None, Tensor]]


def distributed(job: Job, shards: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """``distributed``: the standard form. See :data:`~megatron_eopt.parallel.schemes.whole.Run`.

    It waits in every step, so other buckets' exchanges run beside it, but none of its own.

    Raises:
        ValueError: for shards that are not cut along one dimension.
    """
    group, iteration = job.ranks, job.iteration
    dim = cut_dimension(job.matrix.shape, job.matrix.rectangles)
    if dim is None:
        raise ValueError(f"distributed takes shards that are cut along one dimension, got {job.matrix.rectangles}")
    yield  # the next bucket starts its exchange before this one is computed
    stack = torch.stack(shards)
    X = stack.mT if dim == 0 else stack  # the columns are cut, so Gram matrices of the rows add up
    if X.numel() == 0:  # this rank takes part in the sums with a column of zeros
        X = X.new_zeros(*X.shape[:-1], 1)
    X, _, _ = normalized(X, lambda squared: all_reduce(squared, group).wait())
    X = X.to(iteration.dtype)
    with iteration.in_precision():
        X = iterate_standard(X, iteration.schedule, iteration.products, lambda gram: all_reduce(gram, group).wait())
    if stack.numel() == 0:
        return list(torch.empty_like(stack).unbind())
    X = X.mT if dim == 0 else X
    return _scaled(X.to(stack.dtype).contiguous(), job.scales)


def replicated(job: Job, shards: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """``gram_replicated``: sums go to all ranks, each of which computes all factors ``Q``.

    See :data:`~megatron_eopt.parallel.schemes.whole.Run`, and :func:`_run` for what is raised.
    """

    def exchange(grams: Tensor, factors: _Factors, segment: int) -> Generator[None, None, Tensor]:
        pending = all_reduce(grams, job.ranks)
        yield
        Q = pending.wait()
        factors(Q, segment)
        return Q

    return (yield from _run(job, shards, exchange))


def split(job: Job, shards: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """``gram_split``: each sum goes to the compute rank of its matrix, which computes ``Q`` and hands it out.

    In full rounds every rank has an equal part of one buffer; the rest would be padded to that, and goes one by one.
    See :data:`~megatron_eopt.parallel.schemes.whole.Run`, and :func:`_run` for what is raised.
    """
    group, compute_ranks = job.ranks, job.bucket.compute_ranks
    full, rest = in_rounds(compute_ranks, group.size())

    def exchange(grams: Tensor, factors: _Factors, segment: int) -> Generator[None, None, Tensor]:
        rounds = [reduce_scatter(torch.stack([grams[i] for i in full]), group)] if full else []
        sums = [reduce(grams[i], compute_ranks[i], group) for i in rest]
        yield
        for number, pending in enumerate(rounds):
            own = pending.wait()
            factors(own, segment)
            rounds[number] = all_gather(own, group)
        handed_out = []
        for i, pending_sum in zip(rest, sums, strict=True):
            gram = pending_sum.wait()
            if gram is None:
                gram = grams[i]
            else:
                factors(gram[None], segment)
            handed_out.append(broadcast(gram, compute_ranks[i], group))
        yield
        for pending in rounds:
            for i, Q in zip(full, pending.wait().flatten(0, 1), strict=True):
                grams[i].copy_(Q)
        for i, pending in zip(rest, handed_out, strict=True):
            grams[i].copy_(pending.wait())
        return grams

    return (yield from _run(job, shards, exchange))


def _run(job: Job, shards: list[Tensor], exchange: _Exchange) -> Generator[None, None, list[Tensor]]:
    """The iteration, as :func:`~megatron_eopt.orthogonalize.forms.iterate_gram` has it in one process.

    Raises:
        ValueError: for shards that are not cut along the long side.
    """
    matrix, iteration = job.matrix, job.iteration
    dim = cut_dimension(matrix.shape, matrix.rectangles)
    if dim is None or matrix.shape[dim] < matrix.shape[1 - dim]:
        raise ValueError(
            f"gram takes shards of {matrix.shape} that are cut along the long side, got {matrix.rectangles}"
        )
    assert iteration.restarts is not None, "an iteration in the Gram form has restarts"
    stack = torch.stack(shards)
    X = LocalGram(stack, transposed=dim == 0, dtype=iteration.dtype)
    segments = _Segments(iteration, iteration.restarts, X.unit)
    del stack
    for segment in range(len(iteration.restarts) + 1):
        with iteration.in_precision():
            grams = X.gram(iteration.products)
        Q = yield from exchange(grams, segments.factors, segment)
        del grams
        with iteration.in_precision():
            X.apply(Q)
    return _scaled(X.result(), job.scales)


def _scaled(stack: Tensor, scales: Sequence[float]) -> list[Tensor]:
    """The matrices of a stack times their scales, in place."""
    each = list(stack.unbind())
    torch._foreach_mul_(each, list(scales))
    return each


@dataclass(frozen=True)
class _Segments:
    """The short side between two restarts: summed Gram matrices in, factors ``Q`` out."""

    iteration: Iteration
    restarts: Sequence[int]
    unit: float

    def factors(self, grams: Tensor, segment: int) -> None:
        """Replace Gram matrices (n x rows x rows), in fp32 or fp64, by the factors ``Q`` of a segment, in place.

        Those of the first segment are of matrices of any norm, which is divided out; the trace is the square of it.
        Where it is not finite, all of ``Q`` becomes so.
        """
        iteration = self.iteration
        starts, ends = (0, *self.restarts), (*self.restarts, len(iteration.schedule))
        schedule = iteration.schedule[starts[segment] : ends[segment]]
        schedule = tuple((a, b / self.unit**2, c / self.unit**4) for a, b, c in schedule)
        if segment == 0:
            squared = grams.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            squared = nonzero(squared.masked_fill(~squared.isfinite(), torch.nan))
            grams.div_(squared).mul_(self.unit**2)
        with iteration.in_precision():
            for chunk in grams.split(iteration.chunk):
                R = chunk.to(iteration.dtype)
                chunk.copy_(gram_factor(R, schedule, iteration.products, square_work(R, 3)))
        if segment == 0:
            grams.mul_(squared.rsqrt())


_LARGEST_SQUARE = 14
"""No entry of a first Gram matrix of one rank exceeds 2^14, a quarter of fp16's range."""

_LARGEST_SHIFT = 100


class LocalGram:
    """Shards of a stack of matrices, of any norm at first, of norm ``unit`` (all ranks' together) from then on.

    Squares of small entries vanish, and those of large ones overflow, in fp16 very soon. So each shard is multiplied by
    a power of two of its own, which is exact and is undone in fp32 on its Gram matrix. The norm of the whole may lie
    between 1e-15 and 1e18.

    Attributes:
        dtype: of the iteration, fp16 or wider.
        unit: 128 in fp16, as :func:`~megatron_eopt.orthogonalize.forms.iterate_gram_fp16` has it and for its reasons,
            and 1 otherwise.
    """

    def __init__(self, stack: Tensor, *, transposed: bool, dtype: torch.dtype) -> None:
        """Take a stack of shards.

        Args:
            stack: (n x rows x cols); columns may be missing.
            transposed: whether the columns are the side whose Gram matrix is taken, the one that is not cut.
            dtype: of the iteration.
        """
        self.dtype = dtype
        self.unit = 128.0 if dtype == torch.float16 else 1.0
        self._transposed = transposed
        self._dtype_of_pieces = stack.dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        shift = self._shift(stack)
        self._X = (stack.to(self._wide) * _power_of_two(shift, self._wide)).to(dtype)
        self._undo: Tensor | None = _power_of_two(-shift, self._wide)

    @property
    def oriented(self) -> Tensor:
        """The shards with the side first that is not cut: (n x rows x cols) or its transposes, a view."""
        return self._X.mT if self._transposed else self._X

    def gram(self, products: Products) -> Tensor:
        """Gram matrices of the shards, a new stack in fp32 (fp64 for such shards); to be summed over the ranks."""
        gram = products.gram(self.oriented).to(self._wide)
        return gram if self._undo is None else gram.mul_(self._undo).mul_(self._undo)

    def apply(self, Q: Tensor) -> None:
        """Multiply by symmetric factors (n x rows x rows); the first ones also divide the norm out."""
        if self._undo is not None:
            Q = Q * self._undo * self.unit
            self._undo = None
        Q = Q.to(self.dtype)
        self._X = torch.bmm(self._X, Q) if self._transposed else torch.bmm(Q, self._X)

    def result(self) -> Tensor:
        """The stack of the shards as they are now, in their own dtype, of matrices of norm 1."""
        X = self._X if self.unit == 1 else self._X.float().div_(self.unit)
        return X.to(self._dtype_of_pieces)

    def _shift(self, stack: Tensor) -> Tensor:
        """Exponents (n x 1 x 1) of the powers of two; 0 for a shard that is empty, zero or not finite."""
        if stack.numel() == 0:
            return torch.zeros(stack.size(0), 1, 1, dtype=torch.int32, device=stack.device)
        largest = torch.maximum(stack.amax((-2, -1), keepdim=True), -stack.amin((-2, -1), keepdim=True)).float()
        largest = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        # an entry of the Gram matrix is at most the number of columns times the largest square
        columns = stack.size(-2 if self._transposed else -1)
        room = (_LARGEST_SQUARE - math.ceil(math.log2(columns))) // 2
        return (room - torch.frexp(largest).exponent).clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """``2^exponent`` for int32 exponents of normal fp32 numbers, exactly: powers need not be rounded so."""
    return ((exponent + 127) << 23).view(torch.float32).to(dtype)
