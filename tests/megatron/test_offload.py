"""``--optimizer-cpu-offload`` with a matrix optimizer: the run without it, bit for bit, with momenta in host memory."""

import re

import pytest

from megatron_eopt.megatron.described import planned_run
from tests.megatron.runs import CLIP, MUON, SMALL_GPT, WARMUP, assert_same, start, train

ADAMUON = ["--optimizer", "adaptive_muon", *MUON[2:], "--adaptive-muon-moment2-method", "adamuon"]
OFFLOAD = ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
RUN = ["--num-layers", 2, "--bf16", "--train-iters", 4]
LAYOUTS = {
    "TP2": ["--tensor-model-parallel-size", 2],
    "DP2-distributed": ["--use-distributed-optimizer"],
    "EP2": ["--num-experts", 4, "--expert-model-parallel-size", 2, "--moe-token-dispatcher-type", "alltoall"],
}
HALF = [*OFFLOAD, "--optimizer-offload-fraction", 0.5]
CASES = [  # and how the run is resumed
    pytest.param(MUON, "TP2", HALF, id="muon-TP2-half", marks=pytest.mark.wide),
    pytest.param(ADAMUON, "TP2", [], id="adamuon-TP2-without", marks=pytest.mark.wide),
    pytest.param(MUON, "DP2-distributed", HALF, id="muon-DP2-distributed-half", marks=pytest.mark.wide),
    pytest.param(["--optimizer", "mars_muon"], "EP2", [], id="mars-EP2-without", marks=pytest.mark.wide),
]


def in_host_memory(output):
    found = re.search(r"elements on this rank, .* (\S+) MiB of their state in host memory", output)
    return 0.0 if found is None else float(found[1])


@pytest.mark.parametrize(("optimizer", "layout", "then"), CASES)
@pytest.mark.shows("--optimizer-cpu-offload")
def test_a_run_with_state_in_host_memory_is_the_run_without(tmp_path, optimizer, layout, then):
    def run(name, *flags):
        ranks, output = train(tmp_path / name, 2, *RUN, *LAYOUTS[layout], *optimizer, *CLIP, *WARMUP, *flags)
        return ranks, in_host_memory(output)

    saved = ["--save", tmp_path / "saved", "--save-interval", 2, "--ckpt-format", "torch_dist"]
    straight, none = run("straight")
    offloaded, all_of_it = run("offloaded", *OFFLOAD, *saved)
    resumed, some_of_it = run("resumed", *then, "--load", tmp_path / "saved", "--ckpt-step", 2)
    assert none == 0 < all_of_it
    assert 0.49 * all_of_it <= some_of_it < all_of_it if then else some_of_it == 0
    for ranks in (offloaded, resumed):
        for one, other in zip(ranks, straight, strict=True):
            assert_same(one["after"], other["after"])
    assert [rank["losses"] for rank in offloaded] == [rank["losses"] for rank in straight]


def test_the_plan_of_described_flags_says_what_the_step_copies():
    flags = list(map(str, [*SMALL_GPT, *RUN, *LAYOUTS["TP2"], *MUON, *OFFLOAD, "--optimizer-offload-fraction", 0.5]))
    (plan,) = planned_run(flags).explained
    without, *_ = planned_run([flag for flag in flags if flag != "--optimizer-cpu-offload"]).explained
    entries = 2 * (64 * 128 + 64 * 64 + 192 * 64 + 96 * 64) // 2  # of this rank
    copied = float(re.search(r"State in host memory: (\S+) MiB of this rank", plan)[1]) * 2**20
    assert 0.5 * 4 * entries <= 1.01 * copied < 4 * entries
    assert "host memory" not in without


def test_flags_for_an_adam_on_the_cpu_are_refused_by_their_names():
    flags = ["--num-layers", 1, "--bf16", "--train-iters", 1, *OFFLOAD]
    ended = start(1, *SMALL_GPT, *flags, *MUON, "--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-grads")
    assert ended.returncode
    assert "use_torch_optimizer_for_cpu_offload, no_pin_cpu_grads and no_pin_cpu_params are for an" in ended.stdout
    ended = start(1, *SMALL_GPT, *flags, "--optimizer", "adam")  # which is Megatron's alone
    assert ended.returncode
    assert "must be used in conjunction with `--use-precision-aware-optimizer`" in ended.stdout
