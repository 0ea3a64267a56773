"""Real Megatron runs under Megatron-FSDP, which cuts flat buffers of parameters at any row."""

import functools
import re

import pytest
import torch

from megatron_eopt.family import OPTIMIZERS
from tests.megatron.runs import EXACT as PRECISE
from tests.megatron.runs import (
    MUON,
    SHARED,
    TP2,
    assert_close_in_bf16,
    assert_same,
    full,
    losses,
    refused,
    train,
    whole,
    wide,
)

# Adam's usual epsilon makes of the rounding of a gradient near zero a hundredth of a step: 1e-5 here, on some CPUs.
SMALL = ["--num-layers", 2, *PRECISE, "--lr", "1e-3", "--min-lr", "1e-3", "--adam-eps", "1e-5"]
EXACT = [*MUON, *SMALL]
EIGHT = ["--global-batch-size", 8]
INSTANCES = [*EIGHT, "--num-distributed-optimizer-instances", 2, "--overlap-grad-reduce"]


def fsdp(strategy):
    return [
        *("--use-megatron-fsdp", *SHARED, "--ckpt-format", "fsdp_dtensor"),
        *("--no-gradient-reduce-div-fusion", "--data-parallel-sharding-strategy", strategy),
    ]


SHARDED = fsdp("optim_grads_params")


def after(ranks):
    return whole([rank["after"] for rank in ranks])


def assert_close(found, expected, rtol=1e-6, atol=1e-6):
    """The same parameters, and state of the same names, to a tolerance, of entries above 1 in units of the largest."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].keys() == expected[name].keys(), name
        for key in expected[name].keys() - {"cut"}:
            largest = expected[name][key].abs().amax().clamp(min=1).item()
            torch.testing.assert_close(found[name][key], expected[name][key], rtol=rtol, atol=atol * largest)


def trained(folder, ranks, *flags, steps=5):
    return train(folder, ranks, *flags, "--train-iters", steps)[0]


def saved_after_three(folder, ranks, *flags):
    """Six steps, and the flags that go on after three."""
    found = trained(folder / "straight", ranks, *flags, "--save", folder / "ck", "--save-interval", 3, steps=6)
    (folder / "ck" / "latest_checkpointed_iteration.txt").write_text("3")
    return found, ["--load", folder / "ck"]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory):
    """What one rank trains to without FSDP, by the flags that change that; each run once."""

    @functools.cache
    def find(*flags):
        return trained(tmp_path_factory.mktemp("one") / "run", 1, *EXACT, *flags)

    return find


@pytest.mark.parametrize(
    ("ranks", "flags", "own"),
    [
        wide(2, fsdp("optim"), []),
        (2, SHARDED, []),
        wide(4, [*SHARDED, *TP2], []),
        wide(4, [*SHARDED, *INSTANCES], EIGHT),
    ],
)
@pytest.mark.shows("--use-megatron-fsdp", "--use-megatron-fsdp with --num-distributed-optimizer-instances above 1")
def test_muon_trains_as_on_one_rank(tmp_path, of_one_rank, ranks, flags, own):
    expected, found = of_one_rank(*own), trained(tmp_path / "run", ranks, *EXACT, *flags)
    if "--num-distributed-optimizer-instances" not in flags:  # where another rank than usual takes a batch
        assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert found[0]["grad_norms"] == pytest.approx(expected[0]["grad_norms"], rel=1e-5)  # by which it is clipped
    assert_close(after(found), after(expected))
    copies = sum(rank["state_bytes"] for rank in found) / expected[0]["state_bytes"]
    whole_model = 2 if "--num-distributed-optimizer-instances" in flags else 1
    replicated = 1.02 if TP2[0] in flags else 1  # norms, over tensor parallelism
    assert whole_model <= copies <= whole_model * replicated
    most = max(rank["state_bytes"] for rank in found) / expected[0]["state_bytes"]
    assert most <= whole_model / ranks * 1.05  # with a row that is not cut


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return saved_after_three(tmp_path_factory.mktemp("straight"), 2, *EXACT, *SHARDED)


@pytest.mark.shows("--use-megatron-fsdp")
def test_a_resumed_run_is_the_straight_one_bit_for_bit(tmp_path, straight):
    expected, load = straight
    found, said = train(tmp_path / "run", 2, *EXACT, *SHARDED, *load, "--train-iters", 6)
    assert_same(after(found), after(expected))
    assert "changed since the checkpoint" not in said
    assert "other settings than the checkpoint" not in said


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [full(1, fsdp("optim")), wide(4, [*SHARDED, *TP2])],
)
def test_a_checkpoint_goes_on_at_other_numbers_of_ranks(tmp_path, straight, ranks, flags):
    expected, load = straight
    found = trained(tmp_path / "run", ranks, *EXACT, *flags, *load, steps=6)
    assert_close(after(found), after(expected), atol=2e-5)


@pytest.mark.wide
def test_state_of_another_optimizer_is_refused(straight):
    flags = [*MUON, *SMALL, *SHARDED, "--optimizer", "adaptive_muon"]
    said = refused(*flags, *straight[1], "--train-iters", 6, ranks=2)
    message = "it holds momentum_buffer for .*needs moment2_buffer, mom.*pass --no-load-optim"
    assert re.search(message, said), said[-3000:]


@pytest.mark.full
def test_momenta_move_to_bf16_and_it_is_said(tmp_path, straight):
    expected, load = straight
    flags = ["--optimizer-momentum-dtype", "bf16", *load, "--train-iters", 6]
    found, said = train(tmp_path / "run", 2, *EXACT, *SHARDED, *flags)
    assert "the state of the checkpoint is converted: momentum_buffer from torch.float32 to torch.bfloat16" in said
    assert losses(found) == pytest.approx(losses(expected)[-len(losses(found)) :], rel=1e-2)


@pytest.mark.wide
def test_in_bf16_muon_goes_the_way_it_goes_on_one_rank(tmp_path):
    expected = trained(tmp_path / "one", 1, *EXACT, "--bf16")
    assert_close_in_bf16(trained(tmp_path / "run", 4, *EXACT, *SHARDED, "--bf16", *TP2), expected)


@pytest.mark.wide
def test_in_bf16_a_resumed_run_is_the_straight_one(tmp_path):
    flags = [*EXACT, *SHARDED, "--optimizer-momentum-dtype", "bf16", "--bf16"]
    expected, load = saved_after_three(tmp_path, 2, *flags)
    found = trained(tmp_path / "run", 2, *flags, *load, steps=6)
    assert_same(after(found), after(expected))


OTHERS = sorted(OPTIMIZERS.keys() - {"muon", "schedule_free_adamw"})
OWN = {"spectron": ["--spectron-rank", "16"]}
# Their bases of what the first gradients leave out follow from rounding: test_same_gradients.py compares them.
WITH_BASES = ("soap", "shampoo", "kl_shampoo")


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_every_optimizer_trains_and_resumes(tmp_path, name):
    flags = ["--optimizer", name, *SMALL, *OWN.get(name, [])]
    straight, load = saved_after_three(tmp_path, 2, *flags, *SHARDED)
    if name not in WITH_BASES:
        assert_close(after(straight), after(trained(tmp_path / "one", 1, *flags, steps=6)), rtol=1e-4, atol=1e-5)
    assert_same(after(trained(tmp_path / "again", 2, *flags, *SHARDED, *load, steps=6)), after(straight))
