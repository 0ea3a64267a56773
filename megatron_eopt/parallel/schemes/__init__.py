"""How a bucket is orthogonalized: one file per scheme, each a generator that yields where it would wait.

:data:`~megatron_eopt.parallel.plan.Scheme` says what each of them does.
"""

from collections.abc import Callable, Generator, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.plan import Bucket, Matrix, Scheme
from megatron_eopt.parallel.schemes import distributed, duplicated, gram, local, owner, share
from megatron_eopt.parallel.schemes.scale import Scale

Run = Callable[
    [Bucket, Sequence[Matrix], Sequence[Tensor], ProcessGroup | None, NewtonSchulz, Scale],
    Generator[None, None, list[Tensor]],
]
"""``(bucket, matrices, shards, group, settings, scale)``: the bucket's matrices, and this rank's piece of each.

A piece is 2-D, of the shape that its matrix says, and may be empty; the pieces of a bucket are of one dtype. The
generator starts an exchange, yields, and takes the result when it is resumed; equally often on every rank. It returns
the pieces of the orthogonal factors, of the dtype of the shards, times the scale of the global matrix (of the piece
under ``blockwise``). Shards are not written to. A zero matrix gives zeros; one with an entry that is not finite gives
no numbers on any rank, and the others of the bucket are not affected. The group is needed where something is exchanged.
"""

SCHEMES: dict[Scheme, Run] = {
    "local": local.run,
    "blockwise": local.run_blockwise,
    "duplicated": duplicated.run,
    "distributed": distributed.run,
    "owner": owner.run,
    "gram_replicated": gram.run_replicated,
    "gram_split": gram.run_split,
    "share": share.run,
}

__all__ = ["SCHEMES", "Run", "Scale"]
