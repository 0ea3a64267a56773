"""Which data-parallel rank gets which parameter, by operations.

Pure Python: the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_eopt.parallel.cost import Works, whole_flops
from megatron_eopt.parallel.plan_records import Matrix

OPERATIONS_OF_ENTRY = (
    5000  # operations that a GPU makes while it steps an entry: momentum, decay and update move 30 bytes
)

MOST_ENTRIES = 4 / 3  # a rank gets at most so many times the entries of the fullest rank by size, since they are memory


@dataclass(frozen=True)
class Item:
    """What the deal of a parameter depends on."""

    matrices: tuple[Matrix, ...]  # on the ranks beside each data-parallel rank; none if it steps element-wise
    entries: int  # that each of these ranks holds

    def operations(self, works: Works) -> float:
        """Those of one of its ranks, if they share them evenly."""
        operations = float(OPERATIONS_OF_ENTRY * self.entries)
        for matrix in self.matrices:
            sharers = matrix.ranks if matrix.sharded else 1
            operations += whole_flops(matrix.shape, works[matrix.iteration]) / sharers
        return operations


@dataclass(frozen=True)
class Deal:
    """Which rank gets each item, and the operations of each rank."""

    ranks: tuple[int, ...]  # of each item
    operations: tuple[float, ...]  # of each rank
    by_size: tuple[float, ...]  # the same by the deal that this one replaces

    def __str__(self) -> str:
        return (
            f"{len(self.ranks)} parameters dealt to {len(self.operations)} data-parallel ranks by operations: the "
            f"busiest has {max(self.operations) / 1e12:.3g} T a step; dealt by size {max(self.by_size) / 1e12:.3g} T"
        )


def deal(items: Sequence[Item], by_size: Sequence[int], ranks: int, works: Works) -> Deal:
    """Deal items to ranks by operations, the largest first.

    The rank that has the least gets it. The deal by size stays unless the busiest rank then has less to do, and all fit
    into :data:`MOST_ENTRIES`. Without that bound the busiest has at most 4/3 of the least possible (Graham, Bounds on
    Multiprocessing Timing Anomalies, 1969). ``by_size`` is the deal that is replaced.
    """
    operations = [item.operations(works) for item in items]
    before = [0.0] * ranks
    filled = [0] * ranks
    for item, of_item, rank in zip(items, operations, by_size, strict=True):
        before[rank] += of_item
        filled[rank] += item.entries
    room = MOST_ENTRIES * max(filled)
    load = [0.0] * ranks
    filled = [0] * ranks
    rank_of = [0] * len(items)
    kept = Deal(tuple(by_size), tuple(before), tuple(before))
    for i in sorted(range(len(items)), key=lambda i: -operations[i]):
        free = [rank for rank in range(ranks) if filled[rank] + items[i].entries <= room]
        if not free:
            return kept
        rank = min(free, key=lambda rank: (load[rank], filled[rank], rank))
        rank_of[i] = rank
        load[rank] += operations[i]
        filled[rank] += items[i].entries
    return Deal(tuple(rank_of), tuple(load), tuple(before)) if max(load) < max(before) else kept


def snake_order(entries: Sequence[int], ranks: int) -> list[int]:
    """Megatron's layer-wise deal: the smallest first, to and fro."""
    rank_of = [0] * len(entries)
    for number, index in enumerate(sorted(range(len(entries)), key=lambda index: entries[index])):
        turn, rank = divmod(number, ranks)
        rank_of[index] = ranks - 1 - rank if turn % 2 else rank
    return rank_of
