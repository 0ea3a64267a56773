"""The command line: models by name and by flags, modes, rates, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_eopt
from megatron_eopt.cli import COMMANDS, main
from tests.orthogonalize.test_newton_schulz import STEPS

ROOT = Path(__file__).parent.parent
SIZES = "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1792 --num-attention-heads 8 --num-query-groups 2 --swiglu"


def shown(capsys, arguments):
    main(["plan", *arguments.split()])
    return capsys.readouterr().out


def test_a_model_by_name(capsys):
    said = shown(capsys, "--model llama3-70b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4")
    assert "20 of 57344 x 8192" in said
    assert "40 of 1024 x 8192" in said
    assert "all 120: this plan" in said
    said = shown(capsys, "--model llama3-70b --tensor-model-parallel-size 8 --split-gate-up --num-layers 2")
    assert "4 of 28672 x 8192" in said


def test_a_model_by_flags(capsys):
    said = shown(capsys, f"{SIZES} --tensor-model-parallel-size 2")
    assert [line.split()[:6] for line in said.splitlines() if " of " in line and " x " in line and "tp" in line] == [
        ["4", "of", "3584", "x", "512", "tp"],
        ["4", "of", "512", "x", "1792", "tp"],
        ["8", "of", "512", "x", "512", "tp"],
        ["8", "of", "128", "x", "512", "tp"],
    ]


@pytest.mark.parametrize(("gate", "width"), [("", 4 * 512), ("--swiglu", 1344)])
def test_the_width_of_an_mlp_is_by_default_that_of_megatron(capsys, gate, width):
    """With gate and up two thirds of four times the hidden size, in whole 64s."""
    said = shown(capsys, f"--num-layers 4 --hidden-size 512 --num-attention-heads 8 {gate}")
    assert f"4 of 512 x {width}" in said


def test_experts(capsys):
    said = shown(capsys, "--model qwen3-30b-a3b --num-layers 1 --expert-tensor-parallel-size 2 "
                         "--tensor-model-parallel-size 4")  # fmt: skip
    assert "64 of 1536 x 2048" in said
    assert "expt_tp" in said


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed", "owner"])
def test_a_mode(capsys, mode):
    said = shown(capsys, f"{SIZES} --tensor-model-parallel-size 2 --muon-tp-mode {mode}")
    assert mode in next(line for line in said.splitlines() if "of 3584 x 512" in line)


def test_the_iteration_and_the_rates(capsys):
    said = shown(capsys, f"{SIZES} --muon-coefficient-type polar_express --muon-num-ns-steps 8 --dense "
                         "--tflops 100 --bandwidth 50 --latency 5")  # fmt: skip
    assert "modelled at 100 TFLOP/s, 50 GB/s and 5 us a collective" in said
    assert "8 steps, Gram form with 3 restarts, 100% of a symmetric product computed" in said
    for name, steps in STEPS.items():
        said = shown(capsys, f"{SIZES} --muon-coefficient-type {name} --muon-num-ns-steps {steps}")
        assert re.search(rf"\b{steps}\ssteps", said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hidden-size 512", "name a --model, or give --num-layers, --num-attention-heads"),
        (f"{SIZES} --tensor-model-parallel-size 5", "--num-attention-heads over --tensor-model-parallel-size"),
        (
            "--model qwen3-30b-a3b --expert-model-parallel-size 8",
            "times --data-parallel-size) over those of the experts",
        ),
        (f"{SIZES} --muon-num-ns-steps 6", "quintic"),
        (f"{SIZES} --tflops 0", "argument --tflops: expected a finite number above 0, got 0"),
        (f"{SIZES} --bandwidth -1", "argument --bandwidth: expected a finite number above 0, got -1"),
        (f"{SIZES} --micro-batch-size 1", "unrecognized arguments: --micro-batch-size 1 (the flags of a run stand af"),
        (f"{SIZES} --json x.json --world-size 3", "--json, --world-size would have no effect without -- and the flags"),
        (f"{SIZES} --pipeline-model-parallel-size 5", "--pipeline-model-parallel-size 5 is more than 4 layers"),
        ("--", "expected the flags of a pretrain command after --"),
        ("-- --num-layers 2 --full --world-size=4", "--full, --world-size after -- would be for Megatron"),
        ("-- --num-layers 2", "refuses the flags: assert args.micro_batch_size is not None"),
        (f"{SIZES} --num-layers 0", "expected a whole number of at least 1, got 0"),
        ("--model llama2", "invalid choice: 'llama2'"),
    ],
)
def test_what_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments.split()])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 2  # one of usage


def test_stages_of_different_lengths_are_said(capsys):
    said = shown(capsys, f"{SIZES} --pipeline-model-parallel-size 3")
    assert "note: 4 layers are not shared equally by 3 pipeline stages. This is the plan of a longest stage" in said
    assert "note" not in shown(capsys, f"{SIZES} --pipeline-model-parallel-size 2")


def test_usage_names_the_flags_of_a_run(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "[-- FLAGS OF A RUN]" in capsys.readouterr().out.splitlines()[0]


def test_help_version_and_mistakes_are_told_at_once():
    """Without torch, whose import takes longer than all else; the names of the package bring it when they are used."""
    code = (
        "import sys\n"
        "from megatron_eopt.cli import COMMANDS, main\n"
        "for line in ('--version', '--help', *(f'{name} --help' for name in COMMANDS)):\n"
        "    try:\n"
        "        main(line.split())\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 0\n"
        "mistakes = ('--hidden-size 8', '--model llama3-8b --full', '--model llama3-8b --sweep-gpus 8', '-- --full')\n"
        "for line in mistakes:\n"
        "    try:\n"
        "        main(['plan', *line.split()])\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 2\n"
        "assert 'torch' not in sys.modules\n"
        "import megatron_eopt\n"
        "assert {'Muon', 'Lion', 'activate'} <= set(dir(megatron_eopt))\n"
        "from megatron_eopt.optimizers import Scion\n"
        "from megatron_eopt import *\n"
        "assert Scion is megatron_eopt.Scion is megatron_eopt.registry.get_optimizer_entry('scion').optimizer_cls\n"
        "assert all(name in globals() for name in megatron_eopt.__all__)\n"
        "assert not hasattr(megatron_eopt, 'OptimizerSpec') and not hasattr(megatron_eopt, 'nothing')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    version, *usage = done.stdout.splitlines()
    assert version == f"megatron-eopt {megatron_eopt.__version__}"
    assert usage[0] == "usage: megatron-eopt [-h] [--version] COMMAND ..."
    for command in COMMANDS:
        assert any(line.split()[:1] == [command] for line in usage)
    assert done.stderr.count("megatron-eopt plan: error: ") == 4


@pytest.mark.parametrize(
    "arguments",
    [
        "plan --model deepseek-v3 --tensor-model-parallel-size 4 --expert-model-parallel-size 64 "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 16 --data-parallel-size 64",
        "plan --model llama3.1-405b --sweep-gpus 64..16384 --tensor-model-parallel-size 8 --gpu h100",
        "doctor --all",
    ],
)
def test_it_fits_a_terminal_of_80_columns(capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    main(arguments.split())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if len(line) > 80] == []


def test_errors_fit_a_terminal_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        main(["plan", "--gpu", "h100", "--tflops", "100", "--", "--num-layers", "2"])
    lines = capsys.readouterr().err.splitlines()
    assert "rates are the default ones" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_as_a_module_without_a_gpu_and_without_megatron():
    code = (
        "import runpy, sys; sys.modules['megatron'] = None; sys.argv = ['x', 'plan', '--model', 'llama3-8b', "
        "'--tensor-model-parallel-size', '8']; runpy.run_module('megatron_eopt', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "32 of 28672 x 4096" in done.stdout
    assert " chunks.\nThe workspace is 2,147 MB (2 GiB)" in done.stdout  # all 32 at once are more than it holds


def test_a_larger_workspace_makes_fewer_chunks(capsys):
    flags = ["plan", "--model", "llama3-8b", "--tensor-model-parallel-size", "8"]
    assert main([*flags, "--optimizer-workspace", "8"]) == 0
    printed = capsys.readouterr().out
    assert "32 of 28672 x 4096" in printed
    assert "in 1 chunk.\nThe workspace is 8,590 MB (8 GiB)" in printed


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--model llama3-8b --pipeline-model-parallel-size 32", "momentum and update of shards"),
        ("--model llama3-70b --tensor-model-parallel-size 8 --num-layers 2 --muon-tp-mode gram", "iterations"),
    ],
)
def test_temporaries_above_the_workspace_say_what_they_are(capsys, flags, what):
    printed = shown(capsys, flags).replace(",", "")
    (total, workspace), (chunks, beside) = (
        map(int, found)
        for pattern in (r"at most (\d+) MB.*\n.*workspace is (\d+)", rf"Peak: (\d+) MB .* (\d+) MB of {what}\.")
        for found in re.findall(pattern, printed)
    )
    assert total == pytest.approx(chunks + beside, abs=1)
    assert total > workspace >= chunks
