"""What every part of ``make gpu`` is made of: verdicts with bounds, the rates of the device, and how it is timed."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import newton_schulz as bench
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "megatron-core",
    "emerging-optimizers",
    "gram-newton-schulz",
    "transformer-engine",
    "apex",
)
OWN_MODULES = ("megatron_eopt", "tests", *(path.stem for path in Path(__file__).parent.glob("*.py")))
QUERIED = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one check found: ``value`` is what was measured, ``bound`` what was expected, in words."""

    name: str
    status: str  # passed, failed, skipped, or measured, where there is no bound
    bound: str = ""
    value: float | str | None = None  # in words where it is no number: of JSON
    reason: str = ""


@dataclass(kw_only=True)
class Run:
    """A part that runs: where, how large, and what it has found so far.

    Attributes:
        tiny: whether small shapes stand in for the real ones: the same code, anywhere, in seconds.
        out: folder of pictures.
        work: folder of logs, data and checkpoints.
        until: when it should be done, by :func:`time.monotonic`.
    """

    device: torch.device
    tiny: bool
    out: Path
    work: Path
    until: float = math.inf
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device.type == "cuda"

    def judge(self, name: str, passed: bool | None, bound: str, value: float | None = None, reason: str = "") -> None:
        """Note a verdict; None for a check that is not made. What is on the disk stays known if the part is stopped."""
        status = "skipped" if passed is None else "passed" if passed else "failed"
        self.verdicts.append(Verdict(name=name, status=status, bound=bound, value=value, reason=reason))
        self._write()

    def _write(self) -> None:
        found = {"verdicts": [asdict(each) for each in self.verdicts], "figures": self.figures}
        (self.work / "part.json").write_text(json.dumps(found))

    def tell(self, name: str, value: float, unit: str, reason: str = "") -> None:
        """Note a figure that has no bound."""
        self.verdicts.append(Verdict(name=name, status="measured", bound=unit, value=value, reason=reason))
        self._write()

    def at_most(self, name: str, value: float, bound: float, unit: str = "", *, of_gpu: bool = False) -> None:
        """Note whether a figure is within its bound; one that only a GPU at full size can give is skipped elsewhere."""
        self._compare(name, value <= bound, f"<= {bound:.4g} {unit}".strip(), value, of_gpu)

    def at_least(self, name: str, value: float, bound: float, *, of_gpu: bool = False) -> None:
        """The same for a bound from below."""
        self._compare(name, value >= bound, f">= {bound:.4g}", value, of_gpu)

    def _compare(self, name: str, holds: bool, bound: str, value: float, of_gpu: bool) -> None:
        dry = of_gpu and (self.tiny or not self.on_gpu)
        self.judge(name, None if dry else holds, bound, value, "a dry run: the figure says nothing" if dry else "")

    def has_time(self, name: str, seconds: float) -> bool:
        """Whether so much is left; else the check is skipped."""
        left = time.monotonic() < self.until - seconds
        if not left:
            self.judge(name, None, "", reason="no time was left")
        return left

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """An error inside is the failure of this check, and not the end of the part; a missing package skips it."""
        try:
            yield
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            skipped = missing not in ("", *OWN_MODULES)
            reason = f"the package {missing} is not installed" if skipped else f"ModuleNotFoundError: {error}"
            self.judge(name, None if skipped else False, "no error", reason=reason)
        except Exception as error:
            self.judge(name, False, "no error", reason=f"{type(error).__name__}: {error}"[:2000])


def line(verdict: Verdict) -> str:
    """A row of the table."""
    value = f"{verdict.value:.4g}" if isinstance(verdict.value, float | int) else verdict.value or "-"
    reason = " ".join(verdict.reason.split())[:200]
    return f"{verdict.status:9}{verdict.name:64}{value:>12}  {verdict.bound:16}  {reason}".rstrip()


class Rates(NamedTuple):
    """What the device does at best, measured beside what is judged by it."""

    flops: float  # operations per second of a product of two large matrices in half precision
    bytes: float  # per second, read and written, of a copy


def measured_rates(device: torch.device) -> Rates:
    """The rates of a device."""
    x = torch.empty(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copied = bench.medians({"copy": lambda: y.copy_(x)}, 5, device)["copy"]
    return Rates(bench.matmul_rate(bench.Setup(device)), 2 * x.numel() / copied)


def in_a_row(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of a call among so many, the device waited for at the end alone: as the steps of a training follow."""
    function()
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait(device)
    return (time.perf_counter() - start) / calls


def of_host(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """Median seconds until a call returns, whatever the device still has to do."""
    taken = []
    for _ in range(calls + 1):
        wait(device)
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])[calls // 2]


def wait(device: torch.device) -> None:
    """For all that a device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def world(backend: str | None, ranks: int = 1, store: dist.Store | None = None) -> Iterator[None]:
    """In which this process is the first of so many ranks."""
    dist.init_process_group(backend, store=store or dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """In which what waits for a GPU raises; of another device nothing is known."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, as far as they can be read."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["commit"] = _said_by("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if device.type == "cuda":
        of_device = torch.cuda.get_device_properties(device)
        values = _said_by("nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader", "-i", str(device.index or 0))
        found |= {"device": of_device.name, "GiB": of_device.total_memory / 2**30}
        found |= dict(zip(QUERIED.split(","), (values or "").split(", "), strict=False))
    return found


def needs(*packages: str) -> None:
    """Raise a ``ModuleNotFoundError`` for a package that is not installed, without importing the others."""
    for name in packages:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _said_by(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def execute(run: Run, name: str, command: Sequence[str], **environment: str) -> tuple[int, str]:
    """Exit code and output of a program in the repository; the output is in its log too."""
    hidden = {} if run.on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **hidden, **environment}
    with (run.work / f"{name}.log").open("w+", errors="replace") as log:
        seconds = None if run.until == math.inf else max(1.0, run.until - time.monotonic())
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=seconds
        ).returncode
        log.seek(0)
        return code, log.read()


def draw(panels: Mapping[str, Mapping[str, Mapping[int, float]]], x: str, y: str, picture: Path) -> None:
    """A panel for each title, with a line for each label, of what ``y`` is at each ``x``."""
    plt = bench.pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(5 + 3 * len(panels), 4.5), sharey=True, squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for label, points in lines.items():
            axis.plot(list(points), list(points.values()), marker=".", label=label)
        axis.set(title=title, xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
