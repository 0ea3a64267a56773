"""What every part of ``make gpu`` is made of: verdicts with bounds, and programs that are run."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timing import ROOT

PACKAGES = "torch triton numpy megatron-core emerging-optimizers gram-newton-schulz transformer-engine dion".split()
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

    @property
    def line(self) -> str:
        """A row of the table."""
        value = f"{self.value:.4g}" if isinstance(self.value, float | int) else self.value or "-"
        reason = " ".join(self.reason.split())[:200]
        return f"{self.status:9}{self.name:64}{value:>12}  {self.bound:16}  {reason}".rstrip()


@dataclass(kw_only=True)
class Run:
    """A part that runs: where, how large, and what it has found so far.

    Attributes:
        tiny: whether small shapes stand in for the real ones: the same code, anywhere.
        work: folder of logs, data and of what was found.
        until: when it should be done, by :func:`time.monotonic`.
    """

    device: torch.device
    tiny: bool
    work: Path
    until: float = math.inf
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device.type == "cuda"

    def judge(self, name: str, passed: bool | None, bound: str, value: float | None = None, reason: str = "") -> None:
        """Note a verdict; None for a check that is not made."""
        status = "skipped" if passed is None else "passed" if passed else "failed"
        self._note(Verdict(name=name, status=status, bound=bound, value=value, reason=reason))

    def tell(self, name: str, value: float, unit: str, reason: str = "") -> None:
        """Note a figure that has no bound."""
        self._note(Verdict(name=name, status="measured", bound=unit, value=value, reason=reason))

    def at_most(self, name: str, value: float, bound: float, unit: str = "", *, of_gpu: bool = False) -> None:
        """Note whether a figure is within its bound; one that only a GPU at full size can give is skipped elsewhere."""
        dry = of_gpu and (self.tiny or not self.on_gpu)
        reason = "a dry run: the figure says nothing" if dry else ""
        self.judge(name, None if dry else value <= bound, f"<= {bound:.4g} {unit}".strip(), value, reason)

    def _note(self, verdict: Verdict) -> None:
        """Keep it on the disk, too: a part may be stopped."""
        self.verdicts.append(verdict)
        found = {"verdicts": [asdict(each) for each in self.verdicts], "figures": self.figures}
        (self.work / "part.json").write_text(json.dumps(found))

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
        except subprocess.TimeoutExpired:
            self.judge(name, None, "no error", reason="no time was left")
        except Exception as error:
            self.judge(name, False, "no error", reason=f"{type(error).__name__}: {error}"[:2000])

    def execute(self, name: str, command: Sequence[str], **environment: str) -> tuple[int, str]:
        """Exit code and output of a program of the repository in Python; the output is in its log too."""
        hidden = {} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, **hidden, **environment}
        with (self.work / f"{name}.log").open("w+", errors="replace") as log:
            seconds = None if self.until == math.inf else max(1.0, self.until - time.monotonic())
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
            log.seek(0)
            return code, log.read()


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


def needs(*packages: str) -> None:
    """Raise a ``ModuleNotFoundError`` for a package that is not installed, without importing the others."""
    for name in packages:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def versions(device: torch.device) -> dict[str, Any]:
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


def _said_by(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
