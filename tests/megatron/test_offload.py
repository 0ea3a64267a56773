"""``--optimizer-cpu-offload`` with a matrix optimizer: the run without it, bit for bit, with momenta in host memory."""

import re

import pytest

from tests.megatron.runs import MUON, SMALL_GPT, assert_same, start, train

ADAMUON = ["--optimizer", "adaptive_muon", *MUON[2:], "--adaptive-muon-moment2-method", "adamuon"]
OFFLOAD = ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
LAYOUT = ["--num-layers", 2, "--tensor-model-parallel-size", 2, "--bf16", "--train-iters", 4]


def in_host_memory(output):
    found = re.search(r"elements on this rank, .* (\S+) MiB of their state in host memory", output)
    return 0.0 if found is None else float(found[1])


@pytest.mark.parametrize(
    "optimizer", [pytest.param(MUON, id="muon"), pytest.param(ADAMUON, id="adamuon", marks=pytest.mark.wide)]
)
def test_a_run_with_state_in_host_memory_is_the_run_without(tmp_path, optimizer):
    def run(name, *flags):
        ranks, output = train(tmp_path / name, 2, *LAYOUT, *optimizer, *flags)
        return ranks, in_host_memory(output)

    saved = ["--save", tmp_path / "with", "--save-interval", 2, "--ckpt-format", "torch_dist"]
    loaded = ["--load", tmp_path / "with", "--ckpt-step", 2]
    straight, none = run("straight")
    offloaded, all_of_it = run("offloaded", *OFFLOAD, *saved)
    half, some_of_it = run("half", *OFFLOAD, "--optimizer-offload-fraction", 0.5, *loaded)
    without, none_again = run("without", *loaded)
    assert none == none_again == 0
    assert 0.5 * all_of_it <= some_of_it < all_of_it
    for ranks in (offloaded, half, without):
        for one, other in zip(ranks, straight, strict=True):
            assert_same(one["after"], other["after"])
    assert [rank["losses"] for rank in offloaded] == [rank["losses"] for rank in straight]


def test_flags_for_an_adam_on_the_cpu_are_refused_by_their_names():
    flags = ["--num-layers", 1, "--bf16", "--train-iters", 1, *OFFLOAD]
    ended = start(1, *SMALL_GPT, *flags, *MUON, "--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-grads")
    assert ended.returncode
    assert "use_torch_optimizer_for_cpu_offload, no_pin_cpu_grads and no_pin_cpu_params are for an" in ended.stdout
    ended = start(1, *SMALL_GPT, *flags, "--optimizer", "soap")
    assert ended.returncode
    assert "keeps the state of Muon and its relatives in host memory" in ended.stdout
    ended = start(1, *SMALL_GPT, *flags, "--optimizer", "adam")  # which is Megatron's alone
    assert ended.returncode
    assert "must be used in conjunction with `--use-precision-aware-optimizer`" in ended.stdout
