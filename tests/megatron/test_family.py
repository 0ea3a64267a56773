"""Every optimizer of the family in real Megatron: on two tensor-parallel ranks as on one, and resumed bit for bit."""

import json

import pytest

from tests.megatron.runs import SMALL_GPT, assert_same, start, summary, train
from tests.megatron.test_described_plan import planned

TP2 = ["--tensor-model-parallel-size", 2]
EXACT = ["--muon-fp32-matmul-prec", "highest"]
FAMILY = {  # flags, and what the line at start says of it
    "spectron": (["--spectron-rank", 16, "--lr", "1e-2"], "each the product of two factors of rank 16"),
    "soap": (["--lr", "3e-3", "--min-lr", "3e-3"], "SOAP owns 8 parameters"),
    "muon_hyperball": (["--lr", "2e-2", "--min-lr", "2e-2"], "update RMS not known before the steps"),
    "scion": (["--muon-lr", "4e-4", "--muon-min-lr", "4e-4"], "Scion owns 8 parameters"),
    "polargrad": (["--lr", "1e-1", "--min-lr", "1e-1"], "update RMS not known before the steps"),
    "signum": (["--lr", "1e-3", "--min-lr", "1e-3"], "Signum owns 15 parameters"),
}
# Where gradients do not span a side, their rounding, which depends on the ranks, chooses a part of SOAP's bases. The
# same gradients make the same steps on any ranks: tests/distributed/test_soap.py.
TOLERANCE = {"soap": 5e-3}
STATES = {
    "spectron": {"factor_A", "factor_B", "momentum_buffer_A", "momentum_buffer_B", "u_A", "u_B", "projected"},
    "soap": {"exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R", "steps"},
    "muon_hyperball": {"momentum_buffer", "radius"},
    "scion": {"momentum_buffer"},
    "polargrad": {"momentum_buffer"},
    "signum": {"exp_avg"},
}


def run(name):
    return ["--num-layers", 2, "--optimizer", name, *FAMILY[name][0], *EXACT, "--ckpt-format", "torch_dist"]


@pytest.mark.parametrize("name", FAMILY)
def test_two_ranks_train_as_one_and_resume_bit_for_bit(tmp_path, name):
    flags = [*run(name), "--train-iters", 6]
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 3]
    (alone,), output = train(tmp_path / "alone", 1, *flags, "--optimizer-manifest-file", tmp_path / "manifest.json")
    assert FAMILY[name][1] in summary(output)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]
    owned = json.loads((tmp_path / "manifest.json").read_text())
    assert name in json.dumps(owned)

    straight, _ = train(tmp_path / "straight", 2, *flags, *TP2, *saved)
    resumed, _ = train(tmp_path / "resumed", 2, *flags, *TP2, "--load", tmp_path / "checkpoint", "--ckpt-step", 3)
    kept = {key.rstrip("_0123456789") for state in straight[0]["after"].values() for key in state}
    assert {key.rstrip("_0123456789") for key in STATES[name]} <= kept
    for one, other in zip(straight, resumed, strict=True):
        assert one["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE.get(name, 1e-4))
        assert_same(other["after"], one["after"])
        assert other["losses"] == one["losses"][len(one["losses"]) // 2 :]


@pytest.mark.parametrize("name", ["spectron", "soap"])
def test_the_plan_of_a_command_line_is_that_of_its_run(tmp_path, name):
    flags = [*run(name), *TP2, "--train-iters", 1]
    train(tmp_path / "run", 2, *flags, "--optimizer-manifest-file", tmp_path / "of_run.json")
    found, _ = planned(tmp_path, *flags, ranks=2)
    assert found == json.loads((tmp_path / "of_run.json").read_text())


def test_flags_of_another_optimizer_are_warned_of(tmp_path):
    _, output = train(tmp_path / "run", 1, *run("scion"), "--train-iters", 1, "--spectron-rank", 8, "--soap-max-dim", 9)
    assert "warning: --spectron-rank, --soap-max-dim without effect, with --optimizer scion" in output


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("spectron", ["--spectron-rank", 500], "rank must lie in [1, 64] for"),
        ("scion", ["--scion-radius", 0], "radius must be a finite number above 0, got 0"),
        ("scion", ["--muon-weight-decay", 0.1], "has no weight decay, got 0.1"),
        ("polargrad", ["--muon-tp-mode", "blockwise", *TP2], "take an exact tp_mode"),
        ("soap", ["--soap-precondition-frequency", 0], "precondition_frequency must be a whole number of at least 1"),
        ("soap", ["--muon-preset", "match_adamw"], "--muon-preset match_adamw is for muon and adaptive_muon"),
        ("soap", ["--muon-split", "none"], "in an order that follows the tensor-parallel ranks"),
        ("signum", ["--muon-lr", 0.1], "--muon-lr is for optimizers of matrices, and signum is for all"),
    ],
)
def test_what_cannot_run_is_refused_at_start(name, flags, message):
    done = start(2 if "blockwise" in flags else 1, *SMALL_GPT, *run(name), "--train-iters", 1, *flags)
    assert done.returncode != 0
    assert message in done.stdout
    assert "iteration        1/" not in done.stdout
