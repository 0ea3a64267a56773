"""Models by their sizes: their matrices, how they are dealt, and what the planner predicts for Llama-3."""

from collections import Counter
from dataclasses import replace

import pytest
from model_matrices import dealt_matrices
from model_sizes import MODELS, Model, Parallel
from model_steps import last_that_helps, swept

from megatron_eopt.orthogonalize import get_coefficients
from megatron_eopt.parallel.cost import Work, plan_cost
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.rates import Rates

QUINTIC = get_coefficients("quintic", 5)
WORK = Work(schedule=QUINTIC, restarts=(3,))
HALF = replace(WORK, itemsize=2)
SMALL = Model(num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_query_groups=2, swiglu=True)


def shapes(matrices):
    return Counter((m.name.split(".", 3)[-1], m.shape, m.ranks, m.group) for m in matrices)


def test_a_dense_model():
    matrices = dealt_matrices(SMALL, Parallel(tensor=2), WORK).matrices
    assert shapes(matrices) == {
        ("self_attention.linear_qkv.weight[q]", (64, 64), 2, "tp"): 3,
        ("self_attention.linear_qkv.weight[k]", (16, 64), 2, "tp"): 3,
        ("self_attention.linear_qkv.weight[v]", (16, 64), 2, "tp"): 3,
        ("self_attention.linear_proj.weight", (64, 64), 2, "tp"): 3,
        ("mlp.linear_fc1.weight", (192, 64), 2, "tp"): 3,
        ("mlp.linear_fc2.weight", (64, 96), 2, "tp"): 3,
    }
    assert len({matrix.name for matrix in matrices}) == len(matrices)
    of_qkv = {
        m.name[-3:]: [rectangle.shape for rectangle in m.rectangles] for m in matrices if "layers.0.self" in m.name
    }
    assert of_qkv["[q]"] == [(32, 64)] * 2
    assert of_qkv["[k]"] == [(8, 64)] * 2
    split = shapes(dealt_matrices(replace(SMALL, split_gate_up=True), Parallel(tensor=2, pipeline=2), WORK).matrices)
    assert split["mlp.linear_fc1.weight[gate]", (96, 64), 2, "tp"] == 2
    assert split["mlp.linear_fc1.weight[up]", (96, 64), 2, "tp"] == 2


def test_more_ranks_than_query_groups_cut_inside_a_group():
    """A group is 32 rows of q, 8 of k and 8 of v; a rank has 24 of these 48."""
    rows = {
        matrix.name[-3:]: [rectangle.shape[0] for rectangle in matrix.rectangles]
        for matrix in dealt_matrices(SMALL, Parallel(tensor=4), WORK).matrices
        if "layers.0.self_attention.linear_qkv" in matrix.name
    }
    assert rows == {"[q]": [24, 8, 24, 8], "[k]": [0, 8, 0, 8], "[v]": [0, 8, 0, 8]}


def test_experts():
    model = Model(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_experts=8,
                  moe_ffn_hidden_size=32)  # fmt: skip
    matrices = dealt_matrices(model, Parallel(tensor=4, expert_tensor=2, expert=2), WORK).matrices
    counted = Counter((m.shape, m.ranks, m.group) for m in matrices)
    # 4 ranks hold the experts twice over in shards of two: nothing is dealt
    assert counted[(32, 64), 2, "expt_tp"] == 8
    assert counted[(64, 32), 2, "expt_tp"] == 8
    assert counted[(8, 64), 1, "tp"] == 2
    # as many data-parallel ranks of experts as there are ranks
    dealt = dealt_matrices(model, Parallel(tensor=4, data=2), WORK).matrices
    assert sum("experts" in m.name for m in dealt) == 2 * 8 * 2 // 8


@pytest.mark.parametrize(
    ("model", "vocabulary", "billions"),
    [
        ("llama3-8b", 128256, 8.03),
        ("llama3-70b", 128256, 70.55),
        ("llama3.1-405b", 128256, 405.85),
        ("qwen3-30b-a3b", 151936, 30.53),
        ("deepseek-v3", 129280, 671.03),
        ("kimi-k2", 163840, 1026.4),
    ],
)
def test_models_have_as_many_parameters_as_is_published(model, vocabulary, billions):
    """With embedding and output layer; norms and biases of routers are less than the last digit."""
    sizes = MODELS[model]
    entries = sum(rows * cols for m in dealt_matrices(sizes, Parallel(), WORK).matrices for rows, cols in [m.shape])
    assert (entries + 2 * vocabulary * sizes.hidden_size) / 1e9 == pytest.approx(billions, rel=5e-4)


LATENT_ATTENTION = {  # the shapes that Megatron builds, as test_described has them: down projections are not cut
    ("self_attention.linear_q_down_proj.weight", (1536, 7168), 1),
    ("self_attention.linear_q_up_proj.weight", (24576, 1536), 4),
    ("self_attention.linear_kv_down_proj.weight", (576, 7168), 1),
    ("self_attention.linear_kv_up_proj.weight", (32768, 512), 4),
    ("self_attention.linear_proj.weight", (7168, 16384), 4),
}
OF_DENSE_LAYER = {("mlp.linear_fc1.weight", (36864, 7168), 4), ("mlp.linear_fc2.weight", (7168, 18432), 4)}
OF_EXPERTS = {
    ("mlp.router.weight", (256, 7168), 1),
    *((f"mlp.experts.local_experts.{n}.linear_fc1.weight", (4096, 7168), 1) for n in range(64)),
    *((f"mlp.experts.local_experts.{n}.linear_fc2.weight", (7168, 2048), 1) for n in range(64)),
    ("mlp.shared_experts.linear_fc1.weight", (4096, 7168), 4),
    ("mlp.shared_experts.linear_fc2.weight", (7168, 2048), 4),
}


@pytest.mark.parametrize(("dense_layers", "of_layer"), [(61, OF_DENSE_LAYER), (0, OF_EXPERTS)])
def test_latent_attention_and_shared_experts(dense_layers, of_layer):
    model = replace(MODELS["deepseek-v3"], first_dense_layers=dense_layers)
    matrices = dealt_matrices(model, Parallel(tensor=4, expert=4, pipeline=61), WORK).matrices
    assert {(m.name.split(".", 3)[-1], m.shape, m.ranks) for m in matrices} == LATENT_ATTENTION | of_layer


def test_of_unequal_stages_it_is_the_busiest():
    """Two dense layers take longer than two of experts over 64 ranks; over two ranks these do."""
    model = replace(MODELS["deepseek-v3"], num_layers=8, first_dense_layers=2, num_experts=64)
    parallel = Parallel(pipeline=4, expert=64, data=64)
    both = dealt_matrices(model, parallel, WORK)
    assert {matrix.name.split(".")[2] for matrix in both.matrices} <= {"0", "1"}
    experts = dealt_matrices(model, Parallel(pipeline=4, expert=2, data=2), WORK).matrices
    assert any("local_experts" in matrix.name for matrix in experts)
    # an even share is that of the stage with the most work, and memory that of the fullest
    dense, of_experts = (dealt_matrices(replace(model, first_dense_layers=n), parallel, WORK) for n in (8, 0))
    assert (both.seconds, both.mean) == (dense.seconds, of_experts.mean)
    assert both.held == max(dense.held, of_experts.held)


def test_the_matrices_are_those_of_the_busiest_rank():
    model = replace(SMALL, num_layers=5)
    matrices, (found,), *_ = dealt_matrices(model, Parallel(tensor=2, data=3), WORK)
    everything = dealt_matrices(model, Parallel(tensor=2), WORK).matrices
    assert set(matrices) < set(everything)
    parameters = {m.name.partition("[")[0] for m in matrices}
    assert len(parameters) == found.ranks.count(found.seconds.index(max(found.seconds)))
    assert len(found.ranks) == 20
    assert dealt_matrices(model, Parallel(), WORK).deals == []  # nothing to deal


@pytest.mark.parametrize(("data", "by_size", "by_time"), [(4, 118, 118), (64, 33.6, 23.6)])
def test_the_busiest_rank_before_and_after(data, by_size, by_time):
    """The figures of docs/measured.md, for a stage of llama3-70b without embeddings."""
    parallel = Parallel(tensor=8, pipeline=4, data=data)
    _, (found,), *_ = dealt_matrices(MODELS["llama3-70b"], parallel, HALF)
    assert [f"{max(each) * 1e3:.3g}" for each in (found.by_size, found.seconds)] == [f"{by_size:g}", f"{by_time:g}"]


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        (Parallel(tensor=5), SMALL, "--num-attention-heads over --tensor-model-parallel-size: 8 is no multiple of 5"),
        (Parallel(expert=3), MODELS["qwen3-30b-a3b"], "over --expert-model-parallel-size: 128 is no multiple"),
        (Parallel(expert=4), MODELS["qwen3-30b-a3b"], r"--expert-model-parallel-size\): 1 is no multiple"),
    ],
)
def test_what_cannot_be_divided_is_refused(parallel, model, message):
    with pytest.raises(ValueError, match=message):
        dealt_matrices(model, parallel, WORK)


@pytest.mark.parametrize(("model", "pipeline"), [("llama3-8b", 1), ("llama3-70b", 4)])
@pytest.mark.parametrize("data", [4, 64])
def test_large_matrices_are_whole_on_a_rank_where_they_abound_and_split_where_they_are_few(model, pipeline, data):
    """At TP8: with four data-parallel ranks most are whole on a rank, with 64 the Gram form of the largest is split."""
    matrices = dealt_matrices(MODELS[model], Parallel(tensor=8, pipeline=pipeline, data=data), WORK).matrices
    modes = ("auto", "owner", "gram", "duplicated", "distributed")
    plans = {mode: make_plan(matrices, mode, WORK) for mode in modes}
    ms = {mode: plan_cost(plan, WORK).seconds * 1e3 for mode, plan in plans.items()}
    buckets = plans["auto"].buckets
    assert {bucket.scheme for bucket in buckets} <= {"owner", "gram_split"}
    assert ms["auto"] <= min(ms.values()) * (1 + 1e-9)
    assert ms["duplicated"] > 1.9 * ms["auto"]
    owned = sum(len(bucket.matrices) for bucket in buckets if bucket.scheme == "owner")
    assert (owned > 0.75 * len(matrices)) is (data == 4)
    if data == 4:
        assert ms["owner"] < ms["gram"] < ms["distributed"] < ms["duplicated"]
    else:
        hidden = MODELS[model].hidden_size
        split = {plans["auto"].matrices[x.matrices[0]].shape for x in buckets if x.scheme == "gram_split"}
        assert split == {(7 * hidden, hidden)}
        assert ms["gram"] < 0.5 * min(ms["owner"], ms["duplicated"])


def test_each_point_of_a_sweep_is_the_step_of_that_number():
    rates = Rates()
    parallel = Parallel(tensor=2, pipeline=3)
    points = swept(SMALL, parallel, [6, 12, 24], HALF, rates)
    # a rank's parameters: half of a layer's, 64 x 64, two of 16 x 64, 64 x 64, 192 x 64 and 64 x 96
    held = (64 * 64 + 2 * 16 * 64 + 64 * 64 + 192 * 64 + 64 * 96) // 2
    for point, data in zip(points, (1, 2, 4), strict=True):
        assert point.stage == dealt_matrices(SMALL, replace(parallel, data=data), HALF, "auto", rates)
        assert point.memory[:2] == (2 * held, 4 * held)
        assert point.gather == pytest.approx(2 * held * (data - 1) / data / rates.bytes)
        assert point.stage.mean <= point.stage.seconds
    assert points[0].memory[2] == 8 * held
    assert points[0].stage.mean == points[0].stage.seconds


def test_a_sweep_ends_where_one_matrix_is_the_work_of_one_rank():
    points = swept(MODELS["llama3-8b"], Parallel(), [32, 64, 128, 256], HALF, Rates())
    last = last_that_helps(points)
    assert last is not None
    assert last.gpus == 128
    assert points[2].stage.seconds == points[3].stage.seconds
