"""Large buckets in parts: so much is exchanged at once, and the exchange of one part runs while another is computed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the plan is made with these parts
    from megatron_eopt.parallel.plan import Bucket, Matrix

MAX_BYTES = 2**30
"""What one rank holds of a part, at most, unless a round of it (one matrix for each rank) is larger."""

SHARED_PARTS = 4
"""Into so many parts shared matrices are cut: all are computed before the first results could leave otherwise."""


def in_parts(bucket: "Bucket", matrix: "Matrix", max_bytes: int = MAX_BYTES) -> list["Bucket"]:
    """A bucket as buckets of whole rounds, in each of which every rank owns as many matrices.

    Args:
        bucket: with its owners, who are dealt in rounds over the ranks.
        matrix: one of those that it has.
        max_bytes: see :data:`MAX_BYTES`.
    """
    if bucket.scheme in ("local", "blockwise"):
        return [bucket]
    held = max(piece.numel for piece in matrix.pieces) * matrix.itemsize
    if bucket.scheme.startswith("gram"):
        held = max(held, min(matrix.shape) ** 2 * 4)
    rounds = -(-len(bucket.matrices) // matrix.ranks)
    at_once = max(1, max_bytes // (max(1, held) * matrix.ranks))
    if bucket.scheme == "share":
        at_once = min(at_once, -(-rounds // SHARED_PARTS))
    size = at_once * matrix.ranks
    return [
        type(bucket)(bucket.matrices[start : start + size], bucket.scheme, bucket.owners[start : start + size])
        for start in range(0, len(bucket.matrices), size)
    ]
