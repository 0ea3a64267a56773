"""Which data-parallel rank gets which parameter, by predicted time.

A hand is costed by the plan that its tensor-parallel ranks would make. Pure Python: the same on every rank.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from operator import mul

from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates, Works, plan_cost
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.records import Matrix, TpMode
from megatron_eopt.parallel.teams import Shared, cut_over, handed_seconds, mode_of_team, nbytes, shared_by

OF_ENTRY = 1e-11  # seconds that momentum, weight decay and update take of an entry: 30 bytes at 3 TB/s

LENDS_BELOW = 0.95  # of the time of the busiest rank: to gain less is not worth an exchange

MOST_ENTRIES = 4 / 3  # a rank gets at most so many times the entries of the fullest rank by size, since they are memory

Hand = tuple[int, ...]  # what a rank has: how many items of each kind
State = tuple[Hand, int, float]  # of a rank: its hand, its entries, and seconds of what else it does
Dealt = tuple[int, int]  # kind and entries of an item


@dataclass(frozen=True)
class Item:
    """What the deal of a parameter depends on."""

    matrices: tuple[Matrix, ...]  # on the ranks beside each data-parallel rank; none if it steps element-wise
    entries: int  # that each of these ranks holds
    kept: str = ""  # why no team may orthogonalize it

    @property
    def is_whole(self) -> bool:
        """Whether its rank has whole matrices, and no other has a part in them."""
        return bool(self.matrices) and all(matrix.ranks == 1 for matrix in self.matrices)

    @cached_property
    def kind(self) -> "Item":
        """The same for all items that cost the same."""
        return replace(self, matrices=tuple(replace(matrix, name="") for matrix in self.matrices))


@dataclass(frozen=True)
class Deal:
    """Which rank gets each item, and its predicted cost."""

    ranks: tuple[int, ...]  # of each item
    seconds: tuple[float, ...]  # that a step of each rank's hand takes
    by_size: tuple[float, ...]  # the same by the deal that this one replaces
    lent: tuple[int, ...] = ()  # the items that teams orthogonalize, each that of its rank
    team: int = 1  # ranks of a team
    alone: tuple[float, ...] = ()  # seconds of each rank, if each orthogonalized its items alone
    against: str = ""  # why teams do not orthogonalize more, where that would be faster

    def __str__(self) -> str:
        ms, before = max(self.seconds) * 1e3, max(self.by_size) * 1e3
        told = (
            f"{len(self.ranks)} parameters dealt to {len(self.seconds)} data-parallel ranks by predicted time: the "
            f"busiest needs {ms:.3g} ms a step; dealt by size {before:.3g} ms"
        )
        if self.lent:
            told += f"; {len(self.lent)} are the work of {self.team} ranks each, else {max(self.alone) * 1e3:.3g} ms"
        return f"{told}; several ranks to a matrix would be faster: {self.against}" if self.against else told

    def of_team(self, rank: int) -> list[int]:
        """The items that a rank's team orthogonalizes."""
        return [i for i in self.lent if self.ranks[i] // self.team == rank // self.team]

    def shared(self, items: Sequence[Item], rank: int, only: Collection[int] | None = None) -> Shared | None:
        """What a rank's team works on, of all items or some; None for nothing."""
        here = [i for i in self.of_team(rank) if only is None or i in only]
        if not here:
            return None
        several = [(cut_over(matrix, self.team), self.ranks[i]) for i in here for matrix in items[i].matrices]
        matrices, owners = zip(*several, strict=True)
        return shared_by(matrices, owners, rank)


class Times:
    """Predicted seconds of a hand's step on its busiest rank."""

    def __init__(self, kinds: Sequence[Item], work: Works, mode: TpMode, rates: Rates) -> None:
        self._kinds, self._settings = kinds, (mode, work, rates)
        self._known: dict[tuple[Hand, int], float] = {}
        self._ranks = [max((matrix.ranks for matrix in kind.matrices), default=1) for kind in kinds]
        # As many as ranks can share evenly take their time again and again, whatever else is there.
        alone = [tuple(count * (i == j) for j in range(len(kinds))) for i, count in enumerate(self._ranks)]
        self._rounds = list(map(self._planned, alone))

    def of(self, hand: Hand) -> float:
        """Seconds of full rounds, and of a planned rest."""
        entries = sum(count * kind.entries for count, kind in zip(hand, self._kinds, strict=True))
        rounds = [divmod(count, ranks) for count, ranks in zip(hand, self._ranks, strict=True)]
        full = sum(count * seconds for (count, _), seconds in zip(rounds, self._rounds, strict=True))
        return OF_ENTRY * entries + full + self._planned(tuple(rest for _, rest in rounds))

    def alone(self, kind: int) -> float:
        """Seconds of one item where there are many."""
        return OF_ENTRY * self._kinds[kind].entries + self._rounds[kind] / self._ranks[kind]

    def of_team(self, hands: Sequence[Hand]) -> float:
        """Seconds in which a team orthogonalizes what its ranks lend."""
        team, (_, _, rates) = len(hands), self._settings
        of_kinds = [nbytes(kind.matrices) for kind in self._kinds]
        most = max(sum(map(mul, hand, of_kinds)) for hand in hands)
        whole = tuple(map(sum, zip(*hands, strict=True)))
        return self._planned(whole, team) + handed_seconds(most, team, rates) if most else 0.0

    def _planned(self, hand: Hand, team: int = 1) -> float:
        if (hand, team) not in self._known:
            mode, work, rates = self._settings
            if team > 1:  # also where no team works, but it is said whether one would be faster
                mode = mode_of_team(mode)
            matrices = [
                replace(matrix if team == 1 else cut_over(matrix, team), name=f"{number}.{copy}.{part}")
                for number, (kind, count) in enumerate(zip(self._kinds, hand, strict=True))
                for copy in range(count)
                for part, matrix in enumerate(kind.matrices)
            ]
            plan = make_plan(matrices, mode, work, rates)
            self._known[hand, team] = plan_cost(plan, work, rates).seconds
        return self._known[hand, team]


def deal(
    items: Sequence[Item],
    by_size: Sequence[int],
    ranks: int,
    work: Works,
    mode: TpMode = "auto",
    rates: Rates = DEFAULT_RATES,
    buckets: Sequence[tuple[Sequence[int], float]] | None = None,
    teams: Sequence[int] = (),
) -> Deal:
    """Deal items to ranks by predicted time, the longest first.

    The rank that then needs the least time gets it. The deal by size stays unless the busiest rank then needs less
    time. Without tensor parallelism and bounds of memory the busiest needs at most 4/3 of the least possible (Graham,
    Bounds on Multiprocessing Timing Anomalies, 1969).

    What takes longer than a rank's share of all work is orthogonalized by the rank's team, where that lets the busiest
    rank need less than :data:`LENDS_BELOW` of its time.

    ``by_size`` is the deal that is replaced, ``mode`` how hands will be orthogonalized. ``buckets`` are item indices
    with a rank's room for entries (by default all, :data:`MOST_ENTRIES`); one that does not fit is dealt by size.
    ``teams`` are sizes of teams to try, of consecutive ranks.
    """
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(item.kind for item in items))}
    of_kind = [kinds[item.kind] for item in items]
    times = Times(list(kinds), work, mode, rates)
    none = (0,) * len(kinds)
    if buckets is None:
        pairs = list(zip(items, by_size, strict=True))
        filled = [sum(item.entries for item, r in pairs if r == rank) for rank in range(ranks)]
        buckets = [(range(len(items)), MOST_ENTRIES * max(filled))]
    rank_of, hands = list(by_size), [none] * ranks
    for indices, room in buckets:
        order = sorted(indices, key=lambda i: -times.alone(of_kind[i]))
        dealt = _dealt([(of_kind[i], items[i].entries) for i in order], [(hand, 0, 0.0) for hand in hands], room, times)
        for i, rank in zip(order, dealt or [by_size[i] for i in order], strict=True):
            rank_of[i], hands[rank] = rank, _with(hands[rank], of_kind[i])
    before = [none] * ranks
    for kind, rank in zip(of_kind, by_size, strict=True):
        before[rank] = _with(before[rank], kind)
    seconds, replaced = tuple(map(times.of, hands)), tuple(map(times.of, before))
    found = Deal(tuple(by_size), replaced, replaced)
    if max(seconds) < max(replaced):
        found = Deal(tuple(rank_of), seconds, replaced)
    if not teams or len(buckets) > 1:
        return found
    of_number, share = list(kinds), sum(found.seconds) / ranks
    by_length = sorted(range(len(kinds)), key=lambda n: -times.alone(n))
    longest = [n for n in by_length if of_number[n].is_whole and times.alone(n) > share]
    order = sorted(range(len(items)), key=lambda i: -times.alone(of_kind[i]))
    in_order = [(of_kind[i], items[i].entries) for i in order]

    def over_teams(allowed: Sequence[int]) -> Deal:
        best, bound = found, LENDS_BELOW * max(found.seconds)
        for team, lent in ((team, allowed[:end]) for team in teams for end in range(1, len(allowed) + 1)):
            trial = _lent(in_order, lent, team, hands=[none] * ranks, room=buckets[0][1], times=times)
            if trial is not None and max(trial[1]) < bound:
                owner_of, bound = dict(zip(order, trial[0], strict=True)), max(trial[1])
                owners = tuple(owner_of[i] for i in range(len(items)))
                indices = tuple(i for i, kind in enumerate(of_kind) if kind in lent)
                best = Deal(owners, tuple(trial[1]), replaced, indices, team, found.seconds)
        return best

    best = over_teams([n for n in longest if not of_number[n].kept])
    against = next((of_number[n].kept for n in longest if of_number[n].kept), "")
    if against and max(over_teams(longest).seconds) < LENDS_BELOW * max(best.seconds):
        return replace(best, against=against)
    return best


def _dealt(items: Sequence[Dealt], states: Sequence[State], room: float, times: Times) -> list[int] | None:
    """The rank of each item, if they fit."""
    ranks, alike = list[int](), dict[State, list[int]]()  # ranks of each state, the first on top
    for rank, state in enumerate(states):
        alike.setdefault(state, []).append(rank)
    for kind, entries in items:
        trials = [
            (times.of(_with(hand, kind)) + beside, filled, same[0], (hand, filled, beside))
            for (hand, filled, beside), same in alike.items()
            if filled + entries <= room
        ]
        if not trials:
            return None
        *_, state = min(trials)
        hand, filled, beside = state
        ranks.append(rank := heappop(alike[state]))
        if not alike[state]:
            del alike[state]
        heappush(alike.setdefault((_with(hand, kind), filled + entries, beside), []), rank)
    return ranks


def _lent(
    items: Sequence[Dealt], lent: Sequence[int], team: int, hands: list[Hand], room: float, times: Times
) -> tuple[list[int], list[float]] | None:
    """Ranks of items and seconds of ranks, if teams orthogonalize some kinds; None if they do not fit.

    The team that then takes the least time gets an item, and in it the rank with the fewest entries. All others are
    dealt after these, to ``hands``, which are empty.
    """
    alike = {tuple(hands[:team]): list(range(0, len(hands), team))}  # first ranks of teams that lend the same
    rank_of, filled = dict[int, int](), [0] * len(hands)
    for number, (kind, entries) in enumerate(items):
        if kind in lent:
            trials = []
            for loans, (first, *_) in alike.items():
                rank = min(range(first, first + team), key=filled.__getitem__)
                after = tuple(_with(loan, kind) if r == rank else loan for r, loan in enumerate(loans, first))
                trials.append((times.of_team(after), rank, loans, after))
            _, rank, loans, after = min(trials)
            filled[rank] += entries
            if filled[rank] > room:
                return None
            rank_of[number] = rank
            heappush(alike.setdefault(after, []), heappop(alike[loans]))
            if not alike[loans]:
                del alike[loans]
    of_team = {first: times.of_team(loans) for loans, firsts in alike.items() for first in firsts}
    beside = [of_team[rank - rank % team] + OF_ENTRY * entries for rank, entries in enumerate(filled)]
    kept = [number for number, _ in enumerate(items) if number not in rank_of]
    dealt = _dealt([items[n] for n in kept], list(zip(hands, filled, beside, strict=True)), room, times)
    if dealt is None:
        return None
    for number, rank in zip(kept, dealt, strict=True):
        rank_of[number], hands[rank] = rank, _with(hands[rank], items[number][0])
    seconds = [times.of(hand) + more for hand, more in zip(hands, beside, strict=True)]
    return [rank_of[number] for number, _ in enumerate(items)], seconds


def _with(hand: Hand, kind: int) -> Hand:
    return (*hand[:kind], hand[kind] + 1, *hand[kind + 1 :])


def to_and_fro(entries: Sequence[int], ranks: int) -> list[int]:
    """Megatron's layer-wise deal: the smallest first, to and fro."""
    rank_of = [0] * len(entries)
    for number, index in enumerate(sorted(range(len(entries)), key=lambda index: entries[index])):
        turn, rank = divmod(number, ranks)
        rank_of[index] = ranks - 1 - rank if turn % 2 else rank
    return rank_of
