"""Muon in real Megatron under Megatron-FSDP, which cuts flat buffers of parameters at any row."""

import pytest
import torch

from tests.megatron.runs import MUON, assert_same, losses, train, whole

FSDP = [
    *("--use-megatron-fsdp", "--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"),
    *("--no-gradient-reduce-div-fusion", "--num-layers", "2", "--train-iters", "5"),
]
EXACT = [*MUON, "--muon-fp32-matmul-prec", "highest", "--lr", "1e-3", "--min-lr", "1e-3"]


def fsdp(strategy):
    return [*FSDP, "--data-parallel-sharding-strategy", strategy]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    ranks, _ = train(folder / "run", 1, *EXACT, "--num-layers", "2", "--train-iters", "5")
    return ranks


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, fsdp("optim")),
        (2, fsdp("optim_grads")),
        (2, fsdp("optim_grads_params")),
        (4, [*fsdp("optim_grads_params"), "--tensor-model-parallel-size", "2"]),
    ],
)
def test_parameters_are_those_of_one_rank(tmp_path, on_one_rank, ranks, flags):
    found, _ = train(tmp_path / "run", ranks, *EXACT, *flags)
    assert losses(found) == pytest.approx(losses(on_one_rank), rel=1e-5)
    expected, got = (whole([rank["after"] for rank in each]) for each in (on_one_rank, found))
    assert expected.keys() == got.keys()
    for name in expected:
        torch.testing.assert_close(got[name]["parameter"], expected[name]["parameter"], rtol=1e-5, atol=1e-5)


TP = "--tensor-model-parallel-size"


def resumed(folder, saved, ranks, *flags):
    """The last three of six steps, from a checkpoint of the first three."""
    saved.joinpath("latest_checkpointed_iteration.txt").write_text("3")
    return train(folder, ranks, *flags, "--train-iters", "6", "--load", saved)


def after(ranks):
    return whole([rank["after"] for rank in ranks])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps on two ranks, in fp32, with a checkpoint after three."""
    folder = tmp_path_factory.mktemp("straight")
    flags = [*EXACT, *fsdp("optim_grads_params")]
    ranks, _ = train(folder / "run", 2, *flags, "--train-iters", "6", "--save", folder / "ck", "--save-interval", "3")
    return ranks, folder / "ck"


def test_a_resumed_run_is_the_straight_one(tmp_path, straight):
    ranks, saved = straight
    found, _ = resumed(tmp_path / "run", saved, 2, *EXACT, *fsdp("optim_grads_params"))
    assert_same(after(found), after(ranks))


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, fsdp("optim")), (4, [*fsdp("optim_grads_params"), TP, 2]), (2, [*fsdp("optim_grads"), TP, 2])],
)
def test_a_checkpoint_goes_on_at_other_numbers_of_ranks(tmp_path, straight, ranks, flags):
    before, saved = straight
    found, _ = resumed(tmp_path / "run", saved, ranks, *EXACT, *flags)
    expected, got = after(before), after(found)
    for name in expected:
        for key in expected[name].keys() - {"cut"}:
            torch.testing.assert_close(got[name][key], expected[name][key], rtol=1e-4, atol=2e-5)
