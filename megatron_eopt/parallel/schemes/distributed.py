"""The standard form on the pieces: every step sums the Gram matrices of the bucket over the ranks."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.forms import iterate_standard, normalized
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import fp32_products, product_dtype
from megatron_eopt.parallel.exchange import all_reduce
from megatron_eopt.parallel.pieces import cut_dimension
from megatron_eopt.parallel.plan import Bucket, Matrix
from megatron_eopt.parallel.schemes.scale import Scale


def run(
    bucket: Bucket,
    matrices: Sequence[Matrix],
    shards: Sequence[Tensor],
    group: ProcessGroup | None,
    settings: NewtonSchulz,
    scale: Scale,
) -> Generator[None, None, list[Tensor]]:
    """``distributed``: pieces are cut along one dimension. See :data:`~megatron_eopt.parallel.schemes.Run`.

    It waits in every step, so other buckets' exchanges run beside it, but none of its own.

    Raises:
        ValueError: for pieces that are cut otherwise.
    """
    assert group is not None
    dim = cut_dimension(matrices[0].shape, matrices[0].pieces)
    if dim is None:
        raise ValueError(f"distributed takes pieces that are cut along one dimension, got {matrices[0].pieces}")
    yield  # the next bucket starts its exchange before this one is computed
    stack = torch.stack(list(shards))
    X = stack.mT if dim == 0 else stack  # the columns are cut, so Gram matrices of the rows add up
    if X.numel() == 0:  # this rank takes part in the sums with a column of zeros
        X = X.new_zeros(*X.shape[:-1], 1)
    X, _, _ = normalized(X, lambda squared: all_reduce(squared, group).wait())
    X = X.to(product_dtype(stack.dtype, settings.fp32_matmul_prec))
    products = settings.products_for(X.device, X.dtype)
    with fp32_products(settings.fp32_matmul_prec):
        X = iterate_standard(X, settings.schedule, products, lambda gram: all_reduce(gram, group).wait())
    if stack.numel() == 0:
        return list(torch.empty_like(stack).unbind())
    X = X.mT if dim == 0 else X
    return list(X.to(stack.dtype).contiguous().mul_(scale(*matrices[0].shape)).unbind())
