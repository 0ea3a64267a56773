"""The other supported releases of Megatron-Core, installed beside the first one: parity, resume, refusals."""

import os
import subprocess
import sys

import pytest

from megatron_eopt.family import OPTIMIZERS
from tests.megatron.runs import (
    FILES,
    MUON,
    PP2,
    ROOT,
    SHARED,
    TP2,
    UPSTREAM,
    assert_flags_win,
    assert_same,
    assert_trains_as,
    overriding,
    refused,
    resumed,
    train,
    unchanged,
)
from tests.megatron.test_family import FLAGS

RUN = ["--num-layers", 2, *TP2, *FILES, "--train-iters", 4]
full = pytest.mark.full


@pytest.fixture(scope="module", params=["0.18.2"])
def release(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"megatron-core=={request.param}"], check=True)
    return folder


@full
@pytest.mark.parametrize("tp_mode", ["duplicated", "distributed"])
def test_equals_megatrons_own_muon(release, tmp_path, tp_mode):
    run = [*RUN, *MUON, "--train-iters", 10, "--muon-tp-mode", tp_mode, "--muon-fp32-matmul-prec", "high"]
    ours, _ = train(tmp_path / "ours", 2, *run, megatron=release)
    theirs, _ = train(tmp_path / "theirs", 2, *run, program=UPSTREAM, megatron=release)
    assert_trains_as(ours, theirs, rel=1e-4)


@pytest.mark.wide  # in CI: what is read of Megatron may be another name there
@pytest.mark.parametrize("precision", [[], pytest.param(["--bf16"], marks=full)], ids=["fp32", "bf16"])
def test_a_resumed_run_is_the_straight_one(release, tmp_path, precision):
    resumed(tmp_path, 2, *RUN, *MUON, *precision, megatron=release)


@full
def test_more_ranks_than_query_groups(release, tmp_path):
    run = ["--num-layers", 2, *MUON, "--num-query-groups", 1, "--train-iters", 4]
    alone, _ = train(tmp_path / "one", 1, *run, megatron=release)
    assert_trains_as(train(tmp_path / "two", 2, *run, *TP2, megatron=release)[0], alone, rel=1e-4)


@full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_and_resumes(release, tmp_path, name):
    (straight, _), _ = resumed(tmp_path, 2, *RUN, "--optimizer", name, *FLAGS.get(name, "").split(), megatron=release)
    assert straight[0]["losses"][-1] < straight[0]["losses"][0]


@full
def test_a_stage_with_an_embedding_alone_has_a_place_in_the_layer_wise_layout(release, tmp_path):
    """0.18 lays out the gradient buffers of every stage, also of one that has no matrix.

    Without Apex and Transformer Engine it cannot save such a run: a rank may have no state of its Adam.
    """
    stages = [*PP2, "--account-for-embedding-in-pipeline-split", "--num-layers", 1]
    run = [*stages, *MUON, "--bf16", "--train-iters", 4]
    alone, _ = train(tmp_path / "alone", 2, *run, megatron=release)
    dealt, _ = train(tmp_path / "dealt", 4, *run, "--optimizer", "dist_muon", megatron=release)
    for rank in range(4):
        assert dealt[rank]["grad_norms"] == pytest.approx(alone[rank // 2]["grad_norms"], rel=1e-2)


@full
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--muon-coefficient-type", "quintc"], "invalid choice: 'quintc'"),
        (["--muon-num-ns-steps", 6], "ValueError: quintic has 5 polynomials"),
        (["--muon-scalar-optimizer", "lion"], "ValueError: muon_scalar_optimizer 'lion' cannot be built"),
    ],
)
def test_mistakes_are_refused(release, flags, message):
    run = ["--num-layers", 1, "--train-iters", 1, *MUON, *flags]
    assert message in refused(*run, megatron=release)


@full
def test_main_parameters_in_bf16_keep_their_own_split_shapes(release):
    # Megatron makes them with this function; without the attribute they would be split as the model's config says
    code = (
        "import torch, megatron_eopt; megatron_eopt.activate()\n"
        "from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes\n"
        "model, main = torch.ones(8, 2), torch.ones(8, 2)\n"
        "model.is_qkv, model.qkv_split_shapes, model.rows_by_matrix = True, [2, 1, 1], 'by matrix'\n"
        "copy_tensor_model_parallel_attributes(main, model)\n"
        "print(main.is_qkv, main.qkv_split_shapes, main.rows_by_matrix)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{release}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["True [2, 1, 1] by matrix"], done.stderr


@full
def test_adam_is_left_as_it_is(release, tmp_path):
    run = ["--num-layers", 1, "--train-iters", 3, "--optimizer", "adam"]
    (ours,), _ = train(tmp_path / "ours", 1, *run, megatron=release)
    (theirs,), _ = train(tmp_path / "theirs", 1, *run, program=UPSTREAM, megatron=release)
    assert_same(ours["after"], theirs["after"])


@full
def test_overrides_change_what_they_name_and_resume_also_with_new_rates(release, tmp_path):
    """Groups that differ in their rate alone, which these releases would not tell apart when they load."""
    overrides = [
        {"select": "layers.1.mlp.linear_fc1.weight", "lr": 0, "min_lr": 0},
        {"select": "linear_proj.weight", "lr_mult": 0.5},
        {"select": "linear_fc2.weight", "optimizer": "adaptive_muon"},
    ]
    run = [*RUN, *MUON, *overriding(tmp_path, *overrides)]
    (straight, output), _ = resumed(tmp_path / "resumed", 2, *run, megatron=release)
    assert "the optimizer of every trainable parameter" in output
    assert unchanged(straight) == {"decoder.layers.1.mlp.linear_fc1.weight"}
    assert "moment2_buffer" in straight[0]["after"]["decoder.layers.0.mlp.linear_fc2.weight"]
    before = ["--lr", "1e-2", "--min-lr", "1e-3", "--muon-lr", "4e-2", "--muon-min-lr", "4e-3"]
    after = ["--lr", "5e-3", "--min-lr", "5e-4", "--muon-lr", "3e-2", "--muon-min-lr", "3e-3"]
    ranks = assert_flags_win(tmp_path, *run, before=before, after=after, ranks=2, megatron=release)
    assert unchanged(ranks) == unchanged(straight)


@full
@pytest.mark.parametrize("flags", [[], ["--bf16"], ["--optimizer", "lion"]], ids=["fp32", "bf16", "lion"])
def test_resumes_where_0_18_lays_buffers_out_for_whole_matrices(release, tmp_path, flags):
    run = ["--num-layers", 2, *MUON, *flags, *SHARED, *FILES, "--train-iters", 4]
    (_, output), _ = resumed(tmp_path, 2, *run, megatron=release)
    assert ("gradient buffers are not laid out for whole matrices" in output) == ("lion" in flags)


@full
def test_an_override_of_the_optimizer_leaves_the_layout_away(release, tmp_path):
    """0.18 lays the buffers of matrices out before it builds an optimizer."""
    overrides = overriding(tmp_path, {"select": "linear_proj.weight", "optimizer": "adam"})
    run = ["--num-layers", 2, *MUON, "--bf16", *SHARED, "--train-iters", 1]
    _, output = train(tmp_path / "run", 2, *run, *overrides, megatron=release)
    assert "gradient buffers are not laid out for whole matrices" in output
    assert "matrix: " in output
