"""Which matrices teams of a node work on: never predicted to be slower, and the same on every rank."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.cost import Rates, plan_cost
from megatron_eopt.parallel.deal import LENDS_BELOW, MOST_ENTRIES, OF_ENTRY, Item, deal, to_and_fro
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.records import cut_dimension
from megatron_eopt.parallel.teams import cut_over, handed_seconds, nbytes, run_length, team_sizes
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE
from tests.parallel.plans import WORK, matrix

LARGE, SMALL = (28672, 4096), (1024, 4096)
KINDS = [
    Item((), 2**20),  # an embedding
    *(Item((matrix("m", shape, None, 1),), shape[0] * shape[1]) for shape in (LARGE, (4096, 14336), SMALL)),
    Item((matrix("gate", (14336, 4096), None, 1), matrix("up", (14336, 4096), None, 1)), 2 * 14336 * 4096),
    Item((matrix("cut", LARGE, 0, 4),), LARGE[0] * LARGE[1] // 4),
    Item((matrix("m", LARGE, None, 1),), LARGE[0] * LARGE[1], "CUDA graphs capture the step"),
]


def named(items):
    return [
        replace(x, matrices=tuple(replace(m, name=f"{m.name} {i}") for m in x.matrices)) for i, x in enumerate(items)
    ]


def dealt(items, ranks, teams, rates=None):
    by_size = to_and_fro([item.entries for item in items], ranks)
    return deal(items, by_size, ranks, WORK, "auto", rates or Rates(), teams=teams), by_size


def filled(items, ranks_of, ranks):
    return [sum(item.entries for item, r in zip(items, ranks_of, strict=True) if r == rank) for rank in range(ranks)]


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=8).map(named),
    st.sampled_from([(4, 4), (8, 4), (8, 8), (6, 2)]),
    st.sampled_from([Rates(), Rates(bytes=1e9), Rates(bytes=1e12, latency=0.0)]),
)
def test_no_deal_is_slower_for_its_teams(items, sizes, rates):
    ranks, node = sizes
    alone, by_size = dealt(items, ranks, (), rates)
    found, _ = dealt(items, ranks, team_sizes(node, node), rates)
    assert found == dealt(items, ranks, team_sizes(node, node), rates)[0]  # on another rank
    assert not alone.lent
    if not found.lent:
        assert found == replace(alone, against=found.against)
        return
    assert max(found.seconds) < LENDS_BELOW * max(alone.seconds)
    assert found.alone == alone.seconds
    assert node % found.team == 0  # so that consecutive ranks of a team are on one node
    assert all(items[i].is_whole and not items[i].kept for i in found.lent)
    assert max(filled(items, found.ranks, ranks)) <= MOST_ENTRIES * max(filled(items, by_size, ranks))
    assert 0 in found.ranks  # Megatron asks the first rank what it has


def test_what_is_predicted_is_the_plan_of_each_rank_and_of_its_team():
    items = named([KINDS[1]] * 3 + [KINDS[2]] * 2 + [KINDS[3]] * 4)
    found, _ = dealt(items, 8, [2, 4])
    assert len(found.lent) == 3
    for rank, seconds in enumerate(found.seconds):
        own = [item for item, r in zip(items, found.ranks, strict=True) if r == rank]
        matrices, shared = [m for item in own for m in item.matrices], found.shared(items, rank)
        plan = make_plan(matrices, "auto", WORK) if shared is None else None
        expected = OF_ENTRY * sum(item.entries for item in own)
        if shared is not None:
            assert shared.own <= {m.name for m in matrices}
            plan = shared.plan(matrices, "auto", WORK, Rates(), DEFAULT_WORKSPACE)
            expected += shared.seconds(Rates())
        assert seconds == pytest.approx(expected + plan_cost(plan, WORK).seconds, rel=0.02)
    told = str(found)
    assert told.endswith(f"; 3 are the work of {found.team} ranks each, else {max(found.alone) * 1e3:.3g} ms")


def test_a_matrix_within_a_ranks_share_stays_alone():
    items = named([KINDS[1]] * 8)
    assert not dealt(items, 8, [2, 4, 8])[0].lent


def test_it_is_said_why_a_matrix_is_not_shared():
    found, _ = dealt(named([KINDS[6]]), 8, [8])
    assert not found.lent
    assert str(found).endswith("; several ranks to a matrix would be faster: CUDA graphs capture the step")
    assert dealt(named([KINDS[6]]), 8, [])[0].against == ""


def test_over_a_slow_link_nothing_is_shared():
    assert not dealt(named([KINDS[1]]), 8, [2, 4, 8], Rates(bytes=5e9))[0].lent


@given(st.sampled_from([LARGE, LARGE[::-1], (4096, 4096), (7, 3), (3, 1000)]), st.integers(2, 8))
def test_a_matrix_is_cut_along_its_long_side(shape, ranks):
    found = cut_over(matrix("m", shape, None, 1), ranks)
    dim = cut_dimension(shape, found.rectangles)
    assert shape[dim] == max(shape)
    lengths = [rectangle.shape[dim] for rectangle in found.rectangles]
    assert sum(lengths) == max(shape)
    assert max(lengths) - min(lengths) <= 1


def test_what_is_handed_over_is_all_but_the_own_shard_both_ways():
    m = matrix("m", LARGE, None, 1, itemsize=2)
    sent = 2 * 28672 * 4096 * 7 / 8
    assert handed_seconds(nbytes([m]), 8, Rates()) == pytest.approx(2 * (sent / 300e9 + 20e-6))


@pytest.mark.parametrize(
    ("ranks", "of_node", "together"),
    [
        (range(16), 8, 8),
        (range(4), 8, 4),
        (range(12), 8, 4),  # eight on a node, four on the next
        (range(12, 24), 8, 4),
        (range(0, 32, 2), 8, 4),  # as with two tensor-parallel ranks
        (range(0, 64, 8), 8, 1),
        (range(6, 14), 8, 2),
        (range(8), 1, 1),
    ],
)
def test_how_many_ranks_of_a_group_are_on_one_node(ranks, of_node, together):
    assert run_length(ranks, of_node) == together
    for first in range(0, len(ranks), together):
        assert len({rank // of_node for rank in ranks[first : first + together]}) == 1


def test_sizes_of_teams():
    assert team_sizes(8, 8) == [2, 4, 8]
    assert team_sizes(8, 4) == [2, 4]
    assert team_sizes(6, 8) == [2, 3, 6]
    assert team_sizes(8, 1) == team_sizes(1, 8) == []
