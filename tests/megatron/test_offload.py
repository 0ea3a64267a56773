"""``--optimizer-cpu-offload`` with a matrix optimizer: the run without it, bit for bit, with momenta in host memory."""

import pytest

from tests.megatron.runs import (
    ADAPTIVE,
    CLIP,
    EXPERTS,
    FILES,
    MUON,
    SHARED,
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
