"""One all-to-all brings each matrix together on one rank, which orthogonalizes it, one takes the pieces back."""

from collections.abc import Generator, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.exchange import all_to_all
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
    """``owner``: pieces may be any, cut along both dimensions too. See :data:`~megatron_eopt.parallel.schemes.Run`."""
    assert group is not None
    shape, pieces = matrices[0].shape, matrices[0].pieces
    piece = pieces[group.rank()]
    owned = [[index for index, owner in enumerate(bucket.owners) if owner == rank] for rank in range(group.size())]
    count = len(owned[group.rank()])

    to_owners = [[shards[index] for index in indices] for indices in owned]
    pending = all_to_all(to_owners, [count * piece.numel for piece in pieces], group)
    yield
    factors = orthogonalized(assemble(pending.wait(), pieces, shape), settings, scale(*shape))
    # an empty tensor tells the dtype where there is nothing to send
    back = [[shards[0].new_empty(0), *(cut_out(factor, piece) for factor in factors)] for piece in pieces]
    pending = all_to_all(back, [len(indices) * piece.numel for indices in owned], group)
    del factors, back
    yield
    results = list(shards)
    for indices, part in zip(owned, pending.wait(), strict=True):
        for index, entries in zip(indices, part.view(len(indices), *piece.shape), strict=True):
            results[index] = entries
    return results
