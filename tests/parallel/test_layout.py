import pytest
import torch

from megatron_eopt.parallel import Layout, layout_of
from megatron_eopt.parallel.exchange import own_shard


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


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, Layout((4, 6))),
        ({"tensor_model_parallel": True, "partition_dim": 0}, Layout((8, 6), 0, TP)),
        ({"tensor_model_parallel": True, "partition_dim": 1}, Layout((4, 12), 1, TP)),
        # Transformer Engine sets partition_dim on replicated weights as well
        ({"tensor_model_parallel": False, "partition_dim": 0}, Layout((4, 6))),
        ({"partition_dim": 0}, Layout((4, 6))),
        ({"tensor_model_parallel": True, "partition_dim": -1}, Layout((4, 6))),
        ({"partition_dim": 1, "expert_tp": True}, Layout((4, 24), 1, EXPERT_TP)),
        ({"partition_dim": 0, "allreduce": False}, Layout((16, 6), 0, EXPERT_TP)),
        ({"tensor_model_parallel": True, "partition_dim": 0, "allreduce": True}, Layout((8, 6), 0, TP)),
    ],
)
def test_from_megatrons_attributes(attributes, expected):
    assert layout_of(parameter(**attributes), TP, EXPERT_TP) == expected


@pytest.mark.parametrize("group", [None, Group(1)])
def test_one_rank_shards_nothing(group):
    layout = layout_of(parameter(tensor_model_parallel=True, partition_dim=0), group)
    assert layout == Layout((4, 6))
    assert not layout.sharded


def test_a_dimension_that_a_matrix_has_not_is_refused():
    with pytest.raises(
        ValueError, match=r"partition_dim of a matrix is 0 or 1, got 2 on a parameter of shape \(4, 6\)"
    ):
        layout_of(parameter(tensor_model_parallel=True, partition_dim=2), TP)


def test_shards_and_logical_matrices():
    layout = Layout((8, 6), 0, TP)
    assert layout.shard_shape == (4, 6)
    assert layout.with_shard_rows(3) == Layout((6, 6), 0, TP)
    assert Layout((4, 12), 1, TP).with_shard_rows(3) == Layout((3, 12), 1, TP)
    matrix = torch.arange(48.0).view(8, 6)
    assert torch.equal(own_shard(matrix, layout), matrix[4:])
    assert torch.equal(own_shard(matrix, Layout((8, 6), 1, TP)), matrix[:, 3:])
