"""Whole matrices from shards that arrived: which bytes are copied, and which are the matrix already."""

from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.exchange import assemble, cut_up, entries_of
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle

WIDE, TALL = (6, 10), (10, 6)


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
