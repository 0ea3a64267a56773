"""AdEMAMix in real Megatron: of all parameters where ranks share them out, and of what Adam has beside Muon."""

import json

import pytest

from tests.megatron.runs import MUON, resumed, train, whole

# Warm-ups that end after the run, so that a resume goes on within them.
WARMUP = ["--ademamix-alpha", 8, "--ademamix-alpha-warmup", 9, "--ademamix-beta3-warmup", 9]
RUN = ["--num-layers", 2, "--lr", "3e-3", "--min-lr", "3e-3", "--ckpt-format", "torch_dist", *WARMUP]
KEYS = {"exp_avg_fast", "exp_avg_slow", "exp_avg_sq", "steps"}


@pytest.mark.wide
def test_the_distributed_optimizer_shares_parameters_out_and_trains_the_same(tmp_path):
    run = [*RUN, "--optimizer", "ademamix", "--bf16", "--train-iters", 4]
    plain, _ = train(tmp_path / "plain", 2, *run)
    (shared, _), _ = resumed(tmp_path, 2, *run, "--use-distributed-optimizer")
    for one, other in zip(plain, shared, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-3)
    of_ranks = [{name for name, state in rank["after"].items() if state.keys() >= KEYS} for rank in shared]
    assert not of_ranks[0] & of_ranks[1]


def test_it_updates_what_adam_would_beside_muon(tmp_path):
    (tmp_path / "overrides.json").write_text(
        json.dumps([{"select": f"shape:{shape}", "optimizer": "ademamix"} for shape in ("vector", "embedding")])
    )
    run = [*RUN, *MUON, "--train-iters", 4, "--optimizer-overrides", tmp_path / "overrides.json"]
    (straight, _), _ = resumed(tmp_path, 2, *run)
    states = whole([rank["after"] for rank in straight]).values()
    assert sum(state.keys() >= KEYS for state in states) == 7
    assert sum("momentum_buffer" in state for state in states) == 8
