"""Which optimizer updates what in real models, and that a start or a first step shows what is wrong with it."""

import re

import pytest
import torch

from tests.megatron.runs import (
    EP2,
    ETP2,
    FILES,
    MLA,
    MOE,
    MUON,
    PP2,
    SMALL_GPT,
    TIED,
    WITHOUT_GQA,
    doing,
    losses,
    manifest_of,
    overriding,
    refused,
    resumed,
    start,
    train,
    unchanged,
)
from tests.megatron.test_megatron_fsdp import fsdp

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 2, "--train-iters", 1, *MUON]
SHARED = ["--bf16", "--use-distributed-optimizer"]


@pytest.mark.parametrize(
    ("size", "flags", "model"),
    [
        pytest.param(1, [], SMALL_GPT, id="grouped queries"),
        pytest.param(1, MLA, WITHOUT_GQA, id="latent attention"),
        pytest.param(1, ["--mtp-num-layers", 1], SMALL_GPT, id="next tokens"),
        pytest.param(2, PP2, TIED, id="tied-PP2"),
        pytest.param(2, [*MOE, *EP2, "--bf16"], SMALL_GPT, id="EP2"),
        # and TP 1: without Transformer Engine, experts run at no other TP
        pytest.param(2, [*MOE, *ETP2], SMALL_GPT, id="ETP2"),
        pytest.param(2, SHARED, SMALL_GPT, id="DP2-shared"),
    ],
)
def test_every_parameter_has_one_optimizer_which_changes_it(tmp_path, size, flags, model):
    """The manifest names the parameters as the recorder does, and each step orthogonalizes its matrices."""
    run = [*RUN, *flags, "--train-iters", 2, "--optimizer-manifest-file", tmp_path / "manifest.json"]
    ranks, _ = train(tmp_path / "run", size, *run, model=model)
    manifest, momenta, matrices = manifest_of(tmp_path / "manifest.json"), set(), set()
    for rank in ranks:
        own = {name for name, state in rank["after"].items() if "momentum_buffer" in state}
        momenta |= own
        matrices |= {name for name, state in rank["after"].items() if state["parameter"].ndim == 2}
        count = sum(len(manifest[name].matrices) for name in own)
        assert count > 0
        assert rank["calls"] == [count, 2 * count]
    matrices = {name for name in matrices if "word_embeddings" not in name and not name.startswith("output_layer")}
    assert manifest.keys() == {name for rank in ranks for name in rank["after"]}
    assert not unchanged(ranks)
    assert {name for name, row in manifest.items() if row.optimizer == "muon"} == momenta == matrices
    assert {row.optimizer for row in manifest.values()} == {"muon", "adam"}
    assert {name for name, row in manifest.items() if row.matrices} == matrices


def test_both_ends_of_a_pipeline_step_tied_embeddings_alike(tmp_path):
    run = [*RUN, *PP2, "--train-iters", 4, "--optimizer-manifest-file", tmp_path / "manifest.json"]
    (first, last), _ = train(tmp_path / "run", 2, *run, model=TIED)
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    assert torch.equal(first["after"][embedding]["parameter"], last["after"][output]["parameter"])
    manifest = manifest_of(tmp_path / "manifest.json")
    assert manifest[output].tied_to == embedding
    assert manifest[output].optimizer == manifest[embedding].optimizer == "adam"


@pytest.mark.parametrize(
    "flags",
    [SHARED, ["--use-torch-fsdp2", "--micro-batch-size", 1], fsdp("optim_grads_params")],
    ids=["shared", "torch FSDP2", "Megatron-FSDP"],
)
def test_what_no_forward_pass_uses_is_named(flags):
    done = start(2, *SMALL_GPT, *RUN, *flags, "--train-iters", 2, **doing("unused"))
    ends = "--use-torch-fsdp2" in flags  # whose matrix has no gradient at all, instead of zeros
    assert ("some parameters got no gradient" in done.stdout, done.returncode != 0) == (ends, ends), done.stdout[-3000:]
    said = re.findall("the gradient is zero everywhere in the first step, of (.*?):", done.stdout)
    assert said == ["aside.bias, aside.weight"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("forget_one", r"no optimizer has \S+ .*expected one optimizer for every trainable parameter"),
        ("update_twice", r"embedding\S+ is listed 2 times, .*optimizer adam.* and .*optimizer muon.*expected one opt"),
        ("freeze:layers", "--optimizer muon is for matrices, and it has none on any rank"),
    ],
)
def test_a_start_fails_where_optimizers_are_wrong(what, message):
    assert re.search(message, said := refused(*RUN, **doing(what))), said[-3000:]


@pytest.mark.parametrize(
    ("size", "pattern", "flags"),
    [
        (2, "linear_fc", PP2),
        (2, "linear_(fc|qkv)", [*SHARED, "--num-layers", 1]),  # one matrix is left, and one of the ranks has none
        (2, "embedding|output|norm", SHARED),  # Adam has no parameter at all
    ],
    ids=["PP2", "one matrix", "nothing for Adam"],
)
def test_what_is_frozen_stands_still_and_a_resumed_run_goes_on(tmp_path, size, pattern, flags):
    run = [*RUN, *flags, "--train-iters", 4, *FILES, "--optimizer-manifest-file", tmp_path / "manifest.json"]
    (straight, _), _ = resumed(tmp_path, size, *run, **doing(f"freeze:{pattern}"))
    names = {name for rank in straight for name in rank["after"]}
    frozen = {name for name in names if re.search(pattern, name)}
    assert unchanged(straight) == frozen != set()
    assert manifest_of(tmp_path / "manifest.json").keys() == names - frozen


def test_optimizers_that_differ_by_layer_are_saved_and_resumed(tmp_path):
    """Of two stages the second has no matrix of Muon's, and the first no matrix of Adam's within a layer."""
    flags = overriding(tmp_path, {"select": "decoder.layers.1.*.weight", "optimizer": "adam", "eps": 1e-6})
    (straight, _), _ = resumed(tmp_path, 2, *RUN, *PP2, "--train-iters", 4, *FILES, *flags)
    assert not any("momentum_buffer" in state for state in straight[1]["after"].values())
    assert not unchanged(straight)


def test_odd_shapes_train_under_the_distributed_optimizer(tmp_path):
    """53 and 59 are prime, so that no number of ranks divides a side of most matrices."""
    odd = ["--hidden-size", 53, "--ffn-hidden-size", 59, "--num-attention-heads", 1, "--num-query-groups", 1]
    run = [*RUN, *odd, "--kv-channels", 6, "--make-vocab-size-divisible-by", 1, "--train-iters", 4, "--bf16"]
    plain, _ = train(tmp_path / "plain", 2, *run)
    shared, _ = train(tmp_path / "shared", 2, *run, *SHARED)
    assert losses(shared) == pytest.approx(losses(plain), rel=1e-3)


def test_a_loop_of_the_users_own():
    done = start(1, program=["tests/megatron/own_loop.py"])
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^muon +9 ", done.stdout, re.MULTILINE)  # of the manifest's totals
    assert done.stdout.count("the gradient is zero everywhere in the first step, of aside: no forward") == 1
