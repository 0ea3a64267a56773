"""State tensors of every described kind, cut over ranks: they tile a global tensor, the same at any number of ranks.

And under which names: of layers that are stacked, or of each layer.
"""

import itertools

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_eopt.matrices import query_key_value
from megatron_eopt.megatron.checkpoints.shards import joined, sharded_state
from megatron_eopt.parallel.layout import Layout, split_layout
from megatron_eopt.parallel.rectangles import cut, whole
from megatron_eopt.step.state import StateTensor
from tests.parallel.test_layout import Group

LAYERS, LAYER = 3, 1
ROWS, COLS = 48, 32
SPLIT = query_key_value([16, 4, 4])


def parameter(dim, ranks, rank, swiglu, layer=LAYER):
    """What Megatron's model says of one rank's shard of one of three stacked layers."""
    shape = [ROWS, COLS]
    offsets = [(0, layer, LAYERS)]
    if dim is not None:
        shape[dim] //= ranks
        offsets.append((1 + dim, rank, ranks))
    replica = (0, rank if dim is None else 0, 0)
    data = torch.zeros(shape)
    tensor = ShardedTensor.from_rank_offsets("fc1.weight", data, *offsets, replica_id=replica, prepend_axis_num=1)
    return apply_swiglu_sharded_factory(tensor, offsets[:1]) if swiglu else tensor


def layouts_of(dim, ranks, rank, split):
    pieces = (whole((ROWS, COLS)),) if dim is None else cut((ROWS, COLS), dim, ranks)
    layout = Layout((ROWS, COLS), pieces, Group(ranks, rank) if dim is not None else None)
    return split_layout(layout, SPLIT) if split else [layout]


def global_state(tensor, layouts):
    sides = dict(zip(("rows", "columns"), layouts[tensor.matrix].shape, strict=True))
    shape = [dim if isinstance(dim, int) else sides[dim] for dim in tensor.dims]
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def local_shard(tensor, state, layouts, swiglu, ranks, rank):
    """This rank's shard of a state whose rows are in the order of the model: all gates, then all ups."""
    piece = layouts[tensor.matrix].rectangle
    rows = list(range(piece.top, piece.bottom))
    if swiglu and layouts[0].ranks > 1 and layouts[0].shape[1] == piece.shape[1]:
        half = ROWS // 2 // ranks
        rows = [start + rank * half + i for start in (0, ROWS // 2) for i in range(half)]
    for axis, dim in enumerate(tensor.dims):
        if dim == "rows":
            state = state.index_select(axis, torch.tensor(rows, dtype=torch.long))
        elif dim == "columns":
            state = state.narrow(axis, piece.left, piece.shape[1])
    return state.contiguous()


DIMS = [("rows",), ("columns",), (), ("rows", 3), ("columns", 3), (5, 5), ("rows", "columns")]
CASES = [
    *itertools.product(DIMS, (0, 1, None), [False], [None]),
    *itertools.product(DIMS, (0, None), [True], [None]),
    *itertools.product(DIMS, (0, None), [False], range(3)),
]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])  # 8: more ranks than the query groups of SPLIT, which are two
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_shards_tile_one_global_tensor(dims, ranks):
    """Cut along either side or not at all, gate and up, and each of several logical matrices."""
    for _, dim, swiglu, matrix in (case for case in CASES if case[0] == dims):
        tensor, found = StateTensor("moment", dims, matrix or 0), {}
        for rank in range(ranks):
            layouts = layouts_of(dim, ranks, rank, matrix is not None)
            state = global_state(tensor, layouts)
            local = local_shard(tensor, state, layouts, swiglu, ranks, rank)
            saved = sharded_state(tensor, local, parameter(dim, ranks, rank, swiglu), layouts)
            for each in saved:
                assert each.key == "optimizer.state.moment.fc1.weight"
                assert each.global_offset[0] == LAYER
                assert each.global_shape == (LAYERS, *(state.shape or (1,)))
                assert each.data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
                start, shape = each.global_offset[1:], each.local_shape[1:]
                for index in itertools.product(*map(range, shape)) if is_main_replica(each.replica_id) else ():
                    at = tuple(map(sum, zip(index, start, strict=True)))
                    assert at not in found
                    found[at] = each.data[0][index]
            assert torch.equal(joined(tensor, [each.data for each in saved], tuple(local.shape)), local)
        expected = state.view(state.shape or (1,))
        assert len(found) == expected.numel()
        assert all(expected[at] == value for at, value in found.items())


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("computes", [0, 2])
def test_a_tensor_of_one_rank_is_saved_by_it_alone(computes, swiglu):
    tensor, whole_tensor = StateTensor("L", (5, 5), rank=computes), torch.arange(25.0).view(5, 5)
    for rank in range(4):
        layouts = layouts_of(0, 4, rank, split=False)
        local = whole_tensor if rank == computes else torch.empty(0, 0)
        assert tensor.local_shape(layouts) == tuple(local.shape)
        saved = sharded_state(tensor, local, parameter(0, 4, rank, swiglu), layouts)
        found = [(each.global_shape, is_main_replica(each.replica_id)) for each in saved]
        assert found == ([((LAYERS, 5, 5), True)] if rank == computes else [])
        assert torch.equal(joined(tensor, [each.data for each in saved], tuple(local.shape)), local)
