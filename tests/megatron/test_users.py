"""Which optimizer updates what in real models, and that a start or a first step shows what is wrong with it."""

import json
import re

import pytest
import torch

from megatron_eopt.routing import from_json, rows
from tests.megatron.runs import CASES, MLA, MUON, SMALL_GPT, TIED, WITHOUT_GQA, refused, resumed, start, train
from tests.megatron.test_megatron_fsdp import fsdp

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 2, "--train-iters", 1, *MUON]
PP2, EP2, ETP2 = ([f"--{name}-parallel-size", 2] for name in ("pipeline-model", "expert-model", "expert-tensor"))
EXPERTS = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 48]
SHARED = ["--bf16", "--use-distributed-optimizer"]
# 53 and 59 are prime, so that no number of ranks divides a side of most matrices
ODD = """--hidden-size 53 --ffn-hidden-size 59 --num-attention-heads 1 --num-query-groups 1 --kv-channels 6
    --make-vocab-size-divisible-by 1""".split()
MODELS = {  # ranks, flags, model
    "grouped queries": (1, [], SMALL_GPT),
    "tied": (1, [], TIED),
    "tied-PP2": (2, PP2, TIED),
    "PP2": (2, PP2, SMALL_GPT),
    "EP2": (2, [*EXPERTS, *EP2], SMALL_GPT),
    "ETP2": (2, [*EXPERTS, *ETP2], SMALL_GPT),  # and TP 1: without Transformer Engine, experts run at no other TP
    "EP2-ETP2": (4, [*EXPERTS, *EP2, *ETP2, "--global-batch-size", 8], SMALL_GPT),
    "next tokens": (1, ["--mtp-num-layers", 1], SMALL_GPT),
    "gated attention": (1, ["--attention-output-gate"], SMALL_GPT),
    "latent attention": (1, MLA, WITHOUT_GQA),
    "DP2-shared": (2, SHARED, SMALL_GPT),
    "EP2-shared": (2, [*EXPERTS, *EP2, *SHARED], SMALL_GPT),
    "odd-shared": (2, [*ODD, *SHARED], SMALL_GPT),
}
FULL = {"EP2-ETP2", "EP2-shared"}


def manifest_of(file):
    """Name of each parameter -> its row."""
    found = rows(from_json(json.loads(file.read_text())))
    by_name = {row.name: row for row in found}
    assert len(by_name) == len(found), "a parameter has two optimizers"
    return by_name


def watched(output):
    """For each rank, what user_cases.py has printed in each step."""
    steps = {}
    for line in output.splitlines():
        if line.startswith("watched "):
            said = json.loads(line.removeprefix("watched "))
            steps.setdefault(said["rank"], []).append(said)
    return [steps[rank] for rank in sorted(steps)]


def everywhere(ranks, when):
    """Name -> the snapshots of the ranks that have the parameter, or a part of it."""
    found = {}
    for rank in ranks:
        for name, snapshot in rank[when].items():
            found.setdefault(name, []).append(snapshot)
    return found


def unchanged(ranks):
    """Names of the parameters of which no rank's part was changed by training."""
    before, after = everywhere(ranks, "before"), everywhere(ranks, "after")
    return {
        name
        for name in after
        if all(torch.equal(a["parameter"], b["parameter"]) for a, b in zip(before[name], after[name], strict=True))
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in MODELS]
)
def test_every_parameter_has_one_optimizer_which_changes_it(tmp_path, name):
    """The manifest names the parameters as the recorder does, and gives those that have state of them."""
    size, flags, model = MODELS[name]
    run = [*RUN, *flags, "--optimizer-manifest-file", tmp_path / "manifest.json"]
    ranks, _ = train(tmp_path / "run", size, *run, model=model)
    manifest, found = manifest_of(tmp_path / "manifest.json"), everywhere(ranks, "after")
    assert manifest.keys() == found.keys()
    assert not unchanged(ranks)
    momenta = {name for name, parts in found.items() if any("momentum_buffer" in part for part in parts)}
    matrices = {
        name
        for name, parts in found.items()
        if parts[0]["parameter"].ndim == 2 and "word_embeddings" not in name and not name.startswith("output_layer")
    }
    assert {name for name, row in manifest.items() if row.optimizer == "muon"} == momenta == matrices
    assert {row.optimizer for row in manifest.values()} == {"muon", "adam"}
    assert {name for name, row in manifest.items() if row.matrices} == matrices


def test_both_ends_of_a_pipeline_step_tied_embeddings_alike(tmp_path):
    run = [*RUN, *PP2, "--train-iters", 4, "--optimizer-manifest-file", tmp_path / "manifest.json"]
    (first, last), _ = train(tmp_path / "run", 2, *run, model=TIED)
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    assert torch.equal(first["after"][embedding]["parameter"], last["after"][output]["parameter"])
    assert not torch.equal(first["after"][embedding]["parameter"], first["before"][embedding]["parameter"])
    manifest = manifest_of(tmp_path / "manifest.json")
    assert manifest[output].tied_to == embedding
    assert manifest[output].optimizer == manifest[embedding].optimizer == "adam"


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["alone", "PP2", "EP2", "DP2-shared"])
def test_each_step_orthogonalizes_the_matrices_of_the_manifest(tmp_path, layout, precision):
    size, flags, _ = MODELS.get(layout, (1, [], None))
    run = [*RUN, *flags, *precision, "--train-iters", 3, "--optimizer-manifest-file", tmp_path / "manifest.json"]
    ranks, output = train(tmp_path / "run", size, *run, program=CASES, environment={"DO": "watch"})
    matrices = {name: len(row.matrices) for name, row in manifest_of(tmp_path / "manifest.json").items()}
    own = [[name for name, state in rank["after"].items() if "momentum_buffer" in state] for rank in ranks]
    assert {name for names in own for name in names} == {name for name in matrices if matrices[name]}
    for names, steps in zip(own, watched(output), strict=True):
        count = sum(matrices[name] for name in names)
        assert count > 0
        assert [step["calls"] for step in steps] == [count, 2 * count, 3 * count]


@pytest.mark.parametrize("what", ["skip_a_matrix", "lose_a_gradient"])
def test_a_matrix_that_is_left_out_ends_the_run_in_its_first_step(what):
    said = refused(*RUN, program=CASES, environment={"DO": what})
    assert "11 matrices were updated in the first step on rank 0, and the manifest has 12" in said


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, SHARED),
        (2, [*EXPERTS, *EP2]),
        (2, ["--use-torch-fsdp2", "--micro-batch-size", 1]),
        (2, fsdp("optim_grads_params")),
    ],
    ids=["shared", "experts", "torch FSDP2", "Megatron-FSDP"],
)
def test_what_no_forward_pass_uses_is_named(size, flags):
    done = start(size, *SMALL_GPT, *RUN, *flags, "--train-iters", 2, program=CASES, environment={"DO": "unused"})
    ends = "--use-torch-fsdp2" in flags  # whose matrix has no gradient at all, instead of zeros
    assert ("some parameters got no gradient" in done.stdout, done.returncode != 0) == (ends, ends), done.stdout[-3000:]
    said = re.findall("the gradient is zero everywhere in the first step, of (.*?):", done.stdout)
    assert said == ["aside.bias, aside.weight"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("forget_one", r"no optimizer has \S+ .*expected one optimizer for every trainable parameter"),
        (
            "update_twice",
            r"embedding\S+ is listed 2 times, .*optimizer adam.* and .*optimizer muon.*expected one optimizer",
        ),
        ("freeze:layers", "--optimizer muon is for matrices, and it has none on any rank"),
        ("freeze:.", r"it has none on any rank"),
    ],
)
def test_a_start_fails_where_optimizers_are_not_as_they_have_to_be(what, message):
    assert re.search(message, said := refused(*RUN, program=CASES, environment={"DO": what})), said[-3000:]


@pytest.mark.parametrize(
    ("size", "pattern", "flags"),
    [
        (1, "layernorm", []),  # Adam has no group without decay
        (1, "layers.0", []),
        (2, "linear_fc", PP2),
        (2, "linear_(fc|qkv)", [*SHARED, "--num-layers", 1]),  # one matrix is left, and one of the ranks has none
        (2, "embedding|output|norm", SHARED),  # Adam has no parameter at all
    ],
    ids=["vectors", "a layer", "PP2", "one matrix", "nothing for Adam"],
)
def test_what_is_frozen_stands_still_and_a_resumed_run_goes_on(tmp_path, size, pattern, flags):
    run = [*RUN, *flags, "--train-iters", 4, "--ckpt-format", "torch_dist"]
    how = {"program": CASES, "environment": {"DO": f"freeze:{pattern}"}}
    manifest = ["--optimizer-manifest-file", tmp_path / "manifest.json"]
    (straight, _), _ = resumed(tmp_path, size, *run, *manifest, **how)
    frozen = {name for name in everywhere(straight, "after") if re.search(pattern, name)}
    assert unchanged(straight) == frozen != set()
    assert manifest_of(tmp_path / "manifest.json").keys() == everywhere(straight, "after").keys() - frozen


def test_optimizers_that_differ_by_layer_are_saved_and_resumed(tmp_path):
    """Of two stages the second has no matrix of Muon's, and the first no matrix of Adam's within a layer."""
    overrides = tmp_path / "overrides.json"
    overrides.write_text(json.dumps([{"select": "decoder.layers.1.*.weight", "optimizer": "adam", "eps": 1e-6}]))
    run = [*RUN, *PP2, "--train-iters", 4, "--ckpt-format", "torch_dist", "--optimizer-overrides", overrides]
    (straight, _), _ = resumed(tmp_path, 2, *run)
    assert not any("momentum_buffer" in state for state in straight[1]["after"].values())
    assert not unchanged(straight)


def test_odd_shapes_train_as_on_one_rank_under_the_distributed_optimizer(tmp_path):
    run = [*RUN, *ODD, "--train-iters", 4, "--bf16"]
    plain, _ = train(tmp_path / "plain", 2, *run)
    shared, _ = train(tmp_path / "shared", 2, *run, "--use-distributed-optimizer")
    for one, other in zip(plain, shared, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-3)
