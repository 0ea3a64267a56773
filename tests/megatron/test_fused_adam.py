"""Beside a fused Adam, which counts its steps in groups, matrices and checkpoints are as they are beside torch's."""

import re
import shutil

import pytest

from tests.megatron.runs import FILES, HERE, MUON, TP2, resumed, train, whole

RATE = 1e-4  # so that other rounding in one step hardly changes the next gradients, and decay shows
RUN = ["--num-layers", 2, *MUON, "--train-iters", 4, *TP2]
RUN += ["--lr", RATE, "--min-lr", RATE, "--weight-decay", 1]


@pytest.fixture(scope="module")
def apex(tmp_path_factory):
    """A folder for PYTHONPATH by which Megatron finds Apex's optimizers, and no other part of it, such as norms."""
    folder = tmp_path_factory.mktemp("apex")
    shutil.copy(HERE / "fused_adam.py", folder)
    (folder / "sitecustomize.py").write_text("import sys, fused_adam\n\nsys.modules['apex.optimizers'] = fused_adam\n")
    return folder


def steps_of_groups(ranks):
    return {group["step"] for rank in ranks for groups in rank["groups"] for group in groups if "step" in group}


@pytest.mark.wide
def test_a_fused_adam_beside_muon(tmp_path, apex):
    """It takes the steps of torch's, and a run that is resumed with it goes on bit for bit."""
    (straight, output), (again, _) = resumed(tmp_path / "fused", 2, *RUN, *FILES, packages=apex)
    torchs, _ = train(tmp_path / "torch", 2, *RUN)
    assert steps_of_groups(straight) == steps_of_groups(again) == {4}
    assert steps_of_groups(torchs) == set()  # so it was another Adam
    assert re.search(r"\| adam: learning rate \S+, grad norm \d", output)
    before, expected = (whole([rank[when] for rank in torchs]) for when in ("before", "after"))
    after = whole([rank["after"] for rank in straight])
    by_adam = [name for name in expected if "exp_avg_sq" in expected[name]]
    assert len(expected) > len(by_adam) > 0
    for name in by_adam:
        moved, should = (x[name]["parameter"] - before[name]["parameter"] for x in (after, expected))
        assert should.abs().max() > 2 * RATE
        assert (moved - should).abs().max() < 0.01 * RATE, name
        for key in ("exp_avg", "exp_avg_sq"):
            x, y = after[name][key], expected[name][key]
            assert (x - y).abs().max() < 1e-3 * y.abs().max(), (name, key)
