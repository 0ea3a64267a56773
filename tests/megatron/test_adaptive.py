"""--optimizer adaptive_muon in real runs: two ranks train as one, and the flags reach the optimizer."""

import argparse
import inspect

import pytest

from megatron_eopt import TensorParallelAdaptiveMuon
from megatron_eopt.megatron import activation
from megatron_eopt.megatron.arguments import FLAGS
from tests.megatron.runs import MUON, SMALL_GPT, start, summary, train

ADAPTIVE = ["--optimizer", "adaptive_muon", *MUON[2:]]
RUN = ["--num-layers", 1, *ADAPTIVE, "--muon-fp32-matmul-prec", "highest", "--train-iters", 4]
TP2 = ["--tensor-model-parallel-size", 2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(
            [], "second moment by adamuon (aligned to Muon's size), first update RMS 0.2 (", marks=pytest.mark.full
        ),
        # 0.2 sqrt(max(rows, cols)) / sqrt(1 - 0.9) for sides of 64 to 192
        pytest.param(
            ["--adaptive-muon-no-align-rms", "--adaptive-muon-beta2", 0.9, "--adaptive-muon-eps", 1e-3],
            "second moment by adamuon (not aligned to Muon's size), first update RMS 5.06 to 8.764 (",
            marks=pytest.mark.full,
        ),
        (
            ["--adaptive-muon-moment2-method", "normuon"],
            "second moment by normuon (aligned to Muon's size), first update RMS 0.2 (",
        ),
        # 0.2 (1 - 0.95) (1 + 0.95) / sqrt(1 - 0.95)
        (
            ["--adaptive-muon-moment2-method", "namo"],
            "second moment by namo (not aligned to Muon's size), first update RMS 0.087 (",
        ),
    ],
    ids=["adamuon", "adamuon not aligned", "normuon", "namo"],
)
@pytest.mark.shows("--optimizer adaptive_muon")
def test_two_ranks_train_as_one(tmp_path, flags, said):
    if "--adaptive-muon-no-align-rms" in flags:  # updates of this size need a smaller rate
        flags = [*flags, "--lr", 1e-4, "--min-lr", 1e-4]
    (alone,), output = train(tmp_path / "one", 1, *RUN, *flags)
    assert "TensorParallelAdaptiveMuon owns 4 parameters" in summary(output)
    assert said in summary(output)
    two, output = train(tmp_path / "two", 2, *RUN, *flags, *TP2)
    assert "6 duplicated over 2 ranks (exact), " + said in summary(output)
    assert alone["losses"][-1] < alone["losses"][0]
    for rank in two:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-5)


@pytest.fixture
def parse():
    activation.activate()
    from megatron.training import arguments

    def parse(*flags):
        return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags)

    yield parse
    activation.deactivate()


def test_defaults_of_the_flags_are_those_of_the_optimizer(parse):
    args = parse("--optimizer", "adaptive_muon")
    defaults = inspect.signature(TensorParallelAdaptiveMuon.__init__).parameters
    flags = [flag for flag in FLAGS if flag.optimizer == "adaptive_muon"]
    assert [flag.name for flag in flags] == [
        "--adaptive-muon-moment2-method",
        "--adaptive-muon-beta2",
        "--adaptive-muon-eps",
        "--adaptive-muon-no-align-rms",
    ]
    for flag in flags:
        assert getattr(args, flag.dest) == defaults[flag.setting].default
    assert parse("--adaptive-muon-no-align-rms").adaptive_muon_align_rms is False


def test_what_has_no_field_gets_onto_the_config(parse):
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training import training

    assert not hasattr(OptimizerConfig(optimizer="adaptive_muon", lr=0.1), "adaptive_muon_align_rms")
    args = argparse.Namespace(optimizer="adaptive_muon", muon_tp_mode="auto", lr=0.1)
    args.adaptive_muon_align_rms, args.adaptive_muon_moment2_method = False, "namo"
    config, _ = training.get_megatron_optimizer_config(args)
    assert (config.adaptive_muon_align_rms, config.adaptive_muon_moment2_method) == (False, "namo")


def test_mistakes_are_refused_at_start(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--adaptive-muon-moment2-method", "adamoun")
    assert "invalid choice: 'adamoun'" in capsys.readouterr().err
    done = start(1, *SMALL_GPT, *RUN, "--adaptive-muon-beta2", 1.5)
    assert done.returncode != 0
    assert "ValueError: TensorParallelAdaptiveMuon: beta2 must lie in [0, 1), got 1.5" in done.stdout
