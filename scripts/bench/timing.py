"""The one way to time: contestants in turn on a quiet machine, medians with the least and the most of the rounds."""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "bench-out"
CPU = torch.device("cpu")
ALLOWED = 0.5  # processes of others that run at a time; with one more on each core, times double
_MEAN = 60.0  # seconds that the load average goes back

Step = Callable[[], object]


class Load:
    """The load of others before and after measurements.

    Args:
        own: processes or threads that measure at a time; after a while the load average has these, too.
        anyway: whether figures are printed at any load; :attr:`words` then says so.

    Raises:
        SystemExit: others already are more than :data:`ALLOWED`.
    """

    def __init__(self, own: float, anyway: bool = False) -> None:
        self.own = own
        self.anyway = anyway
        self.before = os.getloadavg()[0]
        self.most = self.before
        self._start = time.monotonic()
        self._refuse(self.before, "before the first figure")

    def check(self) -> None:
        """Raise ``SystemExit`` if others were more than :data:`ALLOWED` while it was measured."""
        known = 1 - math.exp((self._start - time.monotonic()) / _MEAN)
        others = max(0.0, os.getloadavg()[0] - self.own * known)
        self.most = max(self.most, others)
        self._refuse(others, "while it was measured")

    @property
    def words(self) -> str:
        """What the load was, for the line about the machine."""
        said = f"load of others {self.before:.2f} before, {self.most:.2f} at most"
        return f"{said}, taken with --any-load" if self.most > ALLOWED else said

    def _refuse(self, found: float, when: str) -> None:
        if found > ALLOWED and not self.anyway:
            raise SystemExit(
                f"no figures: other processes were a load of {found:.2f} {when}, and at most {ALLOWED:.2f} is allowed. "
                "End what else runs and wait a minute, or pass --any-load, which the output then says"
            )


class Times(list[float]):
    """Seconds of each round."""

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self)

    def words(self, form: str = ".4g", unit: float = 1e3) -> str:
        """The median with the least and the most; in milliseconds, unless told."""
        median, least, most = (f"{unit * x:{form}}" for x in (self.median, min(self), max(self)))
        return f"{median} ({least}-{most})"


def parser_of(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the arguments of all scripts that time."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="calls of each contestant (default: %(default)s)")
    parser.add_argument("--any-load", action="store_true", help="print figures also while the machine does other work")
    return parser


def in_turns(steps: Mapping[str, Step], rounds: int, device: torch.device = CPU) -> dict[str, Times]:
    """Wall-clock times of each, called in turn, after one call that does not count.

    Of several ranks a time is that of the slowest.
    """
    times = {name: Times() for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            step()
            wait(device)
            seconds = torch.tensor(time.perf_counter() - start)
            if dist.is_initialized():
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if round_:
                times[name].append(seconds.item())
    return times


def in_a_row(step: Step, calls: int, device: torch.device) -> float:
    """Seconds of a call among so many, the device waited for at the end alone: as the steps of a training follow."""
    step()
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    wait(device)
    return (time.perf_counter() - start) / calls


def of_host(step: Step, calls: int, device: torch.device) -> Times:
    """Seconds until a call returns, whatever the device still has to do."""
    times = Times()
    for _ in range(calls + 1):
        wait(device)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    del times[0]
    return times


def wait(device: torch.device) -> None:
    """For all that a device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a product of two large matrices."""
    rows = 8192 if device.type == "cuda" else 2048
    x = torch.randn(rows, rows, device=device).to(dtype)
    return 2 * rows**3 / in_turns({"x": lambda: x @ x}, 5, device)["x"].median


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy."""
    x = torch.empty(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / in_turns({"x": lambda: y.copy_(x)}, 5, device)["x"].median


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """What a function returns on the first of several ranks over gloo, as JSON holds it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (function, ranks, folder, sys.path, args), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())


def _rank(rank: int, function: Callable[..., Any], ranks: int, folder: str, path: list[str], args: Any) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=20))
    found = function(rank, ranks, *args)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def machine() -> str:
    """What figures were measured on, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    return f"{processor}, {torch.get_num_threads()} of {os.cpu_count()} cores, torch {torch.__version__}"


def write(name: str, figures: Any) -> None:
    """Write figures as JSON into ``bench-out/``."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\nWritten: {path}")
