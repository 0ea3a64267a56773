"""What is marked on a model before an optimizer is built."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.megatron.tagging import tag_fused_projections
from tests.parallel.test_layout import Group


class Attention(torch.nn.Module):
    def __init__(self, rows, groups=2, **config):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_query_groups=groups, kv_channels=8, **config)
        self.linear_qkv = torch.nn.Linear(16, rows, bias=False)
        self.linear_proj = torch.nn.Linear(32, 16, bias=False)


def groups(tp=1, **more):
    return SimpleNamespace(tp=Group(tp), expt_tp=Group(1), **more)


def test_each_projection_gets_the_shapes_of_its_own_attention():
    language, encoder = Attention(64), Attention(96, groups=4)
    gated = Attention(96, attention_output_gate=True)
    tag_fused_projections([torch.nn.ModuleList([language, encoder]), gated], groups())
    assert language.linear_qkv.weight.qkv_split_shapes == [16, 8, 8]
    assert encoder.linear_qkv.weight.qkv_split_shapes == [8, 8, 8]
    assert gated.linear_qkv.weight.qkv_split_shapes == [16, 16, 8, 8]
    assert all(each.linear_qkv.weight.is_qkv for each in (language, encoder, gated))
    assert not hasattr(language.linear_proj.weight, "is_qkv")


def test_a_shard_that_ends_inside_a_query_group_is_marked():
    attention = Attention(16)  # a quarter of the 64 rows of two groups
    attention.linear_qkv.weight.tensor_model_parallel = True
    attention.linear_qkv.weight.partition_dim = 0
    tag_fused_projections([attention], groups(tp=4))
    assert attention.linear_qkv.weight.is_qkv is True


def test_a_projection_that_its_config_does_not_describe_is_refused_before_any_is_marked():
    fine, other = Attention(64), Attention(72)
    with pytest.raises(ValueError, match=r"1\.linear_qkv\.weight has 72 rows over all ranks, but 2 query groups of"):
        tag_fused_projections([torch.nn.ModuleList([fine, other])], groups())
    assert not hasattr(fine.linear_qkv.weight, "is_qkv")


def test_a_frozen_projection_is_left_alone():
    attention = Attention(72)
    attention.linear_qkv.weight.requires_grad = False
    tag_fused_projections([attention], groups())
    assert not hasattr(attention.linear_qkv.weight, "is_qkv")
