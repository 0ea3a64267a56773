"""The Gram form on pieces that are cut along the long side: the ranks exchange matrices of the short side only."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.forms import gram_factor, nonzero
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import fp32_products
from megatron_eopt.orthogonalize.products import Products, square_work
from megatron_eopt.parallel.exchange import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from megatron_eopt.parallel.owners import in_rounds
from megatron_eopt.parallel.pieces import cut_dimension
from megatron_eopt.parallel.plan import Bucket, Matrix
from megatron_eopt.parallel.schemes.local_gram import LocalGram
from megatron_eopt.parallel.schemes.scale import Scale

_Factors = Callable[[Tensor, int], None]
_Exchange = Callable[[Tensor, _Factors, int], Generator[None, None, Tensor]]


def run_replicated(
    bucket: Bucket,
    matrices: Sequence[Matrix],
    shards: Sequence[Tensor],
    group: ProcessGroup | None,
    settings: NewtonSchulz,
    scale: Scale,
) -> Generator[None, None, list[Tensor]]:
    """``gram_replicated``: sums go to all ranks, each of which computes all factors ``Q``.

    See :data:`~megatron_eopt.parallel.schemes.Run`, and :func:`_run` for what is raised.
    """
    assert group is not None

    def exchange(grams: Tensor, factors: _Factors, segment: int) -> Generator[None, None, Tensor]:
        pending = all_reduce(grams, group)
        yield
        Q = pending.wait()
        factors(Q, segment)
        return Q

    return (yield from _run(matrices[0], shards, settings, scale, exchange))


def run_split(
    bucket: Bucket,
    matrices: Sequence[Matrix],
    shards: Sequence[Tensor],
    group: ProcessGroup | None,
    settings: NewtonSchulz,
    scale: Scale,
) -> Generator[None, None, list[Tensor]]:
    """``gram_split``: each sum goes to the owner of its matrix, who computes ``Q`` and hands it out.

    In full rounds every rank has an equal part of one buffer; the rest would be padded to that, and goes one by one.
    See :data:`~megatron_eopt.parallel.schemes.Run`, and :func:`_run` for what is raised.
    """
    assert group is not None
    owners = bucket.owners
    full, rest = in_rounds(owners, group.size())

    def exchange(grams: Tensor, factors: _Factors, segment: int) -> Generator[None, None, Tensor]:
        rounds = [reduce_scatter(torch.stack([grams[index] for index in full]), group)] if full else []
        sums = [reduce(grams[index], owners[index], group) for index in rest]
        yield
        for place, pending in enumerate(rounds):
            own = pending.wait()
            factors(own, segment)
            rounds[place] = all_gather(own, group)
        handed_out = []
        for index, pending_sum in zip(rest, sums, strict=True):
            gram = pending_sum.wait()
            if gram is None:
                gram = grams[index]
            else:
                factors(gram[None], segment)
            handed_out.append(broadcast(gram, owners[index], group))
        yield
        for pending in rounds:
            for index, Q in zip(full, pending.wait().flatten(0, 1), strict=True):
                grams[index].copy_(Q)
        for index, pending in zip(rest, handed_out, strict=True):
            grams[index].copy_(pending.wait())
        return grams

    return (yield from _run(matrices[0], shards, settings, scale, exchange))


def _run(
    matrix: Matrix, shards: Sequence[Tensor], settings: NewtonSchulz, scale: Scale, exchange: _Exchange
) -> Generator[None, None, list[Tensor]]:
    """The iteration, as :func:`~megatron_eopt.orthogonalize.forms.iterate_gram` has it in one process.

    Raises:
        ValueError: for pieces that are not cut along the long side, and a schedule without a table of restarts.
    """
    dim = cut_dimension(matrix.shape, matrix.pieces)
    if dim is None or matrix.shape[dim] < matrix.shape[1 - dim]:
        raise ValueError(f"gram takes pieces of {matrix.shape} that are cut along the long side, got {matrix.pieces}")
    if settings.restarts is None:
        raise ValueError(
            f"no table has restarts of {settings.coefficient_type!r} in {settings.steps} steps, without which the Gram "
            "form is not safe: take owner, duplicated or distributed"
        )
    stack = torch.stack(list(shards))
    X = LocalGram(stack, transposed=dim == 0, dtype=settings.gram_dtype(stack.dtype, stack.device))
    products = settings.products_for(stack.device, X.dtype)
    segments = _Segments(settings, settings.restarts, products, X.dtype, X.unit)
    del stack
    for segment in range(len(settings.restarts) + 1):
        with fp32_products(settings.fp32_matmul_prec):
            grams = X.gram(products)
        Q = yield from exchange(grams, segments.factors, segment)
        del grams
        with fp32_products(settings.fp32_matmul_prec):
            X.apply(Q)
    return X.results(scale(*matrix.shape))


@dataclass(frozen=True)
class _Segments:
    """The short side between two restarts: summed Gram matrices in, factors ``Q`` out."""

    settings: NewtonSchulz
    restarts: Sequence[int]
    products: Products
    dtype: torch.dtype
    unit: float

    def factors(self, grams: Tensor, segment: int) -> None:
        """Replace Gram matrices (n x rows x rows), in fp32 or fp64, by the factors ``Q`` of a segment, in place.

        Those of the first segment are of matrices of any norm, which is divided out; the trace is the square of it.
        Where it is not finite, all of ``Q`` becomes so.
        """
        starts, ends = (0, *self.restarts), (*self.restarts, len(self.settings.schedule))
        schedule = self.settings.schedule[starts[segment] : ends[segment]]
        schedule = tuple((a, b / self.unit**2, c / self.unit**4) for a, b, c in schedule)
        if segment == 0:
            squared = grams.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            squared = nonzero(squared.masked_fill(~squared.isfinite(), torch.nan))
            grams.div_(squared).mul_(self.unit**2)
        rows = grams.size(-1)
        size = max(1, self.settings.max_bytes // max(1, 4 * rows * rows * self.dtype.itemsize))
        with fp32_products(self.settings.fp32_matmul_prec):
            for part in grams.split(size):
                R = part.to(self.dtype)
                part.copy_(gram_factor(R, schedule, self.products, square_work(R, 3)))
        if segment == 0:
            grams.mul_(squared.rsqrt())
