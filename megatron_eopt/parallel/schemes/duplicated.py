"""One all-gather of all pieces of a bucket; every rank computes everything and keeps its pieces."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.exchange import all_gather
from megatron_eopt.parallel.plan import Bucket, Matrix
from megatron_eopt.parallel.schemes.scale import Scale
from megatron_eopt.parallel.schemes.stacks import assemble, cut_out, orthogonalized


def run(
    bucket: Bucket,
    matrices: Sequence[Matrix],
    shards: Sequence[Tensor],
    group: ProcessGroup | None,
    settings: NewtonSchulz,
    scale: Scale,
) -> Generator[None, None, list[Tensor]]:
    """``duplicated``: pieces may be any; smaller ones are padded. See :data:`~megatron_eopt.parallel.schemes.Run`."""
    assert group is not None
    shape, pieces = matrices[0].shape, matrices[0].pieces
    counts = [len(shards) * piece.numel for piece in pieces]
    own = torch.cat([shard.reshape(-1) for shard in shards])
    pending = all_gather(torch.nn.functional.pad(own, (0, max(counts) - own.numel())), group)
    yield
    parts = [part[:count] for part, count in zip(pending.wait(), counts, strict=True)]
    factors = orthogonalized(assemble(parts, pieces, shape), settings, scale(*shape))
    # copies: a view would keep the whole matrix
    return [cut_out(factor, pieces[group.rank()]).clone(memory_format=torch.contiguous_format) for factor in factors]
