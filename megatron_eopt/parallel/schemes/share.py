"""Every rank holds the whole matrices; each orthogonalizes its share, and one all-gather hands the results out."""

from collections.abc import Generator, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.exchange import all_gather
from megatron_eopt.parallel.owners import of_ranks
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
    """``share``: computes before it first waits, while the results of the bucket before it are on their way.

    See :data:`~megatron_eopt.parallel.schemes.Run`.
    """
    assert group is not None
    shape = matrices[0].shape
    owned = of_ranks(bucket.owners, group.size())
    own = [shards[index] for index in owned[group.rank()]]
    # as many places on every rank: the last one of some may stay empty
    sent = shards[0].new_zeros(max(map(len, owned)), *shape)
    for place, factor in zip(sent, orthogonalized(own, settings, scale(*shape)), strict=False):
        place.copy_(factor)
    pending = all_gather(sent, group)
    del own, sent
    yield
    results = list(shards)
    for indices, part in zip(owned, pending.wait(), strict=True):
        for index, result in zip(indices, part, strict=False):
            results[index] = result
    return results
