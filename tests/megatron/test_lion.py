"""Lion in real Megatron: under the distributed optimizer, and as the scalar optimizer beside Muon."""

import pytest

from megatron_eopt import registry
from tests.megatron.runs import MUON, UPSTREAM, summary, train

LION = ["--num-layers", 2, "--optimizer", "lion", "--lr", "1e-3", "--min-lr", "1e-3", "--ckpt-format", "torch_dist"]
BESIDE_MUON = ["--num-layers", 2, *MUON, "--muon-fp32-matmul-prec", "high", "--muon-scalar-optimizer", "lion"]


def kept(snapshot, key):
    return [name for name, state in snapshot.items() if key in state]


@pytest.mark.full
@pytest.mark.shows("--use-distributed-optimizer with lion")
def test_the_distributed_optimizer_shares_parameters_out_and_trains_the_same(tmp_path):
    run = [*LION, "--bf16", "--train-iters", 4]
    plain, _ = train(tmp_path / "plain", 2, *run)
    shared, output = train(tmp_path / "shared", 2, *run, "--use-distributed-optimizer")
    assert "Lion owns 15 parameters" not in summary(output)  # rank 0 has a part of them
    for one, other in zip(plain, shared, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-3)


@pytest.mark.shows("--muon-scalar-optimizer lion")
def test_beside_muon_it_equals_megatrons_own(tmp_path):
    run = [*BESIDE_MUON, "--train-iters", 10, "--muon-tp-mode", "duplicated"]
    (ours,), output = train(tmp_path / "ours", 1, *run)
    (theirs,), _ = train(tmp_path / "theirs", 1, *run, program=UPSTREAM)
    assert summary(output).endswith("; Lion owns 7 parameters with 16,704 elements on this rank")
    assert len(kept(ours["after"], "exp_avg")) == 7
    assert len(kept(ours["after"], "momentum_buffer")) == 8
    assert ours["losses"][-1] < 0.6 * ours["losses"][0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


def test_settings_come_from_its_own_flags():
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(optimizer="lion", lr=0.1, weight_decay=0.2, lion_beta1=0.8, adam_beta1=0.7)
    kwargs = registry.get_optimizer_entry("lion").config_to_kwargs(config, [], None)
    assert kwargs == {"lr": 0.1, "betas": (0.8, 0.98), "weight_decay": 0.2}
