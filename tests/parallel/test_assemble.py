"""Whole matrices from shards that arrived: which bytes are copied, and which are the matrix already."""

import pytest
import torch

from megatron_eopt.parallel.records import Matrix, Rectangle, cut_at
from megatron_eopt.parallel.schemes.whole import assemble

WIDE, TALL = (6, 10), (10, 6)


def arrived(shape, rectangles, count):
    """Matrices, and their shards as ranks send them, back to back in one buffer."""
    whole = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    shards = [whole[:, r.top : r.bottom, r.left : r.right].reshape(-1) for r in rectangles]
    received = torch.cat(shards)
    return whole, received, received.split([x.numel() for x in shards])


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
    whole, received, parts = arrived(shape, rectangles, count)
    runs = [(count, Matrix("m", shape, rectangles))]
    copied = assemble([parts], runs, short_first)
    got = assemble([parts], runs, short_first, received)
    assert torch.equal(got, whole)
    assert got.stride() == copied.stride()
    assert (got.data_ptr() == received.data_ptr()) == in_place
    assert copied.data_ptr() != received.data_ptr()


def test_padding_and_other_matrices_are_not_the_matrix():
    rectangles = cut_at(WIDE, 0, [0, 3, 6])
    whole, received, parts = arrived(WIDE, rectangles, 1)
    matrix = Matrix("m", WIDE, rectangles)
    longer = torch.cat([received, received])
    assert torch.equal(assemble([parts], [(1, matrix)], True, longer), whole)
    two = assemble([parts, parts], [(1, matrix), (1, matrix)], True, longer)
    assert torch.equal(two, torch.cat([whole, whole]))
