from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.matrices import Part, Split
from megatron_eopt.parallel.attributes import is_expert, is_sharded, layout_of
from megatron_eopt.parallel.layout import Layout, local_rows, on_one_rank, split_layout
from megatron_eopt.parallel.rectangles import Rectangle, cut, cut_at
from tests.distributed.shards import part_of
from tests.matrices.models import split_rows


class Group:
    """Stands for a process group where nothing is exchanged."""

    def __init__(self, size, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def parameter(shape=(4, 6), **attributes):
    result = torch.nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


TP, EXPERT_TP = Group(2, 1), Group(4, 3)
WHOLE = Layout((4, 6), (Rectangle(0, 4, 0, 6),))


def tp(shape, dim):
    return Layout(shape, cut(shape, dim, 2), TP, "tp")


def expert_tp(shape, dim):
    return Layout(shape, cut(shape, dim, 4), EXPERT_TP, "expt_tp")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, WHOLE),
        ({"tensor_model_parallel": True, "partition_dim": 0}, tp((8, 6), 0)),
        ({"tensor_model_parallel": True, "partition_dim": 1}, tp((4, 12), 1)),
        # Transformer Engine sets partition_dim on replicated weights as well
        ({"tensor_model_parallel": False, "partition_dim": 0}, WHOLE),
        ({"partition_dim": 0}, tp((8, 6), 0)),
        ({"partition_dim": -1}, WHOLE),
        ({"partition_dim": 1, "expert_tp": True}, expert_tp((4, 24), 1)),
        ({"partition_dim": 0, "allreduce": False}, expert_tp((16, 6), 0)),
    ],
)
def test_from_megatrons_attributes(attributes, expected):
    made = parameter(**attributes)
    layout = layout_of(made, TP, EXPERT_TP)
    assert layout == expected
    assert layout.rectangle.shape == (4, 6)
    assert layout.sharded == is_sharded(made) == (expected != WHOLE)
    assert is_expert(made) == (expected.label == "expt_tp")


@pytest.mark.parametrize("group", [None, Group(1)])
def test_one_rank_shards_nothing(group):
    layout = layout_of(parameter(tensor_model_parallel=True, partition_dim=0), group)
    assert layout == on_one_rank((4, 6)) == WHOLE
    assert not layout.sharded
    assert (layout.ranks, layout.rank, layout.dim) == (1, 0, None)


def test_a_dimension_that_a_matrix_has_not_is_refused():
    with pytest.raises(
        ValueError, match=r"partition_dim of a matrix is 0 or 1, got 2 on a parameter of shape \(4, 6\)"
    ):
        layout_of(parameter(tensor_model_parallel=True, partition_dim=2), TP)


@st.composite
def grids(draw):
    """A fused matrix of some groups, cut anywhere along rows, columns, both or not at all, in any order of ranks."""
    shapes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows, cols = draw(st.integers(1, 4)) * sum(shapes), draw(st.integers(1, 5))
    lines = [[0, *sorted(draw(st.lists(st.integers(0, length), max_size=3))), length] for length in (rows, cols)]
    cells = [
        Rectangle(rectangle.top, rectangle.bottom, across.left, across.right)
        for rectangle in cut_at((rows, cols), 0, lines[0])
        for across in cut_at((rows, cols), 1, lines[1])
    ]
    rectangles = tuple(draw(st.permutations(cells)))
    return Layout((rows, cols), rectangles, Group(len(rectangles)), "tp"), shapes


@given(grid=grids())
def test_logical_matrices_of_any_cut(grid):
    layout, shapes = grid
    split = Split(tuple(Part(f"part {i}", rows) for i, rows in enumerate(shapes)))
    matrix = torch.arange(layout.shape[0] * layout.shape[1]).view(layout.shape)
    logical, layouts = split_rows(matrix, shapes), split_layout(layout, split)
    assert [part.shape for part in layouts] == [tuple(x.shape) for x in logical]
    assert {(part.group, part.label) for part in layouts} == {(layout.group, layout.label)}

    times_held = [torch.zeros_like(x) for x in logical]
    for rank, rectangle in enumerate(layout.rectangles):
        shard = part_of(matrix, rectangle)
        rows = local_rows(replace(layout, group=Group(layout.ranks, rank)), split)
        parts = rows.split(shard)
        for i, part in enumerate(parts):
            part_of(times_held[i], layouts[i].rectangles[rank]).add_(1)
            assert torch.equal(part, part_of(logical[i], layouts[i].rectangles[rank]))
        assert torch.equal(rows.merge(parts), shard)
    assert all((held == 1).all() for held in times_held)
