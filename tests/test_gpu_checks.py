"""`make gpu` without a GPU: its parts are listed, their code runs with small shapes, and bounds follow from rates."""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

sys.path[:0] = [str(ROOT / "scripts" / "bench"), str(ROOT / "examples")]
import gpu  # noqa: E402
import gpu_megatron  # noqa: E402
import gpu_optimizers  # noqa: E402
import gpu_products  # noqa: E402
import gpu_training  # noqa: E402
import gpu_verdicts  # noqa: E402
import newton_schulz  # noqa: E402
from gpu_verdicts import Rates, Run, Verdict, line  # noqa: E402

from megatron_eopt.family import OPTIMIZERS  # noqa: E402

CPU = torch.device("cpu")
# Verdicts that every part comes to, beside those that only a GPU can give; the others start processes.
QUICK = {"fp16": 3, "newton-schulz": 0, "steps": 0, "family": 0, "nccl": 30, "memory": 0, "sweep": 0}
SLOW = ("kernels", "optimizers", "profile", "ranks")
TRAINING = ("megatron", "resume", "gpt")


@pytest.fixture
def run(tmp_path):
    return Run(device=CPU, tiny=True, out=tmp_path, work=tmp_path)


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--seconds", "20"], "--seconds must be above 20, in which a part comes to its end, got 20"),
            (["gtp"], "there is no part gtp: expected some of fp16, kernels, opt"),
            (["--device", "cpu"], "add --tiny"),
            (["--device", "cuda"], "torch finds no GPU"),
        ],
    )
    def test_what_it_cannot_run_is_refused(self, arguments, message, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert message in capsys.readouterr().err

    def test_without_a_gpu_it_says_what_it_would_do(self, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert gpu.main([]) == 0
        said = capsys.readouterr().out
        for name, part in gpu.PARTS.items():
            told = re.search(rf"^{name} +{re.escape(part.__doc__.splitlines()[0])}$", said, re.MULTILINE)
            assert told
        assert "nothing was run" in said

    def test_a_part_leaves_json_and_others_stay_in_it(self, tmp_path, capsys):
        (tmp_path / "gpu.json").write_text('{"other": 1}')
        assert gpu.main(["nccl", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
        found = json.loads((tmp_path / "gpu.json").read_text())
        assert found["other"] == 1
        assert found["nccl"]["machine"]["torch"] == version("torch")
        assert f"{QUICK['nccl']} passed, 0 failed, 0 skipped, 8 measured" in capsys.readouterr().out

    def test_a_check_that_failed_is_the_exit_status(self, tmp_path, monkeypatch):
        failed = Verdict(name="a", status="failed")
        monkeypatch.setattr(gpu, "run_apart", lambda *given: {"verdicts": [asdict(failed)]})
        assert gpu.main(["nccl", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 1

    def test_a_part_that_takes_too_long_is_stopped_and_that_is_a_verdict(self, tmp_path):
        (found,) = gpu.run_apart("fp16", "cpu", True, tmp_path, 1)["verdicts"]
        assert (found["status"], found["reason"]) == ("failed", "it was stopped after 1 s")

    def test_json_has_words_for_what_is_no_number(self):
        assert gpu.finite({1: [math.nan, 2.0], "a": (math.inf,)}) == {"1": ["nan", 2.0], "a": ["inf"]}


class TestVerdicts:
    def test_a_figure_is_within_its_bound_or_fails(self, run):
        run.at_most("a", 1.0, 1.0, "ms")
        run.at_least("a", 1.8, 1.8)
        run.at_most("a", 1.1, 1.0)
        run.at_most("a", math.nan, 1.0)
        run.at_least("a", math.nan, 1.0)
        run.at_most("a", 5.0, 1.0, of_gpu=True)
        assert [each.status for each in run.verdicts] == ["passed", "passed", "failed", "failed", "failed", "skipped"]
        assert line(run.verdicts[0]).split() == ["passed", "a", "1", "<=", "1", "ms"]

    def test_an_error_is_a_verdict_and_not_the_end(self, run):
        with run.check("a"):
            raise ValueError("because")
        run.judge("b", True, "yes")
        assert [(each.name, each.status, each.reason) for each in run.verdicts] == [
            ("a", "failed", "ValueError: because"),
            ("b", "passed", ""),
        ]
        assert [each["name"] for each in json.loads((run.work / "part.json").read_text())["verdicts"]] == ["a", "b"]

    def test_a_part_without_a_verdict_fails(self, run, monkeypatch):
        monkeypatch.setitem(gpu.PARTS, "nccl", lambda run: None)
        gpu.run_here("nccl", run)
        assert [each.status for each in run.verdicts] == ["failed"]


def test_bounds_are_operations_and_bytes_at_the_rates():
    """Quintic in five steps by the Gram form with one restart: 6 n^2 m + 14 n^3; 28 bytes an entry."""
    n, m = 512, 2048
    operations = 6 * n**2 * m + 14 * n**3
    expected = operations / 4e14 + 28 * n * m / 4e12
    assert gpu_optimizers.limit([(n, m)], Rates(4e14, 4e12)) == pytest.approx(expected, rel=0.02)
    assert gpu_optimizers.limit([(n, m), (m, n)], Rates(4e14, 4e12)) == pytest.approx(2 * expected, rel=0.02)
    assert gpu_products.share_of_rate((m, n), operations / 6e14, 8e14) == pytest.approx(0.75, rel=0.02)


@pytest.mark.filterwarnings("ignore:symmetric products. triton is dropped")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] if name == "family" else []) for name in QUICK]
)
def test_a_part_runs_with_small_shapes(name, run, monkeypatch):
    monkeypatch.setattr(gpu_products.bench, "matmul_rate", lambda setup: 1e12)  # it takes a second
    gpu.run_here(name, run)
    states = [each.status for each in run.verdicts]
    assert "failed" not in states
    assert states.count("passed") == QUICK[name]
    assert len(states) > QUICK[name]


def test_peers_get_what_they_take_on_a_gpu(monkeypatch):
    """fp32, by whose precision emerging-optimizers chooses bf16, and its syrk for large matrices alone."""
    utils = import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    monkeypatch.setattr(utils, "newton_schulz_step_tsyrk", lambda X, *abc, tp_group: steps.append(X.dtype) or X)
    monkeypatch.setattr(newton_schulz, "SYRK_ROWS", 16)
    theirs = ModuleType("gram_newton_schulz")
    theirs.GramNewtonSchulz = lambda ns_coefficients, gram_newton_schulz_reset_iterations, ns_use_kernels: (
        lambda x: torch.full_like(x, len(ns_coefficients) + gram_newton_schulz_reset_iterations[0])
    )
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", theirs)
    for shape in ((16, 24), (8, 24), (2, 8, 24)):
        steps = []
        everyone = newton_schulz.contestants(newton_schulz.Setup(CPU, like_gpu=True), shape)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        factors = {name: one.function(x) for name, one in everyone.items()}
        assert {each.dtype for name, each in factors.items() if "torch" not in name} == {torch.float32}
        assert steps == [torch.bfloat16] * 5 * (shape == (16, 24))
        assert ("emerging-optimizers, syrk" in factors) == (shape == (16, 24))
        assert everyone["emerging-optimizers"].precision == "bf16"
        assert factors["gram-newton-schulz"].unique().tolist() == [7.0]
        # its own polynomial, rounded to bf16
        exact = newton_schulz.exact(x, "quintic")
        assert 1e-4 < (factors["emerging-optimizers"] - exact).norm() / exact.norm() < 2e-2
    assert torch.get_float32_matmul_precision() == "highest"


WITHOUT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *further: None if name.split(".")[0] in %r else find(name, *further)
sys.path.insert(0, "scripts/bench")
import gpu
for name in sys.argv[1:]:
    gpu.run_here(name, gpu.Run(device=gpu.torch.device("cpu"), tiny=True, out=gpu.Path(OUT), work=gpu.Path(OUT)))
    gpu.Path(OUT, "part.json").rename(gpu.Path(OUT, f"{name}.json"))
"""


@pytest.mark.wide
def test_a_part_that_lacks_a_package_says_so_and_does_the_rest(tmp_path):
    """A machine with torch alone."""
    packages = ("matplotlib", "emerging_optimizers", "pytest", "hypothesis", "megatron", "triton")
    code = f"OUT = {str(tmp_path)!r}\n{WITHOUT % (packages,)}"
    lacks = {"newton-schulz": "emerging_optimizers", "family": "emerging_optimizers", "kernels": "pytest"}
    lacks |= {"gpt": "megatron", "megatron": "megatron"}
    parts = {*QUICK, "optimizers", *lacks}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, *parts], cwd=ROOT, check=True, env=environment)
    passed = [each["status"] for each in json.loads((tmp_path / "nccl.json").read_text())["verdicts"]].count("passed")
    assert passed == QUICK["nccl"]
    for part in parts:
        verdicts = json.loads((tmp_path / f"{part}.json").read_text())["verdicts"]
        assert "failed" not in {each["status"] for each in verdicts}
        assert part not in lacks or f"the package {lacks[part]} is not installed" in {x["reason"] for x in verdicts}


def test_a_missing_package_skips_a_check_and_a_wrong_name_of_ours_fails_it(run):
    with run.check("a"):
        gpu_verdicts.needs("json", "no_such_package")
    with run.check("b"):
        import_module("megatron_eopt.no_such_module")
    assert [(each.status, each.reason) for each in run.verdicts] == [
        ("skipped", "the package no_such_package is not installed"),
        ("failed", "ModuleNotFoundError: No module named 'megatron_eopt.no_such_module'"),
    ]


def test_make_gpu_with_a_python_of_the_callers_makes_no_environment():
    """Without network there is none to be made."""
    said = [
        subprocess.run(
            ["make", "--no-print-directory", "-n", "gpu", *given], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for given in ([], ["PYTHON=python3"])
    ]
    assert "bootstrap" in said[0]
    assert said[1].strip() == "python3 scripts/bench/gpu.py"


def test_a_sweep_for_which_no_time_is_left_says_so(run, monkeypatch):
    run.until = time.monotonic() - 1
    monkeypatch.setattr(gpu_products, "triton_missing", lambda device: None)
    gpu.run_here("sweep", run)
    assert {(each.status, each.reason) for each in run.verdicts} == {("skipped", "no time was left")}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.wide) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.full) for name in TRAINING),
    ],
)
def test_a_part_that_starts_processes_runs_with_small_shapes(name, tmp_path):
    part = gpu.run_apart(name, "cpu", True, tmp_path)
    failed = [f"{each['name']}: {each['reason']}" for each in part["verdicts"] if each["status"] == "failed"]
    logs = [row for log in part.get("logs", {}).values() for row in log]
    assert not failed, "\n".join([*failed, *logs])


def test_a_step_that_is_another_one_is_seen(run, monkeypatch):
    off = iter((0.0, 3e-4))  # on the CPU, and on the GPU
    trajectory = gpu_optimizers.trajectory

    def moved(*arguments):
        start, end, skipped, optimizer = trajectory(*arguments)
        return start, end + next(off) * (end - start), skipped, optimizer

    monkeypatch.setattr(gpu_optimizers, "trajectory", moved)
    monkeypatch.setattr(gpu_optimizers, "OPTIMIZERS", {"muon": OPTIMIZERS["muon"]})
    gpu.run_here("optimizers", run)
    assert [each.status for each in run.verdicts] == ["failed", "passed", "skipped"]
    assert run.verdicts[0].value == pytest.approx(3e-4, rel=0.1)


@pytest.mark.wide
def test_megatron_takes_the_flags_of_a_gpu(tmp_path, monkeypatch):
    from megatron.training.arguments import add_megatron_arguments

    from megatron_eopt.megatron.command_line import amend

    run = Run(device=torch.device("cuda"), tiny=False, out=tmp_path, work=tmp_path)
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    rows = [row.flags for row in gpu_megatron.ROWS.values()]
    of_runs = ["--optimizer adam --deterministic-mode", *rows]
    for engine, flags in itertools.product([False, True], of_runs):
        monkeypatch.setattr(gpu_training, "find_spec", lambda name, engine=engine: engine)
        before, _, given = gpu_training.command(run, flags, 5).partition("pretrain_gpt.py ")
        parsed = parser.parse_args(given.split())
        assert (parsed.hidden_size, parsed.bf16, parsed.distributed_backend) == (768, True, "nccl")
        assert "--cpu" not in before
        assert not parsed.use_cpu_initialization
