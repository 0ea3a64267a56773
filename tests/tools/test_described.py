"""``plan -- FLAGS``: what it says is what the run will print, without a run."""

import json
import re
import subprocess
import sys
from math import prod

import pytest

from megatron_eopt.cli import main
from megatron_eopt.tools.plan.plan_command import planned_run
from tests.megatron.runs import MUON, ROOT, SMALL_GPT, TP2, train

pytestmark = pytest.mark.wide

SHORT = ["--num-layers", 2, "--train-iters", 1]
RUN = [*SHORT, *MUON]
MOE = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 48]


def planned(folder, *flags, ranks):
    """The manifest by the command, run by itself: it asks for a process that takes part in nothing."""
    file = folder / "planned.json"
    own = ["plan", "--json", file, "--world-size", ranks, "--", *SMALL_GPT, *flags]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_eopt.cli", *map(str, own)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text()), done.stdout


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, [*TP2, "--muon-split", "all"]),
        (2, ["--pipeline-model-parallel-size", 2, "--muon-preset", "match_adamw"]),
        (2, [*MOE, "--bf16", "--muon-lr", "1e-3", "--muon-min-lr", "1e-4"]),
        (2, ["--bf16", "--use-distributed-optimizer", "--muon-scalar-optimizer", "lion"]),
    ],
    ids=["TP", "PP", "MoE", "distributed optimizer"],
)
def test_the_manifest_is_that_of_the_run(tmp_path, ranks, layout):
    flags = [*RUN, *layout]
    if "match_adamw" in layout:
        flags = [flag for flag in flags if flag not in ("--muon-extra-scale-factor", "0.2")]
    train(tmp_path / "run", ranks, *flags, "--optimizer-manifest-file", tmp_path / "of_run.json")
    found, output = planned(tmp_path, *flags, ranks=ranks)
    assert found == json.loads((tmp_path / "of_run.json").read_text())
    assert "this plan" in output
    assert "\nTensorParallelMuon, tp_mode auto\n" in output


def test_an_override_may_be_for_experts_of_other_ranks(tmp_path):
    overrides = tmp_path / "overrides.json"
    overrides.write_text(json.dumps({f"local_experts.{number}.*": {"lr": 0.002, "min_lr": 0.001} for number in (1, 3)}))
    flags = [*SMALL_GPT, *RUN, *MOE, "--expert-model-parallel-size", 2, "--optimizer-overrides", overrides]
    run = planned_run([*map(str, flags)], 2)
    experts = [each for each in run.families if "local_experts" in each.pattern]
    assert {each.like.lr for each in experts} == {0.01, 0.002}
    assert sum(each.count for each in experts) == 2 * 2 * 2  # layers, matrices, experts of a rank


def state_of(text):
    """Bytes of state that a stage's text says."""
    return float(re.match(r"State, .*: (\S+) MB", text)[1]) * 1e6


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer", "soap"],
        ["--optimizer", "soap", "--soap-no-share-over-dp"],
        ["--optimizer", "soap", *TP2],
        ["--optimizer", "kl_shampoo", "--use-torch-fsdp2"],
        ["--optimizer", "psgd_kron", *TP2],
        ["--optimizer", "lion", *TP2],
        [*MUON, "--optimizer-momentum-dtype", "bf16", "--optimizer-cpu-offload"],
        ["--optimizer", "soap", "--use-distributed-optimizer", "--bf16"],
    ],
    ids=["DP", "alone", "TP", "FSDP2", "psgd", "lion", "offloaded", "dealt"],
)
def test_state_is_that_of_the_run(tmp_path, flags):
    run = [*SHORT, *flags]
    ranks, _ = train(tmp_path / "run", 2, *run)
    [text] = planned_run([*map(str, [*SMALL_GPT, *run])], 2).stages
    copies = [kept["main"].nbytes for kept in ranks[0]["after"].values() if "main" in kept]
    assert state_of(text) == pytest.approx(ranks[0]["state_bytes"] + sum(copies), rel=0.01)


def test_state_is_that_of_the_first_rank_of_each_stage():
    """With the fp32 copies of bf16 parameters; stages are alike but for embedding, output and the last norm."""
    flags = [*map(str, [*SMALL_GPT, *RUN, "--bf16", "--pipeline-model-parallel-size", 2])]
    run = planned_run(flags, 2)
    assert len(run.stages) == 2
    held = [*map(state_of, run.stages)]
    elements = sum(each.count * prod(each.like.shape) for each in run.families)
    state = sum(each.count * each.like.state_bytes for each in run.families)
    assert sum(held) == pytest.approx(state + 4 * elements, rel=0.01)


@pytest.mark.parametrize("more", [[], ["--ckpt-format", "torch"]], ids=["by operations", "by size"])
def test_a_rank_plans_the_matrices_that_are_dealt_to_it(more):
    """The dense matrices of a layer are dealt to two ranks; of the experts each rank has its own."""
    flags = [*SMALL_GPT, *RUN, *MOE, "--num-experts", 64, "--moe-layer-freq", "[0,1]", "--bf16", *more]
    flags += ["--use-distributed-optimizer", "--expert-model-parallel-size", 2, "--pipeline-model-parallel-size", 2]
    run = planned_run([*map(str, flags)], 4)
    assert "\n32 of 96 x 64 " in run.stages[1]
    # of its four dense matrices one rank has some
    of_mine = re.findall(r"^all (\d+): this plan", run.stages[1], flags=re.MULTILINE)
    assert 64 < int(*of_mine) < 64 + 5


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("soap", r"SOAP\nmatrices .*\nall-to-all +tp +\d\S* +2\n"),
        ("dion", r"Dion\nmatrices .*\nall-reduce +tp +\d\S* +2\n"),
        ("lion", r"Lion\nRanks exchange nothing in a step\."),
    ],
)
def test_other_optimizers_say_what_ranks_exchange(optimizer, said):
    run = planned_run([*map(str, [*SMALL_GPT, *SHORT, *TP2, "--optimizer", optimizer])], 2)
    [text] = run.stages
    assert re.search(said, text, re.DOTALL)


def test_flags_without_effect_are_listed(capsys):
    flags = [*map(str, [*SMALL_GPT, *RUN])]
    assert planned_run(flags).refused == []
    assert planned_run([*flags, "--muon-momentum-from-adam", "--load", "elsewhere"]).refused == []
    assert main(["plan", "--", *flags, "--lion-beta1", "0.5"]) == 1
    assert "The run will be refused: --lion-beta1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--world-size", 4], "unrecognized arguments: --world-size 4"),
        (["--optimizer", "adam"], "without effect, with --optimizer adam"),
        (["--num-attention-heads", 5], "Megatron refuses these flags: assert args.hidden_size % args.num_attention_he"),
        (["--fp16"], "emerging optimizer with fp16 is not supported"),
        (["--bf16", "--fp8-param-gather"], "leave --fp8-param-gather and --fp4-param-gather away"),
        (["--bf16", "--loss-scale", 8], "bf16 needs no loss scale"),
        (["--qk-clip"], "DotProductAttention records no largest logits"),
    ],
)
def test_what_the_run_would_be_refused_for(capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["plan", "--", *map(str, [*SMALL_GPT, *RUN, *flags])])
    assert message in capsys.readouterr().err


def test_what_transformer_engine_can_is_planned():
    """Its attention records the largest logits, and is not built."""
    assert planned_run([*map(str, [*SMALL_GPT, *RUN, "--transformer-impl", "transformer_engine", "--qk-clip"])]).stages


def selecting(folder, *selectors):
    """Flags of a run with overrides for these selectors."""
    overrides = folder / "overrides.json"
    overrides.write_text(json.dumps({selector: {"lr": 0.02} for selector in selectors}))
    return [*map(str, [*SMALL_GPT, *RUN, "--optimizer-overrides", overrides])]


def test_a_selector_may_be_for_another_stage(tmp_path):
    flags = selecting(tmp_path, *(f"layers.{number}.mlp.linear_fc1.weight" for number in (0, 1)), "linear_fcc1.weight")
    run = planned_run([*flags, "--pipeline-model-parallel-size", "2"], 2)
    (refused,) = run.refused
    assert refused.endswith(":1: select: 'linear_fcc1.weight' matches no parameter, did you mean 'linear_fc1.weight'?")


@pytest.mark.parametrize(
    ("flags", "elsewhere"),
    [
        (["--transformer-impl", "transformer_engine"], "layers of Transformer Engine"),
        ([*MOE, "--expert-model-parallel-size", 2], "experts of other ranks"),
    ],
)
def test_what_cannot_be_known_of_a_selector_is_said(tmp_path, flags, elsewhere):
    run = planned_run([*selecting(tmp_path, "layer_norm_weight"), *map(str, flags)], 2)
    assert run.refused == []
    (doubtful,) = run.doubtful
    assert "select: 'layer_norm_weight' matches no parameter" in doubtful
    assert f"(unless it is for {elsewhere}, which a plan does not build)" in doubtful


def test_an_optimizer_without_matrices_is_refused(tmp_path):
    overrides = tmp_path / "overrides.json"
    overrides.write_text(json.dumps({"*": {"optimizer": "adam"}}))
    (refused,) = planned_run([*map(str, [*SMALL_GPT, *RUN, "--optimizer-overrides", overrides])]).refused
    assert refused.startswith("--optimizer muon is for matrices, and it has none on any rank")


def test_what_the_run_would_warn_of():
    flags = [*map(str, [*SMALL_GPT, *RUN])]
    assert planned_run(flags).warned == []
    (warned,) = planned_run([*flags, "--muon-extra-scale-factor", "1"]).warned
    assert warned.startswith("muon with scale mode spectral makes updates of RMS 1, 5 times Adam's 0.2")


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        (
            "muon",
            {"num_ns_steps": 4, "weight_norm": "hold", "weight_decay": 0, "extra_scale_factor": 0.5},
            "extra_scale_factor has no effect here, got 0.5",
        ),
        ("muon", {"scale_mode": "none"}, "unknown scale_mode 'none': expected one of spectral"),
        ("shampoo", {"scale_mode": "none"}, None),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, capsys, optimizer, settings, message):
    overrides = tmp_path / "overrides.json"
    overrides.write_text(json.dumps({"linear_fc1.weight": settings}))
    run = [*SMALL_GPT, *SHORT, "--optimizer", optimizer, "--optimizer-overrides", overrides]
    if message is None:
        assert main(["plan", "--", *map(str, run)]) == 0
        assert f"scale_mode none ({overrides}:1)" in re.sub(r"\s+", " ", capsys.readouterr().out)
        return
    with pytest.raises(SystemExit):
        main(["plan", "--", *map(str, run)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (["--lr-decay-style", "constant"], "0.01"),
        (["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", 1], "0.01 to 0"),
    ],
)
def test_rates_are_those_of_the_schedule(capsys, schedule, rates):
    """Megatron's constant one never comes to --min-lr."""
    flags = [*SMALL_GPT, *RUN, "--min-lr", 0, "--muon-min-lr", "1e-3", "--train-iters", 10, *schedule]
    assert main(["plan", "--", *map(str, flags)]) == 0
    out = capsys.readouterr().out
    assert {*re.findall(r"^(?:muon|adam): lr (.+?), decay", out, re.MULTILINE)} == {
        rates,
        rates.replace("to 0", "to 0.001"),
    }
    unused = "min_lr 0.001 by --muon-min-lr, as the schedule is constant"
    assert (unused in out) is (rates == "0.01")
    assert ("min_lr 0.001 (--muon-min-lr)" in out) is (rates != "0.01")
