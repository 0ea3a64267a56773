"""Every optimizer of the family in real Megatron: on two tensor-parallel ranks as on one, and resumed bit for bit."""

import functools
import json
import re

import pytest
from tables import state_tensors

from megatron_eopt.cli import main
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.registry import takes_matrices
from tests.megatron.runs import (
    EXACT,
    FILES,
    FLAGS,
    MUON,
    TP2,
    full,
    overriding,
    refused,
    resumed,
    saving,
    train,
    whole,
    wide,
    without_idle,
)
from tests.tools.test_described import planned

FAMILY = [name for name in OPTIMIZERS if name not in ("muon", "adaptive_muon", "schedule_free_adamw")]  # elsewhere
# Gradients of a few tokens do not span the sides of a matrix, so that their rounding chooses a part of eigenbases, by
# which weights move from the second step on: with noise in the last bits of its gradients, one rank is as far from one
# without as another layout is. Where the gradients are the same, so are the steps: test_same_gradients.py.
LOSSES_TO_COMPARE = {"soap": 4, "shampoo": 6, "kl_shampoo": 6}  # two of a step
SOONER = {"soap", "lion", "ademamix", "psgd_kron", "dion"}  # than the wide subset, which has all others


def run(name):
    return ["--num-layers", 2, *FLAGS[name], *EXACT, *FILES]


@pytest.mark.parametrize("name", [name if name in SOONER else wide(name) for name in FAMILY])
@pytest.mark.shows("--optimizer {name}")
def test_two_ranks_train_as_one_and_resume_bit_for_bit(tmp_path, name):
    flags = [*run(name), "--train-iters", 6]
    (alone,), output = train(tmp_path / "alone", 1, *flags, "--optimizer-manifest-file", tmp_path / "manifest.json")
    parameters = 8 if takes_matrices(name) else 15
    assert re.search(rf"^{name} +{parameters} ", output, re.MULTILINE)  # of the manifest's totals
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]
    assert f'"{name}"' in (tmp_path / "manifest.json").read_text()

    (straight, _), _ = resumed(tmp_path, 2, *flags, *TP2, at=3)
    kept = {key.rstrip("_0123456789") for state in straight[0]["after"].values() for key in state}
    assert {tensor.key.rstrip("_0123456789") for tensor in state_tensors(OPTIMIZERS[name])} <= kept
    compared = slice(LOSSES_TO_COMPARE.get(name))
    assert straight[0]["losses"][compared] == pytest.approx(alone["losses"][compared], rel=1e-4)
    assert straight[0]["losses"][-1] < 0.9 * straight[0]["losses"][0]


@pytest.mark.wide
def test_the_plan_of_a_command_line_is_that_of_its_run(tmp_path):
    """Of several tensor-parallel ranks: the test of what overrides give beside Muon."""
    flags = [*run("muon_hyperball"), "--use-torch-fsdp2", "--bf16", "--train-iters", 1]
    train(tmp_path / "run", 2, *flags, "--optimizer-manifest-file", tmp_path / "of_run.json")
    found, _ = planned(tmp_path, *without_idle(flags), ranks=2)
    assert found == json.loads((tmp_path / "of_run.json").read_text())


# Each owns one matrix of a run of Muon: layer, matrix, and the settings of its override.
BESIDE_MUON = [
    (0, "mlp.linear_fc1", {"optimizer": "spectron", "rank": 8}, {"factor_A", "u_B"}),
    (1, "mlp.linear_fc1", {"optimizer": "spectron", "rank": 16}, {"factor_A", "u_B"}),
    (0, "mlp.linear_fc2", {"optimizer": "scion", "lr": 4e-4, "min_lr": 4e-4}, {"momentum_buffer"}),
    (1, "mlp.linear_fc2", {"optimizer": "soap", "lr": 3e-3, "min_lr": 1e-3}, {"exp_avg", "exp_avg_sq", "L", "Q_R"}),
    (0, "self_attention.linear_proj", {"optimizer": "schedule_free_adamw"}, {"z", "exp_avg_sq", "schedule"}),
    (0, "self_attention.linear_qkv", {"optimizer": "psgd_kron", "lr": 1e-3, "min_lr": 1e-3}, {"Q_L_0", "bounds_2"}),
    (1, "self_attention.linear_proj", {"optimizer": "signum", "lr": 1e-3, "min_lr": 1e-4}, {"exp_avg"}),
]


@pytest.mark.wide
def test_each_owns_what_an_override_gives_it_beside_muon(tmp_path, capsys):
    """MatrixPlan, trained, evaluated, saved, verified and resumed bit for bit."""
    overrides = [{"select": f"layers.{layer}.{name}.weight"} | own for layer, name, own, _ in BESIDE_MUON]
    flags = ["--num-layers", 2, *MUON, *TP2, *overriding(tmp_path, *overrides), *FILES]
    flags += ["--train-iters", 4, "--eval-iters", 1, "--eval-interval", 2]
    (straight, _), _ = resumed(tmp_path, 2, *flags, "--optimizer-manifest-file", tmp_path / "of_run.json")
    after = whole([rank["after"] for rank in straight])
    for layer, name, own, states in BESIDE_MUON:
        found = after[f"decoder.layers.{layer}.{name}.weight"]
        assert states <= found.keys()
        if "rank" in own:
            assert found["factor_A"].shape == (192, own["rank"])
    assert main(["verify-checkpoint", str(tmp_path / "checkpoint")]) == 0
    assert "error" not in capsys.readouterr().out
    assert planned(tmp_path, *without_idle(flags), ranks=2)[0] == json.loads((tmp_path / "of_run.json").read_text())


def run_of(name, *flags):
    return ["--num-layers", 1, *FILES, "--train-iters", 1, *FLAGS.get(name, ["--optimizer", name]), *flags]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """Checkpoints of one step, by the flags that made them."""

    @functools.cache
    def make(*flags):
        folder = tmp_path_factory.mktemp("saved")
        train(folder / "run", 1, *run_of(*flags), *saving(folder / "checkpoint", 1))
        return folder / "checkpoint"

    return make


@pytest.mark.parametrize(
    ("saved", "flags", "message"),
    [
        (["scion"], ["polargrad"], "Scion wrote the state of decoder.layers"),  # a momentum and no more, both
        (["soap"], ["adam"], "SOAP wrote the state of decoder.layers"),
        (["soap"], ["soap", "--soap-max-dim", 64], "SOAP needs Q_R_0, Q_R_1, R_0, R_1, exp_avg"),
        full(["spectron"], ["spectron", "--spectron-rank", 8], "run needs (1, 64, 8)"),
    ],
)
def test_state_of_another_optimizer_or_other_settings_is_refused(saved_by, saved, flags, message):
    said = refused(*run_of(*flags), "--load", saved_by(*saved))
    assert message in said
    assert "--no-load-optim" in said


def test_a_side_without_a_factor_is_no_damage(saved_by, capsys):
    """Matrices of 96 rows beside those of 64, and SOAP has factors up to 64."""
    checkpoint = saved_by("soap", "--soap-max-dim", 64)
    assert main(["verify-checkpoint", str(checkpoint)]) == 0
    assert "error" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("spectron", ["--spectron-rank", 500], "rank must lie in [1, 64] for decoder.layers.0.self_attention"),
        ("scion", ["--muon-weight-decay", 0.1], "--muon-weight-decay: weight_decay: scion has no weight decay"),
        ("soap", ["--muon-preset", "match_adamw"], "soap has no --muon-preset match_adamw"),
        ("soap", ["--muon-split", "none"], "in an order that follows the tensor-parallel ranks"),
    ],
)
def test_what_cannot_run_is_refused_at_start(name, flags, message):
    assert message in refused(*run(name), "--train-iters", 1, *flags)
