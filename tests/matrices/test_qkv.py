import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.matrices import check_split_shapes, merge_rows, split_rows


@given(shapes=st.lists(st.integers(1, 5), min_size=1, max_size=4), groups=st.integers(1, 4), cols=st.integers(1, 5))
def test_split_and_merge_are_exact_inverses(shapes, groups, cols):
    x = torch.arange(groups * sum(shapes) * cols, dtype=torch.float32).view(-1, cols)
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
