"""Train the demo's GPT by its settings, one run after another, and read losses and times from its log."""

import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from pages import DOCS, between

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402
import loopback  # noqa: E402, F401

from megatron_eopt.family import OPTIMIZERS  # noqa: E402

SETTINGS = DOCS / "optimizers.md"

STEPS = 200
THREADS = 1  # of each run, so that what else the machine does finds another core
LAST = 20  # steps that a loss is averaged over: that of one batch is noisy
# A hundredth of the files is held out.
COMMON = "--split 99,1,0 --num-workers 0 --eval-iters 8 --eval-interval 1000000 --log-interval 1"

Losses = dict[int, float]  # iteration -> loss

_ROW = re.compile(r"^\| `(?P<name>\w+)` \| `(?P<flags>[^`|]*)` \|")
_TIME = re.compile(r"iteration +(\d+)/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+)")
_HELD_OUT = re.compile(r"validation loss at .*lm loss value: ([-+.\dE]+)")


def read_settings(page: str) -> dict[str, list[str]]:
    """Name of an optimizer -> its recommended flags, from the table that ``docs/optimizers.md`` marks.

    Raises:
        ValueError: the page has no such table, a row of it cannot be read, or an optimizer has two.
    """
    settings: dict[str, list[str]] = {}
    _, _, *rows = between(page, "settings").strip().splitlines()  # behind the head and the line under it
    for row in rows:
        match = _ROW.match(row)
        if match is None or match["name"] in settings:
            raise ValueError(f"expected a row '| `NAME` | `FLAGS` | ...' for each optimizer, found {row!r}")
        settings[match["name"]] = shlex.split(match["flags"])
    return settings


def rate_flag(flags: Sequence[str]) -> str:
    """The flag of the rate of what the optimizer itself owns: ``--muon-lr`` where it is given, else ``--lr``."""
    return "--muon-lr" if "--muon-lr" in flags else "--lr"


def rate(flags: Sequence[str]) -> float:
    """The value of :func:`rate_flag`."""
    return float(flags[flags.index(rate_flag(flags)) + 1])


def read_times(lines: Iterable[str]) -> list[float]:
    """Seconds of an iteration, from each line of a log that has them: a mean over those since the line before."""
    return [float(match[2]) / 1e3 for line in lines if (match := _TIME.search(line))]


def read_held_out(lines: Iterable[str]) -> float | None:
    """The last validation loss of a log; None where it has none."""
    found = [float(match[1]) for line in lines if (match := _HELD_OUT.search(line))]
    return found[-1] if found else None


def loss_at(losses: Losses, step: int) -> float:
    """Mean loss of the last :data:`LAST` iterations up to a step."""
    return statistics.fmean(loss for iteration, loss in losses.items() if step - LAST < iteration <= step)


def precision(optimizer: str) -> list[str]:
    """The flag of precision 'high', where an optimizer has it.

    With Megatron's 'medium', a CPU multiplies in bf16 if it can, and the figures depend on the machine.
    """
    row = OPTIMIZERS.get(optimizer)
    has_it = row is not None and "fp32_matmul_prec" in row.of_muon
    return ["--muon-fp32-matmul-prec", "high"] if has_it else []


def command(name: str, flags: Sequence[str], steps: int, out: Path) -> list[str]:
    """The command line of a run: the demo's model and schedule, then what differs, since the last of a flag counts."""
    data = ["--data-path", str(out / "stdlib"), "--data-cache-path", str(out / "cache")]
    of_steps = ["--train-iters", str(steps)]
    return [
        *[sys.executable, "examples/loopback.py", "--nproc-per-node", "1"],
        *["-m", "megatron_eopt.run", "--cpu", "examples/pretrain_gpt.py"],
        *[*demo.MODEL.split(), *demo.SCHEDULE.split(), *demo.CPU.split(), *COMMON.split()],
        *[*data, *of_steps, "--optimizer", name, *precision(name), *flags],
    ]


def train(name: str, flags: Sequence[str], steps: int, out: Path) -> Losses:
    """The losses of a run with an optimizer; ``out`` has the data, and gets the log.

    Raises:
        SystemExit: it failed, or its log lacks losses.
    """
    log = out / f"{name}.log"
    lines = list(demo.execute(command(name, flags, steps, out), log, THREADS))
    try:
        losses = demo.read_losses(lines, 1, steps)
    except ValueError as error:
        raise SystemExit(f"{name}: {error}; its log is {log}") from error
    print(f"  {name:22} loss {loss_at(losses, steps):.4f}", flush=True)
    return losses


def write_data(out: Path) -> None:
    """Write the data set of the demo into a folder, with a log of it."""
    out.mkdir(parents=True, exist_ok=True)
    list(demo.execute([sys.executable, "examples/stdlib_dataset.py", str(out / "stdlib")], out / "data.log"))


def processor() -> str:
    """What this machine computes with, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def machine() -> str:
    """What the figures were measured on, in words."""
    return f"{processor()}, {THREADS} of {os.cpu_count()} cores, torch {torch.__version__}"
