"""The update of a parameter that is made of several matrices is the updates of these matrices, stored separately."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import GATE_UP, WHOLE, concatenated, experts, interleaved, query_key_value
from tests.optimizers.family import ELEMENTWISE, build, having, matrices, take
from tests.parallel.test_layout import Group


def parameter(x, split=None, **attributes):
    result = torch.nn.Parameter(x.clone())
    for name, value in attributes.items() if split is None else [*attributes.items(), ("logical_matrices", split)]:
        setattr(result, name, value)
    return result


def test_what_a_parameter_declares_wins():
    p = parameter(torch.ones(8, 4), WHOLE, is_qkv=True, qkv_split_shapes=[2, 1, 1])
    settings = {"split_qkv": True, "is_qkv_fn": lambda p: p.is_qkv, "qkv_split_shapes": [4, 2, 2]}
    assert TensorParallelMuon([p], **settings).split_of(p) == WHOLE
    p.logical_matrices = GATE_UP
    assert TensorParallelMuon([p], **settings).split_of(p) == TensorParallelMuon([p]).split_of(p) == GATE_UP
    del p.logical_matrices
    assert TensorParallelMuon([p], **settings).split_of(p) == query_key_value([2, 1, 1])
    assert TensorParallelMuon([p]).split_of(p) == WHOLE


@pytest.mark.parametrize(
    ("shape", "split", "message"),
    [
        ((2, 4, 4), None, r"shape \(2, 4, 4\): give it to another optimizer \(AdamW, say\), or declare a stack of 2 m"),
        ((2, 4, 4), GATE_UP, "declare a stack of 2 matrices"),
        ((4, 4), experts(4), r"parameter 0 of group 0 has shape \(4, 4\): give it to another optimizer"),
        ((2, 4, 4), experts(3), r"a parameter of shape \(2, 4, 4\) is declared as a stack of 3 matrices"),
        (
            (5, 4),
            GATE_UP,
            r"shape \(5, 4\) is not what was declared of it: 5 rows over all ranks are not those declared",
        ),
        ((8, 4), interleaved(q=2, k=1), r"declared of it: 8 rows .* one query group \[2, 1\]"),
    ],
)
def test_a_parameter_that_is_another_than_declared_is_refused(shape, split, message):
    opt = TensorParallelMuon([torch.nn.Parameter(torch.ones(2, 2))])
    groups = len(opt.param_groups)
    with pytest.raises(ValueError, match=message):
        TensorParallelMuon([parameter(torch.ones(shape), split)])
    with pytest.raises(ValueError, match=message.replace("group 0", "group 1")):
        opt.add_param_group({"params": [parameter(torch.ones(shape), split)]})
    assert len(opt.param_groups) == groups


def test_blockwise_takes_pieces_that_each_rank_has_the_like_of():
    groups = SimpleNamespace(tp=Group(2), expt_tp=Group(1))
    sharded = {"tensor_model_parallel": True, "partition_dim": 0}
    p = parameter(torch.randn(4, 6), GATE_UP, **sharded)
    opt = TensorParallelMuon([p], pg_collection=groups, tp_mode="blockwise")
    assert [layout.rectangle.shape for layout in opt.matrix_layouts(p)] == [(2, 6)] * 2
    for split, rows in ((concatenated(kv=4, rope=4), 8), (interleaved(q=6, k=2), 8)):
        p = parameter(torch.randn(4, 6), split, **sharded)
        with pytest.raises(
            ValueError, match=f"blockwise cannot split .* shards end inside the {rows} rows that hold all"
        ):
            TensorParallelMuon([p], pg_collection=groups, tp_mode="blockwise")
        TensorParallelMuon([p], pg_collection=groups)


def test_a_stack_cannot_be_cut_along_its_leading_dimension():
    groups = SimpleNamespace(tp=Group(2), expt_tp=Group(2))
    p = parameter(torch.ones(2, 4, 4), experts(2), tensor_model_parallel=True, partition_dim=0)
    with pytest.raises(ValueError, match="partition_dim of a stack of matrices is 1 or 2, got 0"):
        TensorParallelMuon([p], pg_collection=groups)


DECLARED = {"logical_matrices": concatenated(a=8, b=4), "qkv_split_shapes": [2, 2, 2], "is_qkv": True}
CHANGES = [(name, "logical_matrices") for name in OPTIMIZERS if name not in ELEMENTWISE]
CHANGES += [(name, what) for name in having("split_qkv") for what in ("qkv_split_shapes", "is_qkv")]


@pytest.mark.parametrize(("name", "what"), CHANGES)
def test_declarations_that_change_between_steps_are_refused(name, what):
    (p,) = matrices(1, (12, 4))
    p.is_qkv, p.qkv_split_shapes = what == "qkv_split_shapes", [1, 1, 1]
    fused = {"split_qkv": True, "is_qkv_fn": lambda p: p.is_qkv}
    optimizer = build(name, [p], **(fused if name in having("split_qkv") else {}))
    take(optimizer, 1)
    before = p.detach().clone()
    setattr(p, what, DECLARED[what])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.* is declared otherwise than in the steps before"):
        take(optimizer, 1)
    assert torch.equal(p, before)
