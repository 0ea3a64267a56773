"""Modifiers of Muon's step in real Megatron: by flags, by overrides, saved, and loaded into runs without them."""

import pytest

from tests.megatron.runs import (
    EXACT,
    FILES,
    MUON,
    TP2,
    assert_trains_as,
    overriding,
    refused,
    resumed,
    saving,
    train,
)

RUN = ["--num-layers", 2, *MUON, *EXACT, "--weight-decay", 0.1, *FILES]
TWO = ["--muon-cautious-weight-decay", "--muon-relative-update", "match", "--muon-update-ratio", 0.5]
TWO += ["--muon-extra-scale-factor", 1]
UNSCALED = ["--muon-weight-norm", "hold", "--muon-extra-scale-factor", 1]
HOLD = [*UNSCALED, "--muon-weight-decay", 0]
HELD = "decoder.layers.1.mlp.linear_fc2.weight"


def grown(rank):
    """By how much the norm of each weight has grown in a run."""
    before, after = rank["before"], rank["after"]
    return {name: (after[name]["parameter"].norm() / before[name]["parameter"].norm()).item() for name in before}


@pytest.mark.wide
def test_modifiers_train_as_on_one_rank_and_resume(tmp_path):
    """The override holds the norm of one matrix, whose layer has other state than the first one then."""
    held = {"weight_norm": "hold", "relative_update": "none", "cautious_weight_decay": False, "weight_decay": 0.0}
    overrides = overriding(tmp_path, {"select": HELD, **held, "lr": 0.05, "min_lr": 0.05})
    flags = [*RUN, *TWO, *overrides, "--train-iters", 6]
    (alone,), _ = train(tmp_path / "alone", 1, *flags, "--optimizer-manifest-file", tmp_path / "manifest.json")
    (straight, _), _ = resumed(tmp_path, 2, *flags, *TP2, at=3)
    assert_trains_as(straight, [alone], rel=1e-4)
    of_norms = grown(alone)
    assert of_norms.pop(HELD) == pytest.approx(1, abs=1e-6)
    assert min(abs(ratio - 1) for name, ratio in of_norms.items() if name.endswith("linear_fc2.weight")) > 1e-4
    assert [name for name, kept in alone["after"].items() if "radius" in kept] == [HELD]
    manifest = (tmp_path / "manifest.json").read_text()
    assert '"weight_norm": "hold"' in manifest
    assert "overrides.json" in manifest


def test_norms_begin_anew_or_are_left_out_in_a_load(tmp_path):
    run = [*RUN, "--train-iters", 4]
    train(tmp_path / "plain", 1, *run, *saving(tmp_path / "a", 2))
    (then,), said = train(tmp_path / "held", 1, *run, *HOLD, "--load", tmp_path / "a")
    assert "the checkpoint lacks radius of some parameters, which modifiers of this run keep: it begins anew" in said
    assert grown(then)[HELD] == pytest.approx(1, abs=1e-6)
    train(tmp_path / "holding", 1, *run, *HOLD, *saving(tmp_path / "b", 2))
    (then,), said = train(tmp_path / "no longer", 1, *run, "--load", tmp_path / "b")
    assert "the checkpoint holds radius of some parameters, which no modifier of this run keeps: it is left out" in said
    assert "radius" not in then["after"][HELD]
    assert abs(grown(then)[HELD] - 1) > 1e-4


def test_a_decay_of_held_weights_is_refused_at_start():
    said = refused(*RUN, *UNSCALED, "--train-iters", 1)
    assert "with weight_norm 'hold' has no weight decay, got 0.1" in said
