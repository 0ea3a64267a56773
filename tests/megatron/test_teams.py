"""Real runs in which data-parallel ranks of a node work on matrices of one of them."""

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.cli import main
from megatron_eopt.megatron import dealing
from megatron_eopt.megatron.described import optimizers as described
from tests.megatron.lending import dealt_at_rates
from tests.megatron.runs import (
    HERE,
    LAUNCHER,
    MUON,
    SMALL_GPT,
    assert_close_in_bf16,
    losses,
    refused,
    resumed,
    summary,
    train,
    whole,
)
from tests.megatron.test_dealing import DEALT, deal, hands

LENDING = [*LAUNCHER[:-1], str(HERE / "lending.py")]
# Wide enough that the largest matrices are worth sharing. Of four ranks some have no matrix.
MODEL = ["--num-layers", 1, "--ffn-hidden-size", 512, *MUON, "--global-batch-size", 8]
RUN = [*MODEL, *DEALT, "--train-iters", 4]
FP32 = ["--muon-fp32-matmul-prec", "highest"]
FEW = '"*.self_attention.*": {optimizer: adam}'


def shared(output):
    """Matrices that are the work of several ranks, how many ranks these are, and milliseconds with and without."""
    found = re.search(
        r"the busiest needs (\S+) ms a step; .*; (\d+) are the work of (\d+) ranks each, else (\S+) ms", output
    )
    return found and (int(found[2]), int(found[3]), float(found[1]), float(found[4]))


@pytest.fixture
def few(tmp_path):
    """Flags that leave two matrices to Muon."""
    file = tmp_path / "few.yaml"
    file.write_text(FEW)
    return ["--optimizer-overrides", file]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param([*FP32, "--muon-tp-mode", "gram"], marks=pytest.mark.wide),
        ["--bf16", "--muon-tp-mode", "gram", "--overlap-grad-reduce", "--overlap-param-gather"],
        pytest.param([*FP32, "--optimizer", "adaptive_muon"], marks=pytest.mark.wide),
    ],
    ids=["fp32", "bf16", "adaptive"],
)
def test_four_ranks_train_as_without_teams_and_resume_bit_by_bit(tmp_path, few, how):
    run = [*RUN, *few, *how, "--ckpt-format", "torch_dist"]
    (found, output), _ = resumed(tmp_path, 4, *run, program=LENDING)
    matrices, ranks, ms, ms_alone = shared(output)
    assert matrices >= 1
    assert ranks > 1
    assert ms < 0.95 * ms_alone
    assert [] in [sorted(hand) for hand in hands(found)]  # a rank without matrices helps, too
    alone, output = train(tmp_path / "alone", 4, *run, "--matrix-ranks", 1, program=LENDING)
    assert shared(output) is None
    if "--bf16" in how:
        assert_close_in_bf16(found, alone)
        return
    assert losses(found) == pytest.approx(losses(alone), rel=1e-5)
    expected, of_teams = (whole([rank["after"] for rank in each]) for each in (alone, found))
    for name, state in expected.items():
        torch.testing.assert_close(of_teams[name]["parameter"], state["parameter"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", [pytest.param("missing", marks=pytest.mark.wide), "nan"])
def test_no_rank_waits_for_a_gradient(tmp_path, few, how):
    run = [*RUN, *FP32, *few, "--muon-tp-mode", "gram"]
    lost = {"LOSE": how}
    found, output = train(tmp_path / "teams", 4, *run, program=LENDING, environment=lost, timeout=90)
    assert shared(output) is not None
    alone, _ = train(tmp_path / "alone", 4, *run, "--matrix-ranks", 1, program=LENDING, environment=lost)
    whole_run, _ = train(tmp_path / "whole", 4, *run, "--matrix-ranks", 1, program=LENDING)
    assert losses(found) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(found) != pytest.approx(losses(whole_run), rel=1e-5)  # in whose third step all matrices are updated


@pytest.mark.wide
def test_the_run_says_what_the_plan_of_its_flags_says(tmp_path, capsys, monkeypatch):
    flags = [*map(str, [*SMALL_GPT, *MODEL, *DEALT, "--train-iters", 1])]
    _, output = train(tmp_path / "run", 4, *RUN, "--train-iters", 1, "--bf16", program=LENDING)
    for module in (dealing, described):
        monkeypatch.setattr(module, "deal", dealt_at_rates)
    assert main(["plan", "--world-size", "4", "--", *flags, "--bf16"]) == 0
    planned = capsys.readouterr().out
    assert shared(output) is not None
    assert shared(planned)[:2] == shared(output)[:2]  # a plan is of a GPU, which computes half of symmetric products
    assert f"are the work of {shared(output)[1]} ranks of a node" in planned
    assert re.search(r"\d+ gram \w+ over \d of a node|\d+ owner over \d of a node", summary(output))


def test_a_plan_by_flags_is_that_by_sizes(capsys):
    """Of 8B on 64 nodes, where a matrix is the work of eight ranks."""
    sizes = ["--num-layers", 32, "--hidden-size", 4096, "--ffn-hidden-size", 14336, "--num-attention-heads", 32]
    run = [*SMALL_GPT, *sizes, "--num-query-groups", 8, "--global-batch-size", 1024, *MUON, *DEALT, "--bf16"]
    assert main(["plan", "--world-size", "512", "--", *map(str, run), "--train-iters", "1"]) == 0
    by_flags = capsys.readouterr().out
    assert main(["plan", "--model", "llama3-8b", "--data-parallel-size", "512"]) == 0
    by_sizes = capsys.readouterr().out
    assert shared(by_flags) == shared(by_sizes) == (32, 8, 5.76, 8.87)
    assert "in pipeline stage 0: 5.76 ms on its busiest rank" in by_flags
    for out in (by_flags, by_sizes):
        assert re.search(r"^1 of 28672 x 4096 +team +gram_\w+", out, re.MULTILINE)
        assert "448 MiB of temporaries beside those above." in out


@pytest.mark.wide
def test_a_checkpoint_goes_on_with_other_teams(tmp_path, few):
    run = [*RUN, *FP32, *few, "--muon-tp-mode", "gram", "--ckpt-format", "torch_dist"]
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 2]
    straight, _ = train(tmp_path / "straight", 4, *run, *saved, program=LENDING)
    load = ["--load", tmp_path / "checkpoint", "--ckpt-step", 2, "--matrix-ranks", 1]
    alone, output = train(tmp_path / "alone", 4, *run, *load, program=LENDING)
    assert shared(output) is None
    assert "changed since the checkpoint" not in output
    assert losses(alone) == pytest.approx(losses(straight)[-len(losses(alone)) :], rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--muon-tp-mode", "owner"], "tp_mode is owner, not auto or gram"),
        (["--optimizer-cpu-offload", "--optimizer-offload-fraction", 0.5], "state is in host memory"),
    ],
)
def test_it_is_said_why_no_team_works_on_a_matrix(tmp_path, flags, reason):
    _, output = train(tmp_path / "run", 4, *RUN, "--train-iters", 1, "--bf16", *flags, program=LENDING)
    assert shared(output) is None
    assert f"; several ranks to a matrix would be faster: {reason}\n" in output


@pytest.mark.wide
def test_where_one_rank_does_not_know_its_node_all_deal_alike(tmp_path):
    """As where a launcher sets no variable for it."""
    run = [*RUN, "--train-iters", 1]
    _, output = train(tmp_path / "unknown", 4, *run, program=LENDING, environment={"NODES": "2"})
    assert shared(output) is None
    assert (
        "would be faster: LOCAL_WORLD_SIZE does not say how many ranks every node has; --matrix-ranks can\n" in output
    )
    _, output = train(tmp_path / "told", 4, *run, "--matrix-ranks", 2, program=LENDING, environment={"NODES": "2"})
    assert shared(output)[1] == 2


def test_without_a_gain_nothing_is_shared_and_nothing_is_said(tmp_path):
    _, output = train(tmp_path / "run", 4, *RUN, "--train-iters", 1)
    assert len(deal(output)) == 1
    assert "ranks each" not in output
    assert "several ranks" not in output


@pytest.mark.wide
@pytest.mark.parametrize("flags", [[], ["--use-distributed-optimizer", "--no-balanced-deal"]])
def test_ranks_that_share_nothing_are_told(tmp_path, flags):
    run = [*MODEL, "--train-iters", 1, *flags, "--bf16", "--matrix-ranks"]
    _, output = train(tmp_path / "run", 1, *run, 2)
    assert "warning: --matrix-ranks without effect" in output
    _, output = train(tmp_path / "none", 1, *run, 1)
    assert "--matrix-ranks" not in output


@pytest.mark.parametrize("said", ["abc", "-1", ""])
def test_a_launcher_that_says_no_number_is_named(said, monkeypatch):
    monkeypatch.setattr(dealing, "lowest", lambda here, group: here)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE is no number of ranks on some rank .*{said!r}"):
        dealing.ranks_of_node()


@pytest.mark.parametrize(("layer_wise", "balanced"), [(False, True), (True, False)])
def test_nobody_is_asked_for_nodes_where_no_team_can_be(layer_wise, balanced, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "abc")
    dealing.dealt_by_time(SimpleNamespace(balanced_deal=balanced), SimpleNamespace(), "auto", layer_wise)


def test_no_rank_is_a_mistake():
    assert "--matrix-ranks must be at least 1, with which no matrix is shared, got 0" in refused(
        *RUN, "--matrix-ranks", 0, ranks=1
    )
