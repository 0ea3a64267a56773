"""The command line: models by name and by flags, modes, rates, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_eopt.cli import main

ROOT = Path(__file__).parent.parent
SIZES = "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1792 --num-attention-heads 8 --num-query-groups 2 --swiglu"


def shown(capsys, arguments):
    main(["plan", *arguments.split()])
    return capsys.readouterr().out


def test_a_model_by_name(capsys):
    said = shown(capsys, "--model llama3-70b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4")
    assert said.count("8 of 57344 x 8192") == 2  # and four: at most 1 GiB of a kind is exchanged at once
    assert "40 of 1024 x 8192" in said
    assert "all 120: this plan" in said
    said = shown(capsys, "--model llama3-70b --tensor-model-parallel-size 8 --split-gate-up --num-layers 2")
    assert "4 of 28672 x 8192" in said


def test_a_model_by_flags(capsys):
    said = shown(capsys, f"{SIZES} --tensor-model-parallel-size 2")
    assert [line.split()[:6] for line in said.splitlines() if " of " in line and " x " in line and "tp" in line] == [
        ["4", "of", "3584", "x", "512", "tp"],
        ["4", "of", "512", "x", "1792", "tp"],
        ["4", "of", "512", "x", "512", "tp"],
        ["4", "of", "512", "x", "512", "tp"],
        ["8", "of", "128", "x", "512", "tp"],
    ]


def test_experts(capsys):
    said = shown(capsys, "--model qwen3-30b-a3b --num-layers 1 --expert-tensor-parallel-size 2 "
                         "--tensor-model-parallel-size 4")  # fmt: skip
    assert "64 of 1536 x 2048" in said
    assert "expt_tp" in said


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed", "owner"])
def test_a_mode(capsys, mode):
    assert mode in shown(capsys, f"{SIZES} --tensor-model-parallel-size 2 --muon-tp-mode {mode}").splitlines()[2]


def test_the_iteration_and_the_rates(capsys):
    said = shown(capsys, f"{SIZES} --muon-coefficient-type polar_express --muon-num-ns-steps 8 --dense "
                         "--tflops 100 --bandwidth 50 --latency 5")  # fmt: skip
    assert "modelled at 100 TFLOP/s, 50 GB/s and 5 us a collective" in said
    assert "8 steps, Gram form with 2 restarts, 100% of a symmetric product computed" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hidden-size 512", "name a --model, or give --num-layers, --ffn-hidden-size, --num-attention-heads"),
        (f"{SIZES} --tensor-model-parallel-size 5", "rows of linear_qkv over tensor-parallel ranks"),
        (f"{SIZES} --muon-num-ns-steps 6", "quintic"),
        (f"{SIZES} --tflops 0", "rate 'flops' must be a positive number"),
        (f"{SIZES} --num-layers 0", "expected at least 1, got 0"),
        ("--model llama2", "invalid choice: 'llama2'"),
    ],
)
def test_what_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_module_without_a_gpu_and_without_megatron():
    code = (
        "import runpy, sys; sys.modules['megatron'] = None; sys.argv = ['x', 'plan', '--model', 'llama3-8b', "
        "'--tensor-model-parallel-size', '8']; runpy.run_module('megatron_eopt.cli', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 of 28672 x 4096") == 4  # all 32 at once are more than the workspace holds
    assert "The workspace is 2,048 MiB" in done.stdout


def test_a_larger_workspace_makes_fewer_chunks(capsys):
    flags = ["plan", "--model", "llama3-8b", "--tensor-model-parallel-size", "8"]
    assert main([*flags, "--optimizer-workspace", "8"]) == 0
    printed = capsys.readouterr().out
    assert "32 of 28672 x 4096" in printed
    assert "in 1 chunk. The workspace is 8,192 MiB" in printed
