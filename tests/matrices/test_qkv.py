from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.matrices import check_split_shapes, merge_piece, merge_rows, part_rows, split_piece, split_rows


@given(shapes=st.lists(st.integers(1, 5), min_size=1, max_size=4), groups=st.integers(0, 4), cols=st.integers(0, 5))
def test_split_and_merge_are_exact_inverses(shapes, groups, cols):
    x = torch.arange(groups * sum(shapes) * cols, dtype=torch.float32).view(groups * sum(shapes), cols)
    parts = split_rows(x, shapes)
    assert [part.shape for part in parts] == [(groups * rows, cols) for rows in shapes]
    assert torch.equal(merge_rows(parts, shapes), x)


def test_groups_are_interleaved():
    # two query groups of two q rows, one k row and one v row
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [11.0], [12.0], [13.0], [14.0]])
    q, k, v = split_rows(rows, [2, 1, 1])
    assert q.flatten().tolist() == [1, 2, 11, 12]
    assert k.flatten().tolist() == [3, 13]
    assert v.flatten().tolist() == [4, 14]


def test_a_broken_group_is_refused():
    with pytest.raises(ValueError, match=r"9 rows are not a multiple of the 4 of one query group \[2, 1, 1\]"):
        split_rows(torch.ones(9, 2), [2, 1, 1])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (None, "needs qkv_split_shapes: 3 positive integers, got None"),
        ([2, 1], r"3 positive integers, got 2: \[2, 1\]"),
        ([2, 1, 1, 1], "got 4"),
        ([2, 1.0, 1], r"must be integers, got \[2, 1.0, 1\]"),
        ([2, True, 1], "must be integers"),
        ([2, 0, 1], r"must be positive, got \[2, 0, 1\]"),
        ([2, -1, 1], "must be positive"),
    ],
)
def test_each_wrong_shape_has_its_own_error(shapes, message):
    with pytest.raises(ValueError, match=message):
        check_split_shapes(shapes)


def test_a_gate_makes_four_parts():
    assert check_split_shapes([4, 4, 2, 2], (3, 4)) == (4, 4, 2, 2)


@st.composite
def fused(draw):
    """A fused matrix of unique entries, the rows of its parts in one group, and two cuts."""
    shapes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows, cols = draw(st.integers(1, 4)) * sum(shapes), draw(st.integers(0, 3))
    top, bottom = sorted(draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    return torch.arange(rows * cols).view(rows, cols), shapes, top, bottom


@given(case=fused())
def test_a_piece_is_split_as_the_whole_is(case):
    x, shapes, top, bottom = case
    parts = split_piece(x[top:bottom], top, shapes)
    ranges = part_rows(top, bottom, shapes)
    expected = [part[start:end] for part, (start, end) in zip(split_rows(x, shapes), ranges, strict=True)]
    assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
    assert torch.equal(merge_piece(parts, top, bottom - top, shapes), x[top:bottom])


@given(case=fused())
def test_consecutive_pieces_hold_consecutive_rows(case):
    x, shapes, top, bottom = case
    edges = [0, top, bottom, len(x)]
    held = [part_rows(start, end, shapes) for start, end in pairwise(edges)]
    for ranges, rows in zip(zip(*held, strict=True), shapes, strict=True):
        ends = [0, *(end for _, end in ranges)]
        assert [start for start, _ in ranges] == ends[:-1]
        assert ends[-1] == len(x) // sum(shapes) * rows


def test_a_piece_may_begin_and_end_within_a_group():
    # the last q row and k and v of one group, two groups, q of the next
    assert part_rows(1, 14, [2, 1, 1]) == [(1, 8), (0, 3), (0, 3)]
    assert part_rows(2, 3, [2, 1, 1]) == [(2, 2), (0, 1), (0, 0)]


def test_rows_that_lie_together_are_not_copied():
    x = torch.arange(10.0).view(5, 2)
    assert all(
        part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in split_piece(x, 3, [8, 1])
    )


def test_parts_of_another_piece_are_refused():
    parts = split_piece(torch.ones(5, 2), 2, [2, 1, 1])
    with pytest.raises(
        ValueError, match=r"rows 0 to 5 of groups \[2, 1, 1\] are parts of \[3, 1, 1\] rows, got .*\[2, 2, 1\]"
    ):
        merge_piece(parts, 0, 5, [2, 1, 1])
