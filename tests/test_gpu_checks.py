"""`make gpu` without a GPU: its parts are listed, their code runs with small shapes, and a wrong step is seen."""

import argparse
from importlib import import_module

import gpu
import gpu_checks
import gpu_megatron
import gpu_run
import gpu_steps
import pytest
import torch

CPU = torch.device("cpu")
LONG = ("kernels", "family", "megatron")  # parts of minutes


@pytest.fixture
def run(tmp_path):
    return gpu_run.Run(device=CPU, tiny=True, work=tmp_path)


def statuses(run):
    return [each.status for each in run.verdicts]


def test_without_a_gpu_it_says_what_it_would_do(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{said}" for name in gpu.PARTS)
    assert "nothing was run" in said


def test_a_figure_is_within_its_bound_or_fails(run):
    for value in (1.0, 1.1, torch.nan):
        run.at_most("a", value, 1.0)
    run.at_most("a", 5.0, 1.0, of_gpu=True)
    assert statuses(run) == ["passed", "failed", "failed", "skipped"]


def test_an_error_fails_a_check_and_a_missing_package_skips_it(run):
    with run.check("a"):
        raise ValueError("because")
    with run.check("b"):
        gpu_run.needs("json", "no_such_package")
    with run.check("c"):
        import_module("megatron_eopt.no_such_module")
    assert statuses(run) == ["failed", "skipped", "failed"]
    assert run.verdicts[1].reason == "the package no_such_package is not installed"


def test_a_part_that_is_stopped_fails(tmp_path, capsys):
    (found,) = gpu.run_apart("steps", True, 1)["verdicts"]
    assert (found["status"], found["reason"]) == ("failed", "it was stopped after 1 s")


def test_bounds_are_operations_and_bytes_at_the_rates():
    """Quintic in five steps by the Gram form with one restart: 6 n^2 m + 14 n^3; 28 bytes an entry."""
    n, m = 512, 2048
    expected = (6 * n**2 * m + 14 * n**3) / 4e14 + 28 * n * m / 4e12
    assert gpu_steps.limit([(n, m), (m, n)], 4e14, 4e12) == pytest.approx(2 * expected, rel=0.02)


def test_a_step_that_is_another_one_is_seen(run, monkeypatch):
    off = iter((0.0, 3e-4))  # on the CPU, and on the GPU
    trajectory = gpu_checks.trajectory

    def moved(*arguments):
        start, end, skipped, optimizer = trajectory(*arguments)
        return start, end + next(off) * (end - start), skipped, optimizer

    monkeypatch.setattr(gpu_checks, "trajectory", moved)
    monkeypatch.setattr(gpu_checks, "CASES", {"muon": ("muon", {})})
    gpu.run_here("optimizers", run)
    assert statuses(run) == ["failed", "passed", "skipped"]


@pytest.mark.filterwarnings("ignore:symmetric products. triton is dropped")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG else pytest.mark.wide) for name in gpu.PARTS]
)
def test_a_part_runs_with_small_shapes(name, run):
    gpu.run_here(name, run)
    assert "failed" not in statuses(run), run.verdicts


@pytest.mark.wide
def test_megatron_takes_the_flags_of_a_gpu(tmp_path):
    from megatron.training.arguments import add_megatron_arguments

    from megatron_eopt.megatron.command_line import amend

    run = gpu_run.Run(device=torch.device("cuda"), tiny=False, work=tmp_path)
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    for row in gpu_megatron.ROWS.values():
        given = gpu_megatron.command(run, row, 5).partition("pretrain_gpt.py ")[2]
        parsed = parser.parse_args(given.split())
        assert (parsed.hidden_size, parsed.bf16, parsed.distributed_backend) == (768, True, "nccl")
        assert not parsed.use_cpu_initialization
