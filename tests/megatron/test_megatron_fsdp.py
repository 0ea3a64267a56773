"""Muon in real Megatron under Megatron-FSDP, which cuts flat buffers of parameters at any row."""

import pytest
import torch

from tests.megatron.runs import MUON, losses, train, whole

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
