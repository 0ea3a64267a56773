"""Lion, AdEMAMix: under the distributed optimizer, and for what Adam has beside Muon."""

import pytest

from tests.megatron.runs import (
    FILES,
    MUON,
    SHARED,
    UPSTREAM,
    full,
    losses,
    overriding,
    resumed,
    train,
    whole,
    wide,
)

RUN = ["--num-layers", 2, *FILES]
LION = ["--optimizer", "lion", "--lr", "1e-3", "--min-lr", "1e-3"]
# Warm-ups that end after the run, so that a resume goes on within them.
WARMUP = ["--ademamix-alpha", 8, "--ademamix-alpha-warmup", 9, "--ademamix-beta3-warmup", 9]
ADEMAMIX = ["--optimizer", "ademamix", "--lr", "3e-3", "--min-lr", "3e-3", *WARMUP]


def having(snapshot, *keys):
    return {name for name, state in snapshot.items() if state.keys() >= {*keys}}


@pytest.mark.parametrize("optimizer", [full(LION, id="lion"), wide(ADEMAMIX, id="ademamix")])
@pytest.mark.shows("--use-distributed-optimizer with lion")
def test_the_distributed_optimizer_trains_the_same(tmp_path, optimizer):
    run = [*RUN, *optimizer, "--bf16", "--train-iters", 4]
    plain, _ = train(tmp_path / "plain", 2, *run)
    (shared, _), _ = resumed(tmp_path, 2, *run, *SHARED)
    assert losses(shared) == pytest.approx(losses(plain), rel=1e-3)
    here, there = ({name for name, state in rank["after"].items() if len(state) > 3} for rank in shared)
    assert here
    assert not here & there


def test_ademamix_updates_what_adam_would_beside_muon(tmp_path):
    overrides = [{"select": f"shape:{shape}", "optimizer": "ademamix"} for shape in ("vector", "embedding")]
    run = [*RUN, *ADEMAMIX, *MUON, "--train-iters", 4, *overriding(tmp_path, *overrides)]
    (straight, _), _ = resumed(tmp_path, 2, *run)
    after = whole([rank["after"] for rank in straight])
    assert len(having(after, "exp_avg_fast", "exp_avg_slow", "exp_avg_sq", "steps")) == 7
    assert len(having(after, "momentum_buffer")) == 8


@pytest.mark.shows("--muon-scalar-optimizer lion")
def test_lion_beside_muon_equals_megatrons_own(tmp_path):
    run = ["--num-layers", 2, *MUON, "--muon-fp32-matmul-prec", "high", "--muon-scalar-optimizer", "lion"]
    run += ["--train-iters", 10, "--muon-tp-mode", "duplicated"]
    (ours,), _ = train(tmp_path / "ours", 1, *run)
    (theirs,), _ = train(tmp_path / "theirs", 1, *run, program=UPSTREAM)
    assert len(having(ours["after"], "exp_avg")) == 7
    assert ours["losses"][-1] < 0.6 * ours["losses"][0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
