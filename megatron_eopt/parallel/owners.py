"""Which matrices of a bucket each rank computes, and which of them make full rounds: the same for costs and schemes."""

from collections.abc import Sequence


def of_ranks(owners: Sequence[int], ranks: int) -> list[list[int]]:
    """The matrices of each rank, ascending.

    Args:
        owners: rank that computes each matrix of a bucket.
        ranks: number of ranks.

    Raises:
        ValueError: if two ranks differ by more than one matrix.
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index, owner in enumerate(owners):
        owned[owner].append(index)
    counts = [len(indices) for indices in owned]
    if max(counts) - min(counts) > 1:
        raise ValueError(
            f"one rank owns {max(counts)} of {len(owners)} matrices and another {min(counts)}: "
            f"they are to be dealt evenly over {ranks} ranks"
        )
    return owned


def in_rounds(owners: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """The matrices of which every rank has as many, one rank's after the other's, and the rest: fewer than ranks.

    Raises:
        ValueError: as :func:`of_ranks`.
    """
    rounds = len(owners) // ranks
    owned = of_ranks(owners, ranks)
    full = [index for indices in owned for index in indices[:rounds]]
    return full, sorted(index for indices in owned for index in indices[rounds:])
