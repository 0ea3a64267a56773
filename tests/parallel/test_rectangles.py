"""How matrices are cut, and which dimension a cut has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.rectangles import cut, cut_at, cut_dimension, strips, whole
from tests.distributed.shards import part_of
from tests.parallel.plans import quarters


def assert_tiles(rectangles, shape):
    held = torch.zeros(shape)
    for rectangle in rectangles:
        part_of(held, rectangle).add_(1)
    assert (held == 1).all()
    assert sum(rectangle.numel for rectangle in rectangles) == held.numel()


@given(data=st.data(), shape=st.tuples(st.integers(1, 6), st.integers(1, 6)), dim=st.sampled_from([0, 1]))
def test_shards_tile_the_matrix_and_say_their_dimension(data, shape, dim):
    inner = data.draw(st.lists(st.integers(0, shape[dim]), max_size=4).map(sorted))
    rectangles = cut_at(shape, dim, [0, *inner, shape[dim]])
    assert_tiles(rectangles, shape)
    assert cut_dimension(shape, rectangles) == (dim if inner else None)


@pytest.mark.parametrize(
    ("shape", "rectangles", "dim"),
    [
        ((4, 6), cut((4, 6), 0, 2), 0),
        ((4, 6), cut((4, 6), 0, 2)[::-1], None),  # another order
        ((4, 6), quarters((4, 6)), None),
        ((4, 6), (whole((4, 6)),), None),
        ((4, 6), (whole((4, 6)),) * 3, None),
        ((0, 6), cut((0, 6), 0, 2), None),  # without entries
        ((0, 6), cut((0, 6), 1, 2), 1),
    ],
)
def test_the_dimension_of_a_cut(shape, rectangles, dim):
    assert cut_dimension(shape, rectangles) == dim


def test_equal_shards_have_no_remainder():
    assert {rectangle.shape for rectangle in cut((4, 6), 1, 3)} == {(4, 2)}
    with pytest.raises(ValueError, match=r"dimension 1 of a matrix \(4, 7\) cannot be cut into 2 equal parts"):
        cut((4, 7), 1, 2)


def test_equal_shards_side_by_side_are_one_strip_however_many():
    """So that a step takes as many copies on 4,096 ranks as on four."""
    shape = (14336, 64)
    rows = cut_at(shape, 0, [min(4 * rank, 14336) for rank in range(4097)])
    assert [(x.ranks, x.rectangles[0].shape) for x in strips((rows,))] == [(3584, shape), (512, (0, 64))]
    columns = cut_at((64, 4096), 1, list(range(4097)))
    assert [(x.ranks, x.dims) for x in strips((columns,))] == [(4096, (1,))]
    assert len(strips((rows, columns))) == 2
    assert [x.ranks for x in strips((rows[::-1],))] == [512, *[1] * 3584]
