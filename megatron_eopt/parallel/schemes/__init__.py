"""How a bucket is orthogonalized: generators that yield where they would wait.

:data:`~megatron_eopt.parallel.records.Scheme` says what each scheme does. :mod:`.whole` has those that put matrices
together on a rank, :mod:`.gram` those that sum Gram matrices over the ranks.
"""

from megatron_eopt.parallel.records import Scheme
from megatron_eopt.parallel.schemes import gram, whole

SCHEMES: dict[Scheme, whole.Run] = {
    "local": whole.local,
    "blockwise": whole.local,
    "duplicated": whole.duplicated,
    "owner": whole.owner,
    "share": whole.share,
    "distributed": gram.distributed,
    "gram_replicated": gram.replicated,
    "gram_split": gram.split,
}
