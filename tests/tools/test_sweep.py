"""``plan --sweep-gpus``: a line for each number of GPUs, and where more of them no longer help."""

import re
from dataclasses import replace

import pytest

from megatron_eopt.cli import main
from megatron_eopt.parallel.rates import Rates
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE
from megatron_eopt.tools.plan.models import dealt_matrices
from megatron_eopt.tools.plan.sizes import GPUS, Parallel, numbers_of
from megatron_eopt.tools.plan.sweep import swept
from tests.tools.test_models import HALF, SMALL


def test_numbers_are_doubled_and_hold_the_model():
    assert numbers_of("8..4096", 8) == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert numbers_of("8..100", 32) == [32, 64]
    for text in ("8", "64..8", "0..8"):
        with pytest.raises(ValueError, match=rf"first and the last number of GPUs, .* got '{text}'"):
            numbers_of(text, 32)
    with pytest.raises(ValueError, match="a multiple of 32 GPUs, and there is none"):
        numbers_of("8..16", 32)


def test_each_point_is_the_plan_of_that_number():
    rates = Rates()
    parallel = Parallel(tensor=2, pipeline=3)
    points = swept(SMALL, parallel, [6, 12, 24], HALF, "auto", rates, DEFAULT_WORKSPACE)
    for point, data in zip(points, (1, 2, 4), strict=True):
        assert point.data == data
        assert point.stage == dealt_matrices(SMALL, replace(parallel, data=data), HALF, "auto", rates)
        # a rank's parameters: half of a layer's, 64 x 64, two of 16 x 64, 64 x 64, 192 x 64 and 64 x 96
        held = (64 * 64 + 2 * 16 * 64 + 64 * 64 + 192 * 64 + 64 * 96) // 2
        assert point.memory[:2] == (2 * held, 4 * held)
        assert point.gather == pytest.approx(2 * held * (data - 1) / data / rates.bytes)
        assert point.stage.mean <= point.stage.seconds
    assert points[0].memory[2] == 8 * held
    assert points[0].stage.mean == points[0].stage.seconds


def test_it_says_where_more_gpus_no_longer_help(capsys):
    assert main(["plan", "--model", "llama3-8b", "--sweep-gpus", "8..256"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if re.match(r" *[0-9]", line)}
    assert list(rows) == ["8", "16", "32", "64", "128", "256"]
    assert rows["128"][1] == rows["256"][1]
    # 6.98 billion parameters of two bytes; 127 of 128 of them arrive at 300 GB/s
    assert float(rows["128"][3]) == pytest.approx(2 * 6.98e9 * 127 / 128 / 300e9 * 1e3, rel=0.005)
    assert (
        "More than 128 GPUs hardly make the step faster: decoder.layers.0.mlp.linear_fc1.weight, 28672 x 4096, " in out
    )


def test_one_plan_has_the_line_of_its_number_of_gpus(capsys):
    model = ["plan", "--model", "llama3-8b", "--tensor-model-parallel-size", "2"]
    lines = []
    for flags in (["--data-parallel-size", "4"], ["--sweep-gpus", "8..8"]):
        assert main([*model, *flags]) == 0
        lines.append(next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("   8 ")))
    assert lines[0] == lines[1]


def test_it_says_where_the_memory_of_a_gpu_does_not_suffice(capsys):
    model = ["plan", "--model", "llama3-8b", "--sweep-gpus", "1..4"]
    for flags, note in (
        (["--gpu", "h100"], "note: with 1 GPU that is more memory than the 80 GB of one h100.\n"),
        (["--gpu", "h200"], ""),
        ([], ""),
    ):
        assert main([*model, *flags]) == 0
        found = re.findall(r"note: .*\n", capsys.readouterr().out)
        assert "".join(found) == note


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sweep-gpus 8..64 --data-parallel-size 2", "--data-parallel-size would have no effect with"),
        ("--expert-model-parallel-size 8", "--expert-model-parallel-size would have no effect without --num-ex"),
        ("--q-lora-rank 512", "--q-lora-rank would have no effect without --kv-lora-rank"),
        ("--tensor-model-parallel-size 64", "--num-attention-heads over --tensor-model-parallel-size: 32 is no m"),
        ("--num-experts 8 --first-dense-layers 40", "--first-dense-layers 40 or "),
        ("--tflops fast", "expected a finite number above 0, got fast"),
    ],
)
def test_what_would_have_no_effect_is_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["plan", "--model", "llama3-8b", *flags.split()])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("llama3-8b --sweep-gpus 8..8", "can be said of two numbers of GPUs or more"),
        (
            "llama3-8b --sweep-gpus 10..40 --pipeline-model-parallel-size 5",
            "32 layers are not shared equally by 5 pipe",
        ),
        ("llama3-70b --tensor-model-parallel-size 8 --sweep-gpus 8..64", "Up to 64 GPUs more of them make the step f"),
    ],
)
def test_what_is_said_under_a_sweep(capsys, flags, said):
    assert main(["plan", "--model", *flags.split()]) == 0
    assert said in capsys.readouterr().out


def test_rates_of_a_gpu_count_unless_others_are_given(capsys):
    for flags, said in (
        ([], "modelled at 1.25e+03 TFLOP/s, 600 GB/s"),
        (["--bandwidth", "50"], "modelled at 1.25e+03 TFLOP/s, 50 GB/s"),
        (["--tflops", "500"], "modelled at 500 TFLOP/s, 600 GB/s"),
    ):
        assert main(["plan", "--model", "llama3-8b", "--gpu", "gb300", *flags]) == 0
        assert said in capsys.readouterr().out
    assert GPUS["h100"].rates.flops == pytest.approx(Rates().flops, rel=0.02)  # which the default rates are of
    assert GPUS["h100"].rates.bytes == Rates().bytes
