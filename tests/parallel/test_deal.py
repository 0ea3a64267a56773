"""Deals of whole parameters: everything once, the busiest rank no busier than by size, and close to the best deal."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.deal import MOST_ENTRIES, Item, deal, snake_order
from tests.parallel.plans import WORKS, matrix, some

KINDS = [
    Item((), 4096),  # a norm
    Item((), 2**24),  # an embedding
    *(Item((matrix("m", shape, dim, ranks),), shape[0] * shape[1] // ranks)
      for shape, dim, ranks in (((16384, 4096), 0, 4), ((4096, 4096), 1, 4), ((512, 4096), None, 1), ((64, 64), 0, 4))),
    Item((matrix("q", (4096, 4096), 0), matrix("k", (1024, 4096), 0)), 5 * 1024 * 1024),
]  # fmt: skip


def filled(items, ranks_of, ranks):
    return [sum(item.entries for item, r in zip(items, ranks_of, strict=True) if r == rank) for rank in range(ranks)]


@given(st.lists(st.sampled_from(KINDS), max_size=14), st.integers(1, 5))
def test_every_parameter_is_dealt_once(items, ranks):
    by_size = snake_order([item.entries for item in items], ranks)
    found = deal(items, by_size, ranks, WORKS)
    assert len(found.ranks) == len(items)
    assert set(found.ranks) <= set(range(ranks))
    assert max(found.operations) <= max(found.by_size)
    assert max(filled(items, found.ranks, ranks)) <= MOST_ENTRIES * max(filled(items, by_size, ranks))
    assert deal(items, by_size, ranks, WORKS) == found
    if items:
        assert 0 in found.ranks  # Megatron asks the first rank what it has


def test_memory_sets_a_bound():
    """Cheap matrices of many entries would all go to the rank without the dear one."""
    dear = Item(tuple(some(1, (4096, 4096), dim=None, ranks=1)), 2**20)
    cheap = Item((), 2**20)
    items = [dear, *[cheap] * 6]
    assert deal(items, [0, 0, 0, 1, 1, 1, 1], 2, WORKS).ranks.count(1) == 5  # of four, a third more
