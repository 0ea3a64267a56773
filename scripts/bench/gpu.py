"""Check the package on a GPU: ``make gpu``, or ``python scripts/bench/gpu.py PART...``; docs/gpu.md says what for.

Each part runs in its own process, for less than nine minutes. It prints a table of verdicts; ``gpu.json`` in the folder
of ``--out`` has them with hardware, versions and figures. Parts that ran before stay in it. Without a GPU it says what
it would do. ``--tiny`` runs the same code with small shapes, also on a CPU. It needs torch and the package's folder,
nothing installed and no network; a check that lacks a package is skipped and says which.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import gpu_checks  # noqa: E402
import gpu_megatron  # noqa: E402
import gpu_steps  # noqa: E402
from gpu_run import Run, Verdict, versions  # noqa: E402
from timing import OUT  # noqa: E402

SECONDS, SPARE = 510, 20  # after which a part is stopped, unless told; of these to end by itself
LOG_LINES = 40  # of a part that failed

PARTS: dict[str, Callable[[Run], None]] = {  # those first whose figures decide
    "kernels": gpu_checks.kernels,
    "optimizers": gpu_checks.optimizers,
    "steps": gpu_steps.steps,
    "family": gpu_steps.family,
    "profile": gpu_steps.profile,
    "megatron": gpu_megatron.megatron,
}


def about(name: str) -> str:
    """What a part does, in a sentence."""
    return (PARTS[name].__doc__ or "").partition("\n")[0]


def run_here(name: str, run: Run) -> None:
    """Run a part in this process."""
    with run.check(name):
        PARTS[name](run)
    if not run.verdicts:
        run.judge(name, False, "a verdict", reason="the part came to none")


def run_apart(name: str, tiny: bool, seconds: int = SECONDS) -> dict[str, Any]:
    """Run a part in a process of its own; that it dies or is stopped is a verdict beside those it had reached."""
    device = device_here()
    # all ranks are on this machine; without a GPU the Triton kernel runs in Triton's interpreter
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **os.environ}
    environment |= {} if device.type == "cuda" else {"TRITON_INTERPRET": "1"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, __file__, name, "--seconds", str(seconds), "--here", folder, *["--tiny"] * tiny]
        start, ended = time.monotonic(), f"it was stopped after {seconds} s"
        with Path(folder, "part.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(seconds)
                ended = f"it ended with exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what is left of the processes that it started
        found = Path(folder, "part.json")
        part: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"verdicts": [], "figures": {}}
        if ended:
            part["verdicts"].append(asdict(Verdict(name=name, status="failed", bound="to end", reason=ended)))
        if any(each["status"] == "failed" for each in part["verdicts"]):
            logs = Path(folder).glob("*.log")
            part["logs"] = {log.stem: log.read_text().splitlines()[-LOG_LINES:] for log in logs}
    return part | {"seconds": time.monotonic() - start, "machine": versions(device), "tiny": tiny}


def device_here() -> torch.device:
    """A GPU, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts, or say what they are; the exit status is 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"by default all of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=OUT / "gpu", help="folder of gpu.json")
    parser.add_argument("--list", action="store_true", help="say what the parts do, and run nothing")
    parser.add_argument("--tiny", action="store_true", help="small shapes, which show that the code runs")
    after = f"after which a part is stopped, above {SPARE} (default: %(default)s)"
    parser.add_argument("--seconds", type=int, default=SECONDS, help=after)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # this process is that of the part, with a folder
    options = parser.parse_args(argv)
    names = options.parts or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    if options.seconds <= SPARE:
        parser.error(f"--seconds must be above {SPARE}, in which a part comes to its end, got {options.seconds}")
    without = not (torch.cuda.is_available() or options.tiny)
    if options.list or without:
        print("\n".join(f"{name:15}{about(name)}" for name in names))
        print("\nThere is no GPU here, and nothing was run: on one, these would be." if without else "")
        return 0
    if options.here:
        until = time.monotonic() + options.seconds - SPARE
        run_here(names[0], Run(device=device_here(), tiny=options.tiny, work=options.here, until=until))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    states = []
    for name in names:
        print(f"\n{name}: {about(name)}", flush=True)
        found[name] = run_apart(name, options.tiny, options.seconds)
        path.write_text(json.dumps(finite(found), indent=1))
        verdicts = [Verdict(**each) for each in found[name]["verdicts"]]
        states += [each.status for each in verdicts]
        print("\n".join(each.line for each in verdicts), flush=True)
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "skipped", "measured"))
    print(f"\n{counts}. Written: {path}")
    return int("failed" in states)


def finite(value: Any) -> Any:
    """The value with words in place of numbers that JSON does not know."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
