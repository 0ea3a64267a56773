"""What Muon tells of its matrices, group by group."""

import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.settings.groups import by_parameter


def two_groups():
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 4), (4, 16))]
    groups = [{"params": params[:1]}, {"params": params[1:], "extra_scale_factor": 0.5, "num_ns_steps": 10}]
    return TensorParallelMuon(groups), params


def test_matrices_are_described_with_the_scale_of_their_group():
    optimizer, params = two_groups()
    described = optimizer.described_matrices()
    assert [(m.shape, m.scale) for p in params for m in described[p]] == [((8, 4), 8**0.5), ((4, 16), 0.5 * 16**0.5)]


def test_ranks_compare_what_a_group_says():
    p, q = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    groups = [{"params": [p], "lr": 0.5, "tag": "x"}, {"params": [q]}]
    found = by_parameter(groups, ["lr", "tag"], {"lr": 0.1, "split_qkv": False}, {"tag"})
    assert found == {p: {"lr": 0.5, "split_qkv": False}, q: {"lr": 0.1, "split_qkv": False}}
