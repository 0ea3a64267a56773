"""Whole matrices that several ranks of a node orthogonalize together.

The rank that has such a matrix hands shards of it to its team: equally many consecutive ranks of a node. They work on
the shards as tensor-parallel ranks would, and hand the shards of the factor back. Pure Python: the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import gcd

from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.records import Matrix, TpMode, cut_at

TEAM = "team"  # label of the group

MODES: tuple[TpMode, ...] = ("auto", "gram")  # in which ranks work on shards where that is faster


def cut_over(matrix: Matrix, ranks: int) -> Matrix:
    """A whole matrix, cut along its long side over a team."""
    dim = int(matrix.shape[1] > matrix.shape[0])
    edges = [matrix.shape[dim] * rank // ranks for rank in range(ranks + 1)]
    return replace(matrix, rectangles=cut_at(matrix.shape, dim, edges), group=TEAM)


def handed_bytes(nbytes: int, ranks: int) -> int:
    """Bytes of whole matrices that their rank sends, and later gets back."""
    return nbytes * (ranks - 1) // ranks


def handed_seconds(nbytes: int, ranks: int, rates: Rates) -> float:
    """Seconds of both ways, if the busiest rank has so many bytes of whole matrices."""
    return 2 * (handed_bytes(nbytes, ranks) / rates.bytes + rates.latency)


def run_length(ranks: Sequence[int], of_node: int) -> int:
    """Ranks of a group that always are on one node, one behind another.

    ``ranks`` are global, ``of_node`` of them are on each node. Runs of several lengths are cut into equal ones.
    """
    return gcd(*(len(list(run)) for _, run in groupby(rank // of_node for rank in ranks)))


def team_sizes(together: int, most: int) -> list[int]:
    """Sizes of teams into which ``together`` ranks of a node can be cut."""
    return [size for size in range(2, min(together, most) + 1) if together % size == 0]
