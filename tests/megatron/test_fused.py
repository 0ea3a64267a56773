"""What fused parameters of Megatron's modules are made of, where no real run on a CPU has them, and their marks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_eopt.matrices import (
    ATTRIBUTE,
    GATE_UP,
    WHOLE,
    concatenated,
    declare,
    experts,
    tag_declared,
    transposed,
    undeclare,
)
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.factory import OptimizerOfRun
from megatron_eopt.megatron.fused import (
    Matrices,
    fused,
    is_declared,
    logical_matrices,
    tag,
    warn_of_shared_keys,
)
from megatron_eopt.megatron.fused import split_of as split_of_assigned
from megatron_eopt.megatron.parameters import tag_as_megatron, trainable
from megatron_eopt.megatron.support.run import Run
from megatron_eopt.optimizers.parameters import rows_of as numbered_rows_of
from megatron_eopt.parallel.attributes import layout_of
from megatron_eopt.parallel.layout import on_one_rank
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

    def __init__(self, name, linear, **said):
        super().__init__()
        setattr(self, name, linear)
        self.config = SimpleNamespace(gated_linear_unit=False, moe_mlp_glu_interleave_size=None)
        for key, value in said.items():
            setattr(self, key, value)


def described(module, path="mixer", tp=1):
    (found,) = trainable([nn.ModuleDict({path: module})], groups(tp))
    return found


def split_of(parameter, name):
    """As a run of Muon with this ``--muon-split`` splits it."""
    return split_of_assigned(Assignment(parameter, "muon", Resolved({}, {})), name)


def rows_of(module, split="all", tp=1):
    """Name -> rows of the matrices of the global parameter."""
    parameter = described(module, tp=tp)
    found, rows = split_of(parameter, split), parameter.info.shape[0]
    return {block.name: block.rows for block in found.pattern(rows).blocks}


def mamba(ranks):
    return Module("in_proj", Linear(2 * 64 + 2 * 4 * 8 + 16, ranks), d_inner=64, ngroups=4, d_state=8, nheads=16)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_state_space_layer(ranks):
    assert rows_of(mamba(ranks), tp=ranks) == {"z": 64, "x": 64, "B": 32, "C": 32, "dt": 16}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_gated_delta_product(ranks):
    """Which has what a state-space layer has, and each Householder step a V, a K and a b of its own."""
    linear = Linear(3 * 64 + 3 * 32 + 3 * 16, ranks)
    module = Module("in_proj", linear, d_inner=64, ngroups=4, d_state=8, nheads=16, num_householder=2)
    steps = {"V0": 64, "V1": 64, "K0": 32, "K1": 32}
    assert rows_of(module, tp=ranks) == {"z": 64, **steps, "Q": 32, "b0": 16, "b1": 16, "a": 16}


def test_mappings_of_hyper_connections():
    module = Module("mapping_proj", Linear(24))
    assert split_of(described(module), "all") is None  # another's of this name
    module.config.mhc_num_residual_streams = 4
    assert rows_of(module) == {"pre": 4, "post": 4, "res": 16}
    assert split_of(described(module), "default") is None  # as Megatron


@pytest.mark.parametrize(
    ("split", "splits_glu", "expected"),
    [("default", True, GATE_UP), ("default", False, None), ("none", True, WHOLE), ("all", False, GATE_UP)],
)
def test_gate_and_up_are_split_as_megatrons_config_says(split, splits_glu, expected):
    """Its ``muon_split_glu`` counts where this package's own setting leaves it to Megatron."""
    module = Module("linear_fc1", Linear(32))
    module.config.gated_linear_unit = True
    config = SimpleNamespace(muon_split=split, muon_split_glu=splits_glu)
    (tagged,) = logical_matrices([Assignment(described(module), "muon", Resolved({}, {}))], config)
    assert tagged.split == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_linear_attention_of_either_release(ranks):
    expected = {"query": 32, "key": 32, "value": 64, "z": 64, "beta": 8, "alpha": 8}
    sizes = tuple(size // ranks for size in expected.values())
    newer = {"in_proj_split_names": list(expected), "in_proj_split_sections": sizes, "tp_size": ranks}
    older = {"qk_dim": 32, "v_dim": 64, "num_value_heads": 8}
    for said in (newer, older):
        assert rows_of(Module("in_proj", Linear(208, ranks), **said), tp=ranks) == expected


def test_a_fused_layout_that_nobody_declared_ends_the_start():
    with pytest.raises(
        ValueError, match=r"mixer\.in_proj\.weight is fused of z, x, B, C and dt of a state-space layer"
    ):
        split_of(described(mamba(1)), "default")
    unknown = described(Module("in_proj", Linear(48)))
    with pytest.raises(
        ValueError, match=r"matrices that this package does not know.*\(split: none\).*\(optimizer: adam\)"
    ):
        split_of(unknown, "default")
    assert split_of(unknown, "none") == WHOLE


def test_what_the_user_declared_wins():
    parameter = described(mamba(1))
    own = concatenated(first=16, rest=None)
    declare("mixer.in_proj.*", own)
    try:
        tag_declared([(parameter.name, parameter.tensor)])
    finally:
        undeclare("mixer.in_proj.*")
    assert {split_of(parameter, name) for name in ("default", "none", "all", "per_head")} == {own}


def test_megatrons_weights_are_not_transposed():
    parameter = described(mamba(1))
    setattr(parameter.tensor, ATTRIBUTE, transposed())
    with pytest.raises(
        ValueError, match=r"in_proj\.weight is declared as transposed, but Megatron's weights are \(out"
    ):
        split_of(parameter, "default")


def test_a_second_optimizer_of_the_same_model_splits_as_it_is_asked():
    parameter = described(mamba(1))
    tag([Matrices(parameter, split_of(parameter, "all"))])
    assert split_of(parameter, "none") == WHOLE
    tag([Matrices(parameter, WHOLE)])
    assert getattr(parameter.tensor, ATTRIBUTE) == WHOLE
    tag([Matrices(parameter, None)])
    assert not hasattr(parameter.tensor, ATTRIBUTE)
    assert not is_declared(parameter)


def test_cross_attention():
    query, both = (Module(name, Linear(rows)) for name, rows in (("linear_q", 64), ("linear_kv", 128)))
    for module in (query, both):
        module.config.kv_channels = 16
    assert rows_of(query) == {"": 64}
    assert rows_of(query, "per_head") == {"q 0": 16, "q 1": 16, "q 2": 16, "q 3": 16}
    assert rows_of(both) == {"k": 64, "v": 64}
    assert list(rows_of(both, "per_head")) == [f"{part} {i}" for part in "kv" for i in range(4)]


def test_latent_attention_with_one_down_projection():
    module = Module("linear_qkv_down_proj", Linear(24 + 20 + 8))
    module.config.q_lora_rank, module.config.kv_lora_rank, module.config.qk_pos_emb_head_dim = 24, 20, 8
    assert rows_of(module) == {"q": 24, "kv": 20, "k_rope": 8}


@pytest.mark.parametrize(
    ("layer", "ranks", "cut", "sequence_parallel", "warned"),
    [
        ("linear_kv_down_proj", 2, True, False, True),
        ("linear_kv_down_proj", 2, True, True, True),
        ("linear_qkv_down_proj", 2, True, False, True),
        ("linear_kv_down_proj", 2, False, False, True),  # Transformer Engine's: each rank has all rows
        ("linear_kv_down_proj", 2, False, True, False),
        ("linear_kv_down_proj", 1, False, False, False),
        ("linear_kv_up_proj", 2, True, False, False),
    ],
)
def test_a_gradient_that_megatron_leaves_incomplete_is_named(capsys, layer, ranks, cut, sequence_parallel, warned):
    module = Module(layer, Linear(28, ranks if cut else 1))
    found = trainable([nn.ModuleDict({"self_attention": module})], groups(ranks))
    warn_of_shared_keys(found, ranks, sequence_parallel)
    said = f"warning: the gradient of self_attention.{layer}.weight is incomplete, whatever the optimizer: "
    assert (said in capsys.readouterr().out) == warned


def test_gate_and_up_of_experts_by_turns():
    module = Module("linear_fc1", Linear(64))
    module.config.gated_linear_unit, module.config.moe_mlp_glu_interleave_size = True, 8
    experts_own, dense = described(module, "experts"), described(module, "mlp")
    assert split_of(experts_own, "all").pattern(64).sizes == (8, 8)
    assert split_of(dense, "all").pattern(64).sizes == (32, 32)
    assert split_of(dense, "default") is None


def test_rows_that_follow_the_ranks_are_numbered_by_their_matrix_though_it_is_split_as_megatron_does():
    module = Module("linear_fc1", Linear(64))
    module.config.gated_linear_unit = True
    parameter, proj = described(module), described(Module("linear_proj", Linear(64)))
    of_muon = [Assignment(each, "muon", Resolved({}, {})) for each in (parameter, proj)]
    for dtype, rows in (
        ("fp32", WHOLE),
        ("bf16", GATE_UP),
        ("fp32", WHOLE),
    ):  # where nothing is rounded, nothing is said
        tag(logical_matrices(of_muon, SimpleNamespace(muon_split="default", optimizer_momentum_dtype=dtype)))
        assert numbered_rows_of(parameter.tensor, WHOLE, on_one_rank((96, 64))) == rows
    tag(logical_matrices(of_muon, SimpleNamespace(muon_split="default", optimizer_momentum_dtype="bf16")))
    assert not hasattr(parameter.tensor, ATTRIBUTE)
    assert numbered_rows_of(proj.tensor, WHOLE, on_one_rank((64, 64))) == WHOLE


def test_one_matrix_stays_one():
    module = Module("linear_proj", Linear(64))
    assert fused(described(module)) is None
    assert split_of(described(module), "per_head") is None


class GroupedLinear(nn.Module):
    """As Transformer Engine's: a weight for each expert of this rank."""

    def __init__(self, count):
        super().__init__()
        for number in range(count):
            setattr(self, f"weight{number}", nn.Parameter(torch.empty(8, HIDDEN)))


class EPGroup(Group):
    def rank(self):
        return 1


def test_names_of_grouped_experts_and_layers_are_global():
    block = nn.Module()
    layer = nn.Module()
    layer.layer_number = 7
    layer.experts = Module("linear_fc1", GroupedLinear(2), num_local_experts=2, ep_group=EPGroup(2))
    block.layers = nn.ModuleList([layer])
    names = [each.info.name for each in trainable([nn.ModuleDict({"module": block})], groups())]
    assert names == ["layers.6.experts.linear_fc1.weight2", "layers.6.experts.linear_fc1.weight3"]


def test_stacked_experts_are_matrices_once_they_are_declared():
    parameter = nn.Parameter(torch.empty(4, 8, HIDDEN))
    assert is_nonlinear_or_embedding(parameter)
    setattr(parameter, ATTRIBUTE, experts(4))
    assert not is_nonlinear_or_embedding(parameter)
    parameter.is_embedding_or_output_parameter = True
    assert is_nonlinear_or_embedding(parameter)


class Attention(nn.Module):
    def __init__(self, rows, groups=2, **config):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_query_groups=groups, kv_channels=8, **config)
        self.linear_qkv = nn.Linear(16, rows, bias=False)
        self.linear_proj = nn.Linear(32, 16, bias=False)


def split_qkv(model_chunks, groups):
    """What is put on the parameters of a model whose matrices are Muon's, before its optimizer is built."""
    tag_as_megatron(model_chunks, groups)
    of_muon = [Assignment(each, "muon", Resolved({}, {})) for each in trainable(model_chunks, groups)]
    tag(logical_matrices(of_muon, SimpleNamespace(muon_split_qkv=True)))


def test_each_projection_gets_the_shapes_of_its_own_attention():
    language, encoder = Attention(64), Attention(96, groups=4)
    gated = Attention(96, attention_output_gate=True)
    split_qkv([nn.ModuleList([language, encoder]), gated], groups())
    assert language.linear_qkv.weight.qkv_split_shapes == [16, 8, 8]
    assert encoder.linear_qkv.weight.qkv_split_shapes == [8, 8, 8]
    assert gated.linear_qkv.weight.qkv_split_shapes == [16, 16, 8, 8]
    assert all(each.linear_qkv.weight.is_qkv for each in (language, encoder, gated))
    assert not hasattr(language.linear_proj.weight, "is_qkv")


def test_a_shard_that_ends_inside_a_query_group_is_marked():
    attention = Attention(16)  # a quarter of the 64 rows of two groups
    attention.linear_qkv.weight.tensor_model_parallel = True
    attention.linear_qkv.weight.partition_dim = 0
    split_qkv([attention], groups(tp=4))
    assert attention.linear_qkv.weight.is_qkv is True


def test_a_projection_that_its_config_does_not_describe_is_refused_and_not_marked():
    fine, other = Attention(64), Attention(72)
    with pytest.raises(ValueError, match=r"1\.linear_qkv\.weight has 72 rows over all ranks, but 2 query groups of"):
        split_qkv([nn.ModuleList([fine, other])], groups())
    assert not hasattr(other.linear_qkv.weight, "is_qkv")


def test_a_frozen_projection_is_left_alone():
    attention = Attention(72)
    attention.linear_qkv.weight.requires_grad = False
    split_qkv([attention], groups())
    assert not hasattr(attention.linear_qkv.weight, "is_qkv")


class TransformerEngineLinear(nn.Module):
    """As Transformer Engine marks the weight of its linear layer: as cut, also where it knows of no parallelism."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(self, rows, cols, parallel_mode=None):
        super().__init__()
        self.parallel_mode, self.in_features, self.out_features = parallel_mode, cols, rows
        self.weight = nn.Parameter(torch.empty(rows, cols))
        self.weight.tensor_model_parallel, self.weight.partition_stride = True, 1
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0


class TELinear(TransformerEngineLinear):
    """As Megatron-Core 0.18 makes it: of experts nothing is left of the mode."""

    __module__ = "megatron.core.extensions.transformer_engine"

    def __init__(self, rows, cols, parallel_mode, is_expert=False):
        super().__init__(rows, cols, None if is_expert or parallel_mode == "duplicated" else parallel_mode)
        self.weight.allreduce = not is_expert
        if parallel_mode == "duplicated":
            self.weight.tensor_model_parallel = False


class TEColumnParallelLinear(TELinear):
    __module__ = "megatron.core.extensions.transformer_engine"

    def __init__(self, rows, cols, ranks, is_expert=False):
        super().__init__(rows // ranks, cols, "column", is_expert)


class TERowParallelLinear(TELinear):
    __module__ = "megatron.core.extensions.transformer_engine"

    def __init__(self, rows, cols, ranks, is_expert=False):
        super().__init__(rows, cols // ranks, "row", is_expert)


class UsersRowParallelLinear(TERowParallelLinear):
    pass


def run_of(model, **sizes):
    run = OptimizerOfRun.__new__(OptimizerOfRun)
    run.model_chunks, run.groups = [model], groups(**sizes)
    run.facts = Run("muon", "0.19.2", None)
    run.describe()
    return run


@pytest.mark.parametrize("row_parallel", [TERowParallelLinear, UsersRowParallelLinear])
def test_transformer_engines_experts_are_cut_as_their_layers_cut_them(row_parallel):
    tp, expt_tp, ffn = 4, 2, 24
    expert = nn.ModuleDict(
        {"linear_fc1": TEColumnParallelLinear(ffn, HIDDEN, 2, True), "linear_fc2": row_parallel(HIDDEN, ffn, 2, True)}
    )
    model = nn.ModuleDict({"local_experts": nn.ModuleList([expert]), "linear_proj": row_parallel(HIDDEN, HIDDEN, tp)})
    run = run_of(model, tp=tp, expt_tp=expt_tp)
    layouts = [layout_of(each.tensor, run.groups.tp, run.groups.expt_tp) for each in run.parameters]
    assert [
        (each.info.shape, layout.shape, layout.dim) for each, layout in zip(run.parameters, layouts, strict=True)
    ] == [
        ((ffn, HIDDEN), (ffn, HIDDEN), 0),
        ((HIDDEN, ffn), (HIDDEN, ffn), 1),
        ((HIDDEN, HIDDEN), (HIDDEN, HIDDEN), 1),
    ]
