"""The schemes, as generators that yield where they would wait."""

from megatron_eopt.parallel.plan_records import Scheme
from megatron_eopt.parallel.schemes import gram, whole

SCHEMES: dict[Scheme, whole.SchemeFunction] = {
    "local": whole.local,
    "blockwise": whole.local,
    "duplicated": whole.duplicated,
    "owner": whole.owner,
    "share": whole.share,
    "distributed": gram.distributed,
    "gram_replicated": gram.replicated,
    "gram_split": gram.split,
}
