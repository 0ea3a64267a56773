from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.rectangles import Rectangle, cut, cut_at, cut_dimension, whole


@st.composite
def edges_of(draw, length):
    """From 0 to ``length``, with equal ones."""
    inner = draw(st.lists(st.integers(0, length), max_size=4))
    return [0, *sorted(inner), length]


def cells(rectangle):
    return [
        (row, col) for row in range(rectangle.top, rectangle.bottom) for col in range(rectangle.left, rectangle.right)
    ]


def assert_tiles(rectangles, shape):
    covered = [cell for rectangle in rectangles for cell in cells(rectangle)]
    assert len(covered) == len(set(covered))
    assert sorted(covered) == cells(whole(shape))
    assert sum(rectangle.numel for rectangle in rectangles) == shape[0] * shape[1]


@given(part=st.integers(0, 4), ranks=st.integers(1, 5), other=st.integers(0, 4), dim=st.sampled_from([0, 1]))
def test_equal_pieces_tile_the_matrix(part, ranks, other, dim):
    shape = (part * ranks, other) if dim == 0 else (other, part * ranks)
    rectangles = cut(shape, dim, ranks)
    assert len(rectangles) == ranks
    assert {rectangle.shape for rectangle in rectangles} == {(part, other) if dim == 0 else (other, part)}
    assert_tiles(rectangles, shape)


@given(data=st.data(), shape=st.tuples(st.integers(1, 6), st.integers(1, 6)), dim=st.sampled_from([0, 1]))
def test_uneven_pieces_tile_the_matrix_and_say_their_dimension(data, shape, dim):
    edges = data.draw(edges_of(shape[dim]))
    rectangles = cut_at(shape, dim, edges)
    assert [rectangle.shape[dim] for rectangle in rectangles] == [end - start for start, end in pairwise(edges)]
    assert_tiles(rectangles, shape)
    assert cut_dimension(shape, rectangles) == (dim if len(rectangles) > 1 else None)


@given(data=st.data(), shape=st.tuples(st.integers(2, 6), st.integers(2, 6)))
def test_both_dimensions_cut_are_no_dimension(data, shape):
    row, col = data.draw(st.integers(1, shape[0] - 1)), data.draw(st.integers(1, shape[1] - 1))
    rows, cols = [(0, row), (row, shape[0])], [(0, col), (col, shape[1])]
    rectangles = tuple(Rectangle(*held, *across) for held in rows for across in cols)
    assert_tiles(rectangles, shape)
    assert cut_dimension(shape, rectangles) is None


def test_another_order_is_no_dimension():
    first, second = cut((4, 6), 0, 2)
    assert cut_dimension((4, 6), (first, second)) == 0
    assert cut_dimension((4, 6), (second, first)) is None


@pytest.mark.parametrize("ranks", [1, 3])
def test_whole_pieces_are_no_dimension(ranks):
    assert cut_dimension((4, 6), (whole((4, 6)),) * ranks) is None


def test_a_matrix_without_entries_has_no_dimension():
    assert cut_dimension((0, 6), cut((0, 6), 0, 2)) is None
    assert cut_dimension((0, 6), cut((0, 6), 1, 2)) == 1


def test_a_remainder_is_refused():
    with pytest.raises(ValueError, match=r"dimension 1 of a matrix \(4, 7\) cannot be cut into 2 equal parts"):
        cut((4, 7), 1, 2)
