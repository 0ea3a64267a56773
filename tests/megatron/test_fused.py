"""What fused parameters of Megatron's modules are made of, where no real run on a CPU has them, and their marks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_eopt import matrices
from megatron_eopt.matrices import ATTRIBUTE, GATE_UP, WHOLE, concatenated
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.fused import Matrices, is_declared, logical_matrices, tag, warnings_of_shared_keys
from megatron_eopt.megatron.fused import split_of as split_of_assigned
from megatron_eopt.megatron.model_parameters import tag_as_megatron, trainable
from megatron_eopt.registry import is_nonlinear_or_embedding
from megatron_eopt.routing import Resolved
from tests.parallel.test_layout import Group

HIDDEN = 16


def groups(tp=1, expt_tp=1):
    return SimpleNamespace(tp=Group(tp), expt_tp=Group(expt_tp))


class Linear(nn.Module):
    """A linear layer whose rows are cut over so many ranks."""

    def __init__(self, rows, ranks=1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows // ranks, HIDDEN))
        self.weight.tensor_model_parallel = ranks > 1
        self.weight.partition_dim = 0 if ranks > 1 else -1


class Module(nn.Module):
    """A module of Megatron's with one linear layer, a config and what else is read of it."""

    def __init__(self, name, linear, config=(), **said):
        super().__init__()
        setattr(self, name, linear)
        self.config = SimpleNamespace(gated_linear_unit=False, moe_mlp_glu_interleave_size=None, **dict(config))
        for key, value in said.items():
            setattr(self, key, value)


def described(module, path="mixer", tp=1):
    (found,) = trainable([nn.ModuleDict({path: module})], groups(tp))
    return found


def of_muon(parameter):
    return Assignment(parameter, "muon", Resolved({}, {}))


def split_of(parameter, name):
    """As a run of Muon with this ``--muon-split`` splits it."""
    return split_of_assigned(of_muon(parameter), name)


STATE_SPACE = {"d_inner": 64, "ngroups": 4, "d_state": 8, "nheads": 16}
LINEAR_ATTENTION = {"query": 32, "key": 32, "value": 64, "z": 64, "beta": 8, "alpha": 8}
HEADS = {"kv_channels": 16}
Q_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_pos_emb_head_dim": 8}


@pytest.mark.parametrize(
    ("layer", "config", "said", "split", "rows", "ranks"),
    [
        ("in_proj", {}, STATE_SPACE, "all", {"z": 64, "x": 64, "B": 32, "C": 32, "dt": 16}, (1, 2, 4)),
        # what a state-space layer has, and each Householder step a V, a K and a b of its own
        (
            "in_proj",
            {},
            STATE_SPACE | {"num_householder": 2},
            "all",
            {"z": 64, "V0": 64, "V1": 64, "K0": 32, "K1": 32, "Q": 32, "b0": 16, "b1": 16, "a": 16},
            (1, 2, 4),
        ),
        ("in_proj", {}, {"in_proj_split_names": [*LINEAR_ATTENTION]}, "all", LINEAR_ATTENTION, (1, 2)),
        ("mapping_proj", {"mhc_num_residual_streams": 4}, {}, "all", {"pre": 4, "post": 4, "res": 16}, (1,)),
        ("linear_q", HEADS, {}, "per_head", {f"q {i}": 16 for i in range(4)}, (1,)),
        ("linear_kv", HEADS, {}, "per_head", {f"{part} {i}": 16 for part in "kv" for i in range(4)}, (1,)),
        ("linear_qkv_down_proj", Q_LATENT, {}, "all", {"q": 24, "kv": 20, "k_rope": 8}, (1,)),
    ],
)
def test_the_rows_of_each_matrix_of_a_fused_parameter(layer, config, said, split, rows, ranks):
    """At any number of ranks, of the global parameter."""
    total = sum(rows.values())
    for count in ranks:
        sections = {"in_proj_split_sections": tuple(size // count for size in rows.values()), "tp_size": count}
        own = said | (sections if "in_proj_split_names" in said else {})
        parameter = described(Module(layer, Linear(total, count), config, **own), tp=count)
        found = split_of(parameter, split).pattern(total)
        assert {block.name: block.rows for block in found.blocks} == rows


@pytest.mark.parametrize(
    ("layer", "split", "expected"),
    [
        ("mapping_proj", "all", None),  # another's of this name
        ("in_proj", "none", WHOLE),
        ("in_proj", "default", r"matrices that this package does not know.*\(split: none\).*\(optimizer: adam\)"),
    ],
)
def test_what_is_not_known_to_be_fused(layer, split, expected):
    parameter = described(Module(layer, Linear(48)))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            split_of(parameter, split)
    else:
        assert split_of(parameter, split) == expected


def mamba():
    return described(Module("in_proj", Linear(2 * 64 + 2 * 4 * 8 + 16), **STATE_SPACE))


def test_what_the_user_declared_wins():
    parameter, own = mamba(), concatenated(first=16, rest=None)
    with pytest.raises(ValueError, match=r"mixer\.in_proj\.weight is fused of z, x, B, C and dt of a state-space"):
        split_of(parameter, "default")
    matrices.declare("mixer.in_proj.*", own)
    try:
        matrices.tag_declared([(parameter.name, parameter.tensor)])
    finally:
        matrices.undeclare("mixer.in_proj.*")
    assert {split_of(parameter, name) for name in ("default", "none", "all", "per_head")} == {own}
    setattr(parameter.tensor, ATTRIBUTE, matrices.transposed())
    with pytest.raises(ValueError, match=r"in_proj\.weight is declared as transposed, but Megatron's weights are"):
        split_of(parameter, "default")


def test_a_second_optimizer_of_a_model_splits_as_it_is_asked():
    parameter = mamba()
    tag([Matrices(parameter, split_of(parameter, "all"))])
    assert split_of(parameter, "none") == WHOLE
    tag([Matrices(parameter, WHOLE)])
    assert getattr(parameter.tensor, ATTRIBUTE) == WHOLE
    tag([Matrices(parameter, None)])
    assert not hasattr(parameter.tensor, ATTRIBUTE)
    assert not is_declared(parameter)


@pytest.mark.parametrize(
    ("split", "splits_glu", "expected"),
    [("default", True, GATE_UP), ("default", False, None), ("none", True, WHOLE), ("all", False, GATE_UP)],
)
def test_gate_and_up_are_split_as_megatrons_config_says(split, splits_glu, expected):
    """Its ``muon_split_glu`` counts where this package's own setting leaves it to Megatron."""
    module = Module("linear_fc1", Linear(32))
    module.config.gated_linear_unit = True
    config = SimpleNamespace(muon_split=split, muon_split_glu=splits_glu)
    (tagged,) = logical_matrices([of_muon(described(module))], config)
    assert tagged.split == expected


def test_gate_and_up_of_experts_by_turns():
    module = Module("linear_fc1", Linear(64))
    module.config.gated_linear_unit, module.config.moe_mlp_glu_interleave_size = True, 8
    for path, sizes in (("experts", (8, 8)), ("mlp", (32, 32))):
        assert split_of(described(module, path), "all").pattern(64).sizes == sizes


@pytest.mark.parametrize(
    ("layer", "ranks", "cut", "sequence_parallel", "warned"),
    [
        ("linear_kv_down_proj", 2, True, False, True),
        ("linear_qkv_down_proj", 2, True, False, True),
        ("linear_kv_down_proj", 2, False, False, True),  # Transformer Engine's: each rank has all rows
        ("linear_kv_down_proj", 2, False, True, False),
        ("linear_kv_down_proj", 1, False, False, False),
        ("linear_kv_up_proj", 2, True, False, False),
    ],
)
def test_a_gradient_that_megatron_leaves_incomplete_is_named(layer, ranks, cut, sequence_parallel, warned):
    module = Module(layer, Linear(28, ranks if cut else 1))
    said = warnings_of_shared_keys([described(module, "self_attention", ranks)], ranks, sequence_parallel)
    start = f"the gradient of self_attention.{layer}.weight is incomplete, whatever the optimizer: "
    assert [line.startswith(start) for line in said] == [True] * warned


def test_names_of_grouped_experts_and_layers_are_global():
    """Transformer Engine has a weight for each expert of this rank."""
    grouped = nn.ParameterDict({f"weight{number}": torch.empty(8, HIDDEN) for number in range(2)})
    layer = nn.Module()
    layer.layer_number = 7
    layer.experts = Module("linear_fc1", grouped, num_local_experts=2, ep_group=Group(2, rank=1))
    block = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    names = [each.info.name for each in trainable([nn.ModuleDict({"module": block})], groups())]
    assert names == ["layers.6.experts.linear_fc1.weight2", "layers.6.experts.linear_fc1.weight3"]


def test_stacked_experts_are_matrices_once_they_are_declared():
    parameter = nn.Parameter(torch.empty(4, 8, HIDDEN))
    assert is_nonlinear_or_embedding(parameter)
    setattr(parameter, ATTRIBUTE, matrices.experts(4))
    assert not is_nonlinear_or_embedding(parameter)
    parameter.is_embedding_or_output_parameter = True
    assert is_nonlinear_or_embedding(parameter)


class Attention(nn.Module):
    def __init__(self, rows, groups=2, **config):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_query_groups=groups, kv_channels=8, **config)
        self.linear_qkv = Linear(rows)
        self.linear_proj = Linear(16)


def split_qkv(*model_chunks, tp=1):
    """What is put on the parameters of a model whose matrices are Muon's, before its optimizer is built."""
    tag_as_megatron(model_chunks, groups(tp))
    found = trainable(model_chunks, groups(tp))
    tag(logical_matrices(map(of_muon, found), SimpleNamespace(muon_split_qkv=True)))


def test_each_projection_gets_the_shapes_of_its_own_attention():
    language, encoder, frozen = Attention(64), Attention(96, groups=4), Attention(72)
    gated = Attention(96, attention_output_gate=True)
    frozen.linear_qkv.weight.requires_grad = False
    split_qkv(nn.ModuleList([language, encoder, frozen]), gated)
    for attention, shapes in ((language, [16, 8, 8]), (encoder, [8, 8, 8]), (gated, [16, 16, 8, 8])):
        assert attention.linear_qkv.weight.qkv_split_shapes == shapes
        assert attention.linear_qkv.weight.is_qkv
    for weight in (language.linear_proj.weight, frozen.linear_qkv.weight):
        assert not hasattr(weight, "is_qkv")
    shard = Attention(16)  # which ends inside a query group: a quarter of the 64 rows of two groups
    shard.linear_qkv = Linear(64, 4)
    split_qkv(shard, tp=4)
    assert shard.linear_qkv.weight.is_qkv


def test_a_projection_that_no_config_describes_is_refused():
    fine, other = Attention(64), Attention(72)
    with pytest.raises(ValueError, match=r"1\.linear_qkv\.weight has 72 rows over all ranks, but 2 query groups of"):
        split_qkv(nn.ModuleList([fine, other]))
    assert not hasattr(other.linear_qkv.weight, "is_qkv")
