"""Layouts of real DTensors: every rank's local part is what its shard of the global matrix says."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_eopt.parallel import collectives as groups
from megatron_eopt.parallel.collectives import joint_group
from megatron_eopt.parallel.dtensor import _rectangles, layout_of_dtensor
from megatron_eopt.parallel.layout import on_one_rank
from megatron_eopt.parallel.rectangles import Rectangle
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import part_of

SHAPES = [(7, 5), (8, 6), (3, 4), (1, 9)]


def matrix(shape):
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)


def spread(x, mesh, placements):
    """Each rank cuts its own part out of what all have: torch scatters strided shards of equal size only."""
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def check(x, full=None):
    """The layout, after comparing this rank's part with its shard, and all parts together with the whole."""
    full = matrix(x.shape) if full is None else full
    layout = layout_of_dtensor(x)
    local, rectangle = x.to_local().detach(), layout.rectangle
    assert layout.shape == tuple(full.shape)
    assert torch.equal(local, part_of(full, rectangle))
    assert sum(rectangle.numel for rectangle in layout.rectangles) == full.numel()
    if layout.group is None:
        assert layout == on_one_rank(layout.shape)
        return layout
    assert layout.ranks == layout.group.size()
    found = [None] * layout.ranks
    dist.all_gather_object(found, (layout.rank, rectangle, layout.rectangles, layout.label), group=layout.group)
    assert found == [
        (rank, rectangle, layout.rectangles, layout.label) for rank, rectangle in enumerate(layout.rectangles)
    ]
    return layout


def two_dimensions(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape in SHAPES:
        for placements in product([Shard(0), Shard(1), _StridedShard(0, split_factor=2)], [Shard(0), Shard(1)]):
            if isinstance(placements[0], _StridedShard) and placements[1] != Shard(0):
                continue
            layout = check(spread(matrix(shape), mesh, placements))
            assert layout.group is dist.group.WORLD
            assert layout.label == "dp=2,tp=2"
        # HSDP: the group is that of the dimension that cuts
        layout = check(spread(matrix(shape), mesh, [Replicate(), Shard(0)]))
        assert layout.group is mesh.get_group("tp")
    # a mesh whose order is not that of the ranks
    turned = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("dp", "tp"))
    layout = check(spread(matrix((8, 6)), turned, [Shard(0), Shard(1)]))
    assert layout.rectangles[3] == Rectangle(0, 4, 0, 3)
    row = [3, 1] if rank % 2 else [2, 0]
    layout = check(spread(matrix((8, 6)), turned, [Replicate(), Shard(0)]))
    assert sorted(dist.get_process_group_ranks(layout.group)) == sorted(row)


def fsdp_over_tp(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False))
    for layer in model:
        layer.weight.data.copy_(matrix(layer.weight.shape))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert check(model[0].weight).dim == 0
    assert check(model[1].weight).dim == 1
    assert layout_of_dtensor(model[1].weight).group is mesh.get_group("tp")
    for layer in model:
        fully_shard(layer, mesh=mesh["fsdp"])
    column, row = model[0].weight, model[1].weight
    assert column.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert row.placements == (Shard(0), Shard(1))
    # tensor parallelism cut the rows first: ranks 0 and 2 share its first half
    assert [rectangle.top for rectangle in check(column).rectangles] == [0, 4, 2, 6]
    # 5 rows on two ranks of FSDP
    assert [rectangle.shape for rectangle in check(row).rectangles] == [(3, 4), (3, 4), (2, 4), (2, 4)]
    assert check(column).group is check(row).group is dist.group.WORLD

    model(torch.ones(2, 6)).sum().backward()
    assert column.grad.placements == column.placements
    assert layout_of_dtensor(column.grad).rectangles == layout_of_dtensor(column).rectangles


def more_dimensions_of_a_tensor(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    assert check(spread(matrix((7, 5)), mesh, [Shard(0), Replicate()])).label == "mesh0=2"
    stacked = torch.arange(4.0 * 3 * 6).view(4, 3, 6)
    for placements in [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(0), Shard(0))]:
        x = spread(stacked, mesh, placements)
        layout = layout_of_dtensor(x)
        assert layout.shape == (4, 18)
        assert torch.equal(x.to_local().flatten(1), part_of(stacked.flatten(1), layout.rectangle))
    x = spread(stacked, mesh, (Shard(0), Shard(2)))
    with pytest.raises(ValueError, match="several separate parts of the matrix"):
        layout_of_dtensor(x)


def refused(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    partial = DTensor.from_local(torch.ones(4, 6), mesh, [Partial(), Shard(0)], run_check=False)
    with pytest.raises(ValueError, match=r"a DTensor of shape \(8, 6\).*Partial.*only Replicate and Shard can be laid"):
        layout_of_dtensor(partial)
    interleaved = spread(matrix((8, 6)), mesh, [Replicate(), _StridedShard(0, split_factor=2)])
    with pytest.raises(ValueError, match=r"_StridedShard.*a rank holds several separate parts of the matrix \(8, 6\)"):
        layout_of_dtensor(interleaved)
    wrong = DTensor.from_local(
        torch.ones(4, 6), mesh, [Replicate(), Shard(0)], run_check=False, shape=(9, 6), stride=(6, 1)
    )
    if mesh.get_coordinate()[1] == 0:
        with pytest.raises(
            ValueError, match=r"this rank holds \(4, 6\), but by its placements Rectangle\(top=0, bottom=5"
        ):
            layout_of_dtensor(wrong)
    elsewhere = DeviceMesh("cpu", torch.tensor([0, 1]))
    x = DTensor.from_local(torch.ones(2, 3), elsewhere, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
    if rank > 1:
        with pytest.raises(ValueError, match="that this rank is no part of"):
            layout_of_dtensor(x)


def groups_that_have_to_be_made(rank):
    halves = ((0, 3), (1, 2))
    own = halves[rank in (1, 2)]
    made = [joint_group(halves, own) for _ in range(2)]
    assert made[0] is made[1]
    assert dist.get_process_group_ranks(made[0]) == list(own)
    if rank < 3:
        made = [joint_group(((0, 1, 2),), (0, 1, 2)) for _ in range(2)]
        assert made[0] is made[1]
        assert dist.get_process_group_ranks(made[0]) == [0, 1, 2]
        total = torch.tensor(rank)
        dist.all_reduce(total, group=made[0])
        assert total == 3


def four_ranks(rank, ranks):
    two_dimensions(rank)
    fsdp_over_tp(rank)
    more_dimensions_of_a_tensor(rank)
    refused(rank)
    groups_that_have_to_be_made(rank)


def test_pieces_are_what_ranks_hold():
    run_ranks(four_ranks, 4)


@st.composite
def cuts_of(draw):
    """Shards, plain and strided, over the dimensions of a mesh."""
    cuts = st.tuples(st.sampled_from([0, 1]), st.integers(1, 4), st.integers(1, 3))
    return tuple(draw(st.lists(cuts, min_size=1, max_size=3)))


@given(cuts=cuts_of(), shape=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_pieces_are_those_of_torchs_placements(cuts, shape):
    placements = [Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor) for dim, _, factor in cuts]
    expected, whole = [], True
    for coordinates in product(*(range(ranks) for _, ranks, _ in cuts)):
        local = matrix(shape)
        for placement, (_, ranks, _), rank in zip(placements, cuts, coordinates, strict=True):
            local = placement._split_tensor(local, ranks, with_padding=False)[0][rank]
        size, offset = _compute_local_shape_and_global_offset(
            shape, [ranks for _, ranks, _ in cuts], list(coordinates), placements
        )
        found = Rectangle(offset[0], offset[0] + size[0], offset[1], offset[1] + size[1])
        whole = whole and torch.equal(part_of(matrix(shape), found), local)
        expected.append(found)
    assert _rectangles(shape, cuts) == (tuple(expected) if whole else None)


class World:
    """Stands for the group of eight ranks that init_process_group bound to a device."""

    bound_device_id = torch.device("cuda", 0)

    def size(self):
        return 8


def test_a_group_that_some_ranks_cannot_make_is_refused(monkeypatch):
    monkeypatch.setattr(groups, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=World())))
    with pytest.raises(ValueError, match=r"ranks \(0, 1, 2, 3\) need a group.*only some of the 8 ranks .* device_id"):
        joint_group(((0, 1, 2, 3),), (0, 1, 2, 3))
