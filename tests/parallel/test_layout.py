from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.matrices import Part, Split, query_key_value
from megatron_eopt.parallel.attributes import is_expert, is_sharded, layout_of
from megatron_eopt.parallel.layout import Layout, local_rows, on_one_rank, split_layout
from megatron_eopt.parallel.rectangles import Rectangle, cut, cut_at, cut_twice, whole
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
        ({"partition_dim": 1}, tp((4, 12), 1)),
        ({"partition_dim": -1}, WHOLE),
        ({"tensor_model_parallel": True, "partition_dim": -1}, WHOLE),
        ({"partition_dim": 1, "expert_tp": True}, expert_tp((4, 24), 1)),
        ({"partition_dim": 0, "allreduce": False}, expert_tp((16, 6), 0)),
        ({"tensor_model_parallel": True, "partition_dim": 0, "allreduce": True}, tp((8, 6), 0)),
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


def test_what_a_layout_says():
    layout = tp((8, 6), 0)
    assert (layout.ranks, layout.rank, layout.dim, layout.sharded) == (2, 1, 0, True)
    assert layout.rectangle == Rectangle(4, 8, 0, 6)
    assert tp((4, 12), 1).dim == 1
    replicated = Layout((4, 6), (whole((4, 6)),) * 2, TP, "dp")
    assert (replicated.dim, replicated.sharded) == (None, False)
    # the last rank holds nothing, the first everything
    uneven = Layout((4, 6), cut_at((4, 6), 0, [0, 4, 4]), TP, "tp")
    assert (uneven.rectangle.numel, uneven.dim, uneven.sharded) == (0, 0, True)


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
    matrix = torch.arange(layout.shape[0] * layout.shape[1]).view(layout.shape)
    logical, layouts = split_rows(matrix, shapes), split_layout(layout, query_key_value(shapes))
    assert [part.shape for part in layouts] == [tuple(x.shape) for x in logical]
    assert {(part.group, part.label) for part in layouts} == {(layout.group, layout.label)}

    times_held = [torch.zeros_like(x) for x in logical]
    for rank, rectangle in enumerate(layout.rectangles):
        shard = part_of(matrix, rectangle)
        rows = local_rows(replace(layout, group=Group(layout.ranks, rank)), query_key_value(shapes))
        parts = rows.split(shard)
        for i, part in enumerate(parts):
            part_of(times_held[i], layouts[i].rectangles[rank]).add_(1)
            assert torch.equal(part, part_of(logical[i], layouts[i].rectangles[rank]))
        assert torch.equal(rows.merge(parts), shard)
    assert all((held == 1).all() for held in times_held)


@st.composite
def cuts(draw, step):
    """How a matrix is cut twice: dimension and ranks of the first cut, ranks of the second, padding, what a rank has.

    Shards of the first cut have a multiple of ``step`` rows.
    """
    dim, ranks, again = draw(st.sampled_from([0, 1])), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    of_shard = step * draw(st.integers(1, 5))
    padding = -of_shard % again + again * draw(st.integers(0, 2))
    return dim, ranks, again, padding, ((of_shard + padding) // again, draw(st.integers(1, 3)))


SPLITS = {"gate and up": Split((Part("gate"), Part("up")), "per_shard"), "qkv": query_key_value((3, 1, 1))}


@pytest.mark.parametrize("name", SPLITS)
@given(data=st.data())
def test_logical_matrices_of_two_cuts(name, data):
    split = SPLITS[name]
    dim, ranks, again, padding, held = data.draw(cuts(2 if name == "gate and up" else 5))
    shape, grid = cut_twice(held, dim, ranks, again, padding)
    whole_matrix = torch.arange(shape[0] * shape[1]).view(shape)
    shards = ranks if dim == 0 else 1
    if name == "gate and up":  # a shard of tensor parallelism holds a part of gate over a part of up
        halves = [half.chunk(shards) for half in whole_matrix.chunk(2)]
        stored = torch.cat([half[shard] for shard in range(shards) for half in halves])
        logical = list(whole_matrix.chunk(2))
    else:
        stored, logical = whole_matrix, split_rows(whole_matrix, [3, 1, 1])
    rectangles = tuple(rectangle for row in grid for rectangle in row)
    times_held = [torch.zeros_like(x) for x in logical]
    for rank, rectangle in enumerate(rectangles):
        behind = held[0] - rectangle.shape[0]
        layout = Layout(shape, rectangles, Group(len(rectangles), rank), "x", shards=shards, padding=behind)
        local = torch.nn.functional.pad(part_of(stored, rectangle), (0, 0, 0, behind), value=-1)
        rows, layouts = local_rows(layout, split), split_layout(layout, split)
        parts = rows.split(local)
        for part, lying, matrix, times in zip(parts, layouts, logical, times_held, strict=True):
            assert lying.shape == tuple(matrix.shape)
            assert torch.equal(part, part_of(matrix, lying.rectangle))
            part_of(times, lying.rectangle).add_(1)
        assert torch.equal(rows.merge(parts), torch.where(local < 0, 0, local))
    assert all((times == 1).all() for times in times_held)


@pytest.mark.parametrize(
    ("attributes", "shape", "label", "padding"),
    [
        ({"is_gtp_weight_remat": True}, (12, 6), "gtp_remat", 0),
        ({"is_gtp_weight_remat": True, "pad_length": 3}, (9, 6), "gtp_remat", 3),
        # a shard of experts goes by the groups of experts
        ({"is_gtp_weight_remat": True, "pad_length": 1, "allreduce": False}, (7, 6), "expt_gtp_remat", 1),
        ({"is_gtp_weight_remat": True, "partition_dim": 0}, (12, 6), "gtp_remat", 0),
    ],
)
def test_a_second_cut_alone(attributes, shape, label, padding):
    last = {"gtp_group": Group(3, 2), "expert_gtp_group": Group(2, 1)}
    layout = layout_of(parameter(**attributes), Group(1), Group(1), **last)
    assert (layout.shape, layout.label, layout.padding, layout.shards) == (shape, label, padding, 1)
    assert layout.rectangle.bottom == shape[0]
    alone = layout_of(parameter(**attributes), Group(1), Group(1), Group(1), Group(1))
    assert alone == on_one_rank((4, 6))
