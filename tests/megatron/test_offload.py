"""``--optimizer-cpu-offload`` with a matrix optimizer: the run without it, bit for bit, with momenta in host memory."""

import re

import pytest

from megatron_eopt.tools.plan.plan_command import planned_run
from tests.megatron.runs import (
    ADAPTIVE,
    CLIP,
    EXPERTS,
    FILES,
    MUON,
    SHARED,
    SMALL_GPT,
    TP2,
    assert_same_ranks,
    train,
)

OFFLOAD = ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
RUN = ["--num-layers", 2, "--bf16", "--train-iters", 4]
HALF = [*OFFLOAD, "--optimizer-offload-fraction", 0.5]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "then"),
    [
        ([*MUON, *SHARED], HALF),
        ([*ADAPTIVE, "adamuon", *TP2], []),
        (["--optimizer", "mars_muon", *EXPERTS], []),
    ],
    ids=["muon-DP2-distributed-half", "adamuon-TP2-without", "mars-EP2-without"],
)
@pytest.mark.shows("--optimizer-cpu-offload")
def test_a_run_with_state_in_host_memory_is_the_run_without(tmp_path, flags, then):
    """Also where it is resumed with a half of it there, or without."""

    def run(name, *more):
        ranks, _ = train(tmp_path / name, 2, *RUN, *flags, *CLIP, *more)
        return ranks, sum(rank["host_bytes"] for rank in ranks)

    saved = ["--save", tmp_path / "saved", "--save-interval", 2, *FILES]
    straight, none = run("straight")
    offloaded, all_of_it = run("offloaded", *OFFLOAD, *saved)
    resumed, some_of_it = run("resumed", *then, "--load", tmp_path / "saved", "--ckpt-step", 2)
    assert none == 0 < all_of_it
    assert 0.49 * all_of_it <= some_of_it < all_of_it if then else some_of_it == 0
    assert_same_ranks(offloaded, straight)
    assert_same_ranks(resumed, straight)
    assert [rank["losses"] for rank in offloaded] == [rank["losses"] for rank in straight]


def test_the_plan_of_described_flags_says_what_the_step_copies():
    flags = list(map(str, [*SMALL_GPT, *RUN, *TP2, *MUON, *HALF]))
    without_offload = [flag for flag in flags if flag != "--optimizer-cpu-offload"]
    (plan,), (without,) = (planned_run(x, 2).stages for x in (flags, without_offload))
    entries = 2 * (64 * 128 + 64 * 64 + 192 * 64 + 96 * 64) // 2  # of this rank
    copied = float(re.search(r"State in host memory: (\S+) MB of this rank", plan)[1]) * 1e6
    assert 0.5 * 4 * entries <= 1.01 * copied < 4 * entries
    assert "host memory" not in without
