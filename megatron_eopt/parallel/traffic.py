"""How many bytes each rank sends in a collective: what the plan predicts and what the exchange counts.

Collectives are counted as the ring algorithms send them, per rank, with ``n`` ranks (Thakur, Rabenseifner and Gropp,
2005); those from or to one rank as a chain along that ring does. A rank sends nothing to itself.
"""

from collections.abc import Sequence


def all_gather(bytes_of_one: int, ranks: int) -> int:
    """Every rank's part of ``bytes_of_one`` goes to all others."""
    return (ranks - 1) * bytes_of_one


def reduce_scatter(bytes_of_all: int, ranks: int) -> int:
    """``bytes_of_all`` on every rank is summed; every rank keeps one part of it."""
    return -(-(ranks - 1) * bytes_of_all // ranks)


def all_reduce(bytes_of_all: int, ranks: int) -> int:
    """``bytes_of_all`` on every rank is summed: a reduce-scatter and an all-gather."""
    return -(-2 * (ranks - 1) * bytes_of_all // ranks)


def reduce(bytes_of_all: int, rank: int, root: int) -> int:
    """``bytes_of_all`` on every rank is summed on ``root``: along a chain that ends there, each adds its own."""
    return 0 if rank == root else bytes_of_all


def broadcast(bytes_of_all: int, rank: int, root: int, ranks: int) -> int:
    """``bytes_of_all`` of ``root`` is passed on along the ranks, up to the one before it."""
    return 0 if (rank + 1) % ranks == root else bytes_of_all


def all_to_all(bytes_to: Sequence[int], rank: int) -> int:
    """Each rank gets a part of its own."""
    return sum(bytes_to) - bytes_to[rank]
