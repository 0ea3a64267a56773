"""The schemes that sum Gram matrices over the ranks."""

import math
from collections.abc import Callable, Generator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from megatron_eopt.kernels.products import over_norms, scaled, square_work
from megatron_eopt.orthogonalize.forms import (
    UNIT_IN_FP16,
    gram_factor,
    in_units,
    multiplied,
    nonzero,
)
from megatron_eopt.parallel.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from megatron_eopt.parallel.exchange import Factors
from megatron_eopt.parallel.plan_records import in_rounds
from megatron_eopt.parallel.rectangles import cut_dimension
from megatron_eopt.parallel.schemes.whole import Job

_InPlace = Callable[[Tensor], None]
_Exchange = Callable[[Tensor, _InPlace], Generator[None, None, Tensor]]


def distributed(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``distributed``: the standard form; sums norms, then each Gram matrix."""
    group = job.ranks
    iteration = job.iteration
    dim = cut_dimension(job.matrix.shape, job.matrix.rectangles)
    X = stack.mT if dim == 0 else stack  # the columns are cut, so Gram matrices of the rows add up
    if X.numel() == 0:  # this rank takes part in the sums with a column of zeros
        X = X.new_zeros(*X.shape[:-1], 1)
    X, power = scaled(X, iteration.dtype)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=power.dtype)
    pending = all_reduce((norm.double() * power.double()).square(), group)
    yield
    norm = (pending.wait().sqrt() / power.double()).to(power.dtype)
    X = over_norms(X, norm, iteration.dtype)
    gram, factor = square_work(X, 2)
    Y = torch.empty_like(X)
    for a, b, c in iteration.schedule:
        with iteration.in_precision():
            A = iteration.products.gram(X, out=gram)
        pending = all_reduce(A, group)
        yield
        A = pending.wait()
        with iteration.in_precision():
            if c == 0:
                torch.baddbmm(X, A, X, beta=a, alpha=b, out=Y)
            else:
                Z = iteration.products.addmm(A, A, A, beta=b, alpha=c, out=factor)
                torch.baddbmm(X, Z, X, beta=a, out=Y)
        X, Y = Y, X
    if stack.numel() == 0:
        return stack
    return (X.mT if dim == 0 else X).to(stack.dtype)


def replicated(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``gram_replicated``: every rank gets the sums and computes all ``Q``."""

    def exchange(grams: Tensor, factors: _InPlace) -> Generator[None, None, Tensor]:
        pending = all_reduce(grams, job.ranks)
        yield
        Q = pending.wait()
        factors(Q)
        return Q

    return (yield from _run(job, stack, exchange))


def split(job: Job, stack: Tensor) -> Generator[None, None, Factors]:
    """``gram_split``: each sum goes to a compute rank, for ``Q``."""
    group = job.ranks
    compute_ranks = job.bucket.compute_ranks
    full, rest = in_rounds(compute_ranks, group.size())  # the rest would be padded, so it goes one by one

    def exchange(grams: Tensor, factors: _InPlace) -> Generator[None, None, Tensor]:
        rounds = [reduce_scatter(torch.stack([grams[i] for i in full]), group)] if full else []
        sums = [reduce(grams[i], compute_ranks[i], group) for i in rest]
        yield
        for number, pending in enumerate(rounds):
            some = pending.wait()
            factors(some)
            rounds[number] = all_gather(some, group)
        handed_out = []
        for i, pending_sum in zip(rest, sums, strict=True):
            gram = pending_sum.wait()
            if gram is None:
                gram = grams[i]
            else:
                factors(gram[None])
            handed_out.append(broadcast(gram, compute_ranks[i], group))
        yield
        for pending in rounds:
            for i, Q in zip(full, pending.wait().flatten(0, 1), strict=True):
                grams[i].copy_(Q)
        for i, pending in zip(rest, handed_out, strict=True):
            grams[i].copy_(pending.wait())
        return grams

    return (yield from _run(job, stack, exchange))


def _run(job: Job, stack: Tensor, exchange: _Exchange) -> Generator[None, None, Factors]:
    """:func:`~megatron_eopt.orthogonalize.forms.iterate_gram` on shards.

    In fp16 squares soon vanish or overflow, so each shard is multiplied by a power of two of its own: exactly, and
    undone in fp32 on its Gram matrix. Norms may be 1e-15 to 1e18; after the first segment they are ``unit``.
    """
    iteration = job.iteration
    dim = cut_dimension(job.matrix.shape, job.matrix.rectangles)
    assert dim is not None, "a plan has this scheme only for matrices that are cut along the long side"
    assert iteration.restarts is not None, "an iteration in the Gram form has restarts"
    wide = torch.float64 if iteration.dtype == torch.float64 else torch.float32
    unit = UNIT_IN_FP16 if iteration.dtype == torch.float16 else 1.0
    dtype = stack.dtype
    shift = _shift(stack, dim)
    undo = _power_of_two(-shift, wide)
    X = (stack.to(wide) * _power_of_two(shift, wide)).to(iteration.dtype)
    del stack
    for start, end in pairwise((0, *iteration.restarts, len(iteration.schedule))):
        with iteration.in_precision():
            grams = iteration.products.gram(X.mT if dim == 0 else X).to(wide)
        if start == 0:
            grams.mul_(undo).mul_(undo)
        factors = partial(_factors, job=job, start=start, end=end, unit=unit)
        Q = yield from exchange(grams, factors)
        del grams
        if start == 0:
            Q = Q * undo * unit
        Q = Q.to(iteration.dtype)
        with iteration.in_precision():
            pair = (X, Q) if dim == 0 else (Q, X)
            divisor = unit if end == len(iteration.schedule) else 1.0
            X = multiplied(*pair, torch.empty_like(X), divisor)
    return X.to(iteration.factor_dtype(dtype))


def _factors(grams: Tensor, *, job: Job, start: int, end: int, unit: float) -> None:
    """Replace (n x rows x rows) by ``Q``, in place."""
    iteration = job.iteration
    schedule = in_units(iteration.schedule[start:end], unit)
    with iteration.in_precision():
        if start == 0:  # any norm, the root of the trace, is divided out
            squared = grams.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            squared = nonzero(squared.masked_fill(~squared.isfinite(), torch.nan))
            grams.div_(squared).mul_(unit**2)
        for chunk in grams.split(iteration.chunk):
            R = chunk.to(iteration.dtype)
            chunk.copy_(gram_factor(R, schedule, iteration.products, square_work(R, 3)))
        if start == 0:
            grams.mul_(squared.rsqrt())


_LARGEST_SQUARE = 14  # entries of a rank's first Gram matrix are at most 2^14, a quarter of fp16's range

_LARGEST_SHIFT = 100


def _shift(stack: Tensor, dim: int) -> Tensor:
    """Exponents (n x 1 x 1); ``dim`` is cut."""
    if stack.numel() == 0:
        return torch.zeros(stack.size(0), 1, 1, dtype=torch.int32, device=stack.device)
    largest = torch.maximum(stack.amax((-2, -1), keepdim=True), -stack.amin((-2, -1), keepdim=True)).float()
    largest = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    # an entry of the Gram matrix is at most the length of the cut side times the largest square
    room = (_LARGEST_SQUARE - math.ceil(math.log2(stack.size(1 + dim)))) // 2
    return (room - torch.frexp(largest).exponent).clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """``2^exponent`` of int32, exactly: powers need not be rounded so."""
    return ((exponent + 127) << 23).view(torch.float32).to(dtype)
