"""Nothing is exchanged: whole matrices on one rank, and pieces taken for matrices of their own."""

from collections.abc import Generator, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.plan import Bucket, Matrix
from megatron_eopt.parallel.schemes.scale import Scale
from megatron_eopt.parallel.schemes.stacks import orthogonalized


def run(
    bucket: Bucket,
    matrices: Sequence[Matrix],
    shards: Sequence[Tensor],
    group: ProcessGroup | None,
    settings: NewtonSchulz,
    scale: Scale,
) -> Generator[None, None, list[Tensor]]:
    """``local``: the shards are the whole matrices. See :data:`~megatron_eopt.parallel.schemes.Run`."""
    yield  # the next bucket starts its exchange before this one is computed
    return _contiguous(orthogonalized(shards, settings, scale(*matrices[0].shape)))


def run_blockwise(
    bucket: Bucket,
    matrices: Sequence[Matrix],
    shards: Sequence[Tensor],
    group: ProcessGroup | None,
    settings: NewtonSchulz,
    scale: Scale,
) -> Generator[None, None, list[Tensor]]:
    """``blockwise``: each piece is orthogonalized and scaled by itself. See the same place."""
    yield  # as above
    rows, cols = shards[0].shape
    # the scale of a piece without entries may divide by zero
    return _contiguous(orthogonalized(shards, settings, scale(rows, cols) if rows and cols else 1.0))


def _contiguous(factors: Sequence[Tensor]) -> list[Tensor]:
    """Those of tall matrices come transposed, and multi-tensor operations are slow where strides differ."""
    return [factor.contiguous() for factor in factors]
