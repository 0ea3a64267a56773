"""Which data-parallel rank gets which parameter, by predicted time.

A hand is costed by the plan that its tensor-parallel ranks would make. Pure Python: the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_eopt.parallel.cost import Works, plan_cost
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.rates import DEFAULT_RATES, Rates
from megatron_eopt.parallel.records import Matrix, TpMode

OF_ENTRY = 1e-11  # seconds that momentum, weight decay and update take of an entry: 30 bytes at 3 TB/s

MOST_ENTRIES = 4 / 3  # a rank gets at most so many times the entries of the fullest rank by size, since they are memory

Hand = tuple[int, ...]  # what a rank has: how many items of each kind


@dataclass(frozen=True)
class Item:
    """What the deal of a parameter depends on."""

    matrices: tuple[Matrix, ...]  # on the ranks beside each data-parallel rank; none if it steps element-wise
    entries: int  # that each of these ranks holds

    @cached_property
    def kind(self) -> "Item":
        """The same for all items that cost the same."""
        return Item(tuple(replace(matrix, name="") for matrix in self.matrices), self.entries)


@dataclass(frozen=True)
class Deal:
    """Which rank gets each item, and its predicted cost."""

    ranks: tuple[int, ...]  # of each item
    seconds: tuple[float, ...]  # that a step of each rank's hand takes
    by_size: tuple[float, ...]  # the same by the deal that this one replaces

    def __str__(self) -> str:
        ms = max(self.seconds) * 1e3
        before = max(self.by_size) * 1e3
        return (
            f"{len(self.ranks)} parameters dealt to {len(self.seconds)} data-parallel ranks by predicted time: the "
            f"busiest needs {ms:.3g} ms a step; dealt by size {before:.3g} ms"
        )


class Times:
    """Predicted seconds of a hand's step on its busiest rank."""

    def __init__(
        self,
        kinds: Sequence[Item],
        work: Works,
        mode: TpMode,
        rates: Rates,
    ) -> None:
        self._kinds = kinds
        self._work = work
        self._mode = mode
        self._rates = rates
        self._known: dict[Hand, float] = {}
        self._ranks = [max((matrix.ranks for matrix in kind.matrices), default=1) for kind in kinds]
        # As many as ranks can share evenly take their time again and again, whatever else is there.
        self._rounds = []
        for kind, count in enumerate(self._ranks):
            hand = [0] * len(kinds)
            hand[kind] = count
            self._rounds.append(self._planned(tuple(hand)))

    def of(self, hand: Hand) -> float:
        """Seconds of full rounds, and of a planned rest."""
        entries = 0
        full = []
        rest = []
        for kind, count in enumerate(hand):
            entries += count * self._kinds[kind].entries
            rounds, left = divmod(count, self._ranks[kind])
            full.append(rounds * self._rounds[kind])
            rest.append(left)
        return OF_ENTRY * entries + sum(full) + self._planned(tuple(rest))

    def alone(self, kind: int) -> float:
        """Seconds of one item where there are many."""
        return OF_ENTRY * self._kinds[kind].entries + self._rounds[kind] / self._ranks[kind]

    def _planned(self, hand: Hand) -> float:
        if hand not in self._known:
            matrices = list[Matrix]()
            for kind, count in zip(self._kinds, hand, strict=True):
                for matrix in kind.matrices * count:
                    matrices.append(replace(matrix, name=f"{len(matrices)}"))
            plan = make_plan(matrices, self._mode, self._work, self._rates)
            self._known[hand] = plan_cost(plan, self._work, self._rates).seconds
        return self._known[hand]


def deal(
    items: Sequence[Item],
    by_size: Sequence[int],
    ranks: int,
    work: Works,
    mode: TpMode = "auto",
    rates: Rates = DEFAULT_RATES,
) -> Deal:
    """Deal items to ranks by predicted time, the longest first.

    The rank that then needs the least time gets it. The deal by size stays unless the busiest rank then needs less
    time, and all fit into :data:`MOST_ENTRIES`. Without tensor parallelism and bounds of memory the busiest needs at
    most 4/3 of the least possible (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).

    ``by_size`` is the deal that is replaced, ``mode`` how hands will be orthogonalized.
    """
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(item.kind for item in items))}
    of_kind = [kinds[item.kind] for item in items]
    times = Times(list(kinds), work, mode, rates)
    nothing: Hand = (0,) * len(kinds)
    before = [nothing] * ranks
    filled = [0] * ranks
    for item, kind, rank in zip(items, of_kind, by_size, strict=True):
        before[rank] = _with(before[rank], kind)
        filled[rank] += item.entries
    replaced = tuple(map(times.of, before))
    order = sorted(range(len(items)), key=lambda i: -times.alone(of_kind[i]))
    in_order = [(of_kind[i], items[i].entries) for i in order]
    hands = [nothing] * ranks
    dealt = _dealt(in_order, hands, MOST_ENTRIES * max(filled), times)
    if dealt is not None:
        seconds = tuple(map(times.of, hands))
        if max(seconds) < max(replaced):
            rank_of = dict(zip(order, dealt, strict=True))
            return Deal(tuple(rank_of[i] for i in range(len(items))), seconds, replaced)
    return Deal(tuple(by_size), replaced, replaced)


def _dealt(
    items: Sequence[tuple[int, int]],
    hands: list[Hand],
    room: float,
    times: Times,
) -> list[int] | None:
    """The rank of each (kind, entries), which is added to its hand; None if they do not fit."""
    filled = [0] * len(hands)
    ranks = []
    for kind, entries in items:
        first_of: dict[tuple[Hand, int], int] = {}  # of the ranks that have the same
        for rank, (hand, held) in enumerate(zip(hands, filled, strict=True)):
            if held + entries <= room:
                first_of.setdefault((hand, held), rank)
        if not first_of:
            return None
        candidates = []
        for (hand, held), rank in first_of.items():
            candidates.append((times.of(_with(hand, kind)), held, rank))
        _, _, rank = min(candidates)
        hands[rank] = _with(hands[rank], kind)
        filled[rank] += entries
        ranks.append(rank)
    return ranks


def _with(hand: Hand, kind: int) -> Hand:
    return (*hand[:kind], hand[kind] + 1, *hand[kind + 1 :])


def to_and_fro(entries: Sequence[int], ranks: int) -> list[int]:
    """Megatron's layer-wise deal: the smallest first, to and fro."""
    rank_of = [0] * len(entries)
    for number, index in enumerate(sorted(range(len(entries)), key=lambda index: entries[index])):
        turn, rank = divmod(number, ranks)
        rank_of[index] = ranks - 1 - rank if turn % 2 else rank
    return rank_of
