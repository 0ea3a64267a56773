"""Whole matrices from shards that arrived: which bytes are copied, and which are the matrix already."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.exchange import assemble, cut_up, entries_of
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle, cut_at

WIDE, TALL = (6, 10), (10, 6)


def arrived(shape, rectangles, count):
    """Matrices, and their shards as ranks send them, back to back in one buffer."""
    whole = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    return whole, torch.cat([whole[:, r.top : r.bottom, r.left : r.right].reshape(-1) for r in rectangles])


@pytest.mark.parametrize(
    ("shape", "rectangles", "count", "short_first", "in_place"),
    [
        (WIDE, cut_at(WIDE, 0, [0, 2, 4, 6]), 1, True, True),
        (WIDE, cut_at(WIDE, 0, [0, 1, 1, 6]), 1, True, True),  # uneven, with an empty shard
        (WIDE, cut_at(WIDE, 0, [0, 0, 6, 6]), 1, True, True),  # all on one rank
        (TALL, cut_at(TALL, 0, [0, 5, 10]), 1, False, True),
        (TALL, cut_at(TALL, 0, [0, 5, 10]), 1, True, False),  # is stored transposed
        (WIDE, cut_at(WIDE, 0, [0, 3, 6]), 2, True, False),
        (WIDE, cut_at(WIDE, 1, [0, 5, 10]), 1, True, False),
        (WIDE, cut_at(WIDE, 0, [0, 3, 6])[::-1], 1, True, False),  # ranks in another order
        (WIDE, tuple(Rectangle(top, top + 3, left, left + 5) for top in (0, 3) for left in (0, 5)), 1, True, False),
    ],
)
def test_shards_that_tile_the_rows_are_not_copied(shape, rectangles, count, short_first, in_place):
    whole, received = arrived(shape, rectangles, count)
    (got,) = assemble(received, [[(count, Matrix("m", shape, rectangles))]], short_first)
    assert torch.equal(got, whole)
    tall = short_first and shape[0] > shape[1]
    assert got.stride() == (whole.mT.contiguous().mT if tall else whole).stride()
    assert (got.data_ptr() == received.data_ptr()) == in_place


def test_padding_and_other_matrices_are_not_the_matrix():
    whole, received = arrived(WIDE, rectangles := cut_at(WIDE, 0, [0, 3, 6]), 1)
    run = 1, Matrix("m", WIDE, rectangles)
    padded = torch.nn.functional.pad(received.view(2, -1), (0, 5))
    assert torch.equal(assemble(padded, [[run]], True)[0], whole)
    twice = received.view(2, 1, -1).expand(2, 2, -1).reshape(-1)
    assert torch.equal(assemble(twice, [[run, run]], True)[0], torch.cat([whole, whole]))
    assert all(torch.equal(x, whole) for x in assemble(twice, [[run], [run]], True))


@st.composite
def matrices(draw):
    """Some matrices over equally many ranks: each a grid of shards, equal or not, in the order of rows or another."""
    ranks, found = draw(st.sampled_from([1, 2, 3, 4, 6])), []
    for number in range(draw(st.integers(1, 3))):
        down = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        shape, edges = [], []
        for parts in (down, ranks // down):
            sizes = draw(st.lists(st.integers(0, 3), min_size=parts, max_size=parts) | st.just([2] * parts))
            edges.append(pairwise([sum(sizes[:n]) for n in range(parts + 1)]))
            shape.append(sum(sizes))
        rectangles = [Rectangle(*rows, *cols) for rows, cols in product(*map(list, edges))]
        rectangles = draw(st.just(rectangles) | st.permutations(rectangles))
        found.append((draw(st.integers(0, 3)), Matrix(str(number), tuple(shape), tuple(rectangles))))
    return found


@given(matrices())
def test_parts_of_any_layouts_go_to_their_place_and_back(runs):
    whole = [torch.randn(count, *matrix.shape) for count, matrix in runs]
    parts = [
        torch.cat([x[:, r.top : r.bottom, r.left : r.right].reshape(-1) for x, r in zip(whole, cuts, strict=True)])
        for cuts in zip(*(matrix.rectangles for _, matrix in runs), strict=True)
    ]
    sizes = entries_of(runs)
    assert sizes == [len(part) for part in parts]
    assert torch.equal(cut_up(whole, runs), torch.cat(parts))
    padded = torch.stack([torch.nn.functional.pad(part, (0, max(sizes) - len(part) + 1)) for part in parts])
    for received in (torch.cat(parts), padded):
        for short_first in (False, True):
            got = assemble(received, [[run] for run in runs], short_first)
            assert all(map(torch.equal, got, whole))
