"""Make the runs of the comparison and keep each in a small file, so that an interrupted one goes on where it was."""

import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import corpus
import protocol
from protocol import Run
from training import ROOT, demo, loopback, precision, processor

from megatron_eopt.screen import progress

RESULTS = ROOT / "scripts" / "bench" / "results"
BLOCK = 10  # steps that a printed training loss is the mean of
COMMON = (
    f"--num-workers 0 --log-interval {BLOCK} --eval-iters {corpus.PIECES * corpus.PIECE // corpus.LENGTH // 16} "
    "--eval-interval 1000000"
)
_HELD_OUT = re.compile(r"loss at iteration \d+ on (validation|test) set \| lm loss value: ([-+.\w]+)")
# What Megatron says of gradients, and what this package does; a log may have words such as "found info" too.
_DIVERGED = re.compile(r"found (NaN|Inf) in|were not finite in")

Result = dict[str, Any]  # what a file of a run holds


def command(run: Run, data: Path) -> list[str]:
    """The command line of a run: the demo's model and schedule, then what differs, since the last of a flag counts."""
    sets = {"train": "train", "valid": "tune", "test": "test"}
    paths = [part for split, name in sets.items() for part in (f"--{split}-data-path", str(data / name))]
    return [
        *[sys.executable, "-m", "megatron_eopt.run", "--cpu", "examples/pretrain_gpt.py"],
        *[*demo.MODEL.split(), *demo.SCHEDULE.split(), *demo.CPU.split(), *COMMON.split()],
        *[*paths, "--data-cache-path", str(data / corpus.CACHE), "--optimizer", run.named],
        *[*precision(run.named), *run.flags],
    ]


def path_of(run: Run, results: Path) -> Path:
    """Where the result of a run lies."""
    return results / run.optimizer / f"{run.label}.json"


def log_of(run: Run, data: Path) -> Path:
    """Where what a run prints goes."""
    return data / "logs" / f"{run.optimizer}-{run.label}.log"


def read(run: Run, results: Path) -> Result:
    """The result of a run.

    Raises:
        ValueError: the file holds a run with other flags, as of another protocol.
    """
    path = path_of(run, results)
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    if found["flags"] != run.flags:
        raise ValueError(f"{path} holds a run with the flags {found['flags']}, expected {run.flags}; remove it")
    return found


def held_out_losses(log: str) -> dict[str, float]:
    """Loss on the validation set and on the test set, as a log ends with them; not finite ones are printed as NAN."""
    return {name: float(loss) for name, loss in _HELD_OUT.findall(log)}


def execute(run: Run, text: str, data: Path, results: Path) -> Result:
    """Train, and keep what came of it; the log lies beside the data.

    Raises:
        RuntimeError: the run failed, and not because its loss diverged.
    """
    log = log_of(run, data)
    log.parent.mkdir(exist_ok=True)
    # one rank needs no launcher, whose start would take as long as twenty steps
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    store = loopback.listening_store()
    rendezvous = loopback.environment(store)
    environment = os.environ | alone | rendezvous | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command(run, data), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    lines = log.read_text(encoding="utf-8", errors="replace")
    held_out = held_out_losses(lines)
    if done.returncode or len(held_out) < 2:
        if not _DIVERGED.search(lines):
            raise RuntimeError(f"{run.optimizer} {run.label} failed with status {done.returncode}; its log is {log}")
        held_out = {}
    if not all(map(math.isfinite, held_out.values())):  # it diverged in its last step, which nobody checks
        held_out = {}
    result = {
        "optimizer": run.optimizer,
        "flags": run.flags,
        "tune": held_out.get("validation"),  # None: it diverged
        "test": held_out.get("test"),
        "training": [round(loss, 4) for _, loss in demo.printed_losses(lines.splitlines())],
        "text": text,
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "processor": processor(),
    }
    path = path_of(run, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # so that no interrupted write leaves half a file
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return result


def make(runs: Sequence[Run], text: str, data: Path, results: Path, workers: int) -> dict[Run, Result]:
    """The results of runs, of which those are made that are not there.

    Args:
        runs: of any optimizers.
        text: the hash of the text in ``data``, as :func:`corpus.write` returns it.
        data: folder of the text and of logs.
        results: folder of the files of runs.
        workers: runs at a time.

    Raises:
        SystemExit: runs failed, and the others are kept; or some that are there had another text.
        ValueError: as by :func:`read`.
    """
    found_before = {run: read(run, results) for run in runs if path_of(run, results).exists()}
    if others := [str(path_of(run, results)) for run, found in found_before.items() if found["text"] != text]:
        raise SystemExit(
            f"{others[0]}, and {len(others) - 1} more, trained on another text than this environment has: install the "
            "releases that scripts/constraints.txt names, or remove these files"
        )
    missing = [run for run in runs if run not in found_before]
    failed = []
    pool = ThreadPoolExecutor(workers)
    try:
        made = {pool.submit(execute, run, text, data, results): run for run in missing}
        for future in progress(as_completed(made), [1.0] * len(made), "runs"):
            run = made[future]
            try:
                found = future.result()
            except RuntimeError as error:
                failed.append(str(error))
                continue
            print(f"  {run.optimizer:20} {run.label:28} tune {found['tune']}   test {found['test']}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # interrupted, it starts no other run
    if failed:
        raise SystemExit("\n".join([*failed, "All other runs are kept: call the same again to go on."]))
    return {run: read(run, results) for run in runs}


def losses(results: dict[Run, Result], held_out: str = "tune") -> dict[Run, float]:
    """Held-out losses; that of a run that diverged is infinite."""
    return {run: math.inf if found[held_out] is None else found[held_out] for run, found in results.items()}


def whole(optimizers: Sequence[str], data: Path, results: Path, workers: int) -> Iterator[str]:
    """Make all runs of the protocol, one optimizer after another, then those at other sizes.

    Which optimizers train at other sizes follows from the means of all: for some of them, these runs are left out.

    Args:
        optimizers: their names; adam, which all are compared with, comes first.
        data: folder of the text and of logs.
        results: folder of the files of runs.
        workers: runs at a time.

    Yields:
        what was finished, in words.
    """

    def made(runs: Sequence[Run], held_out: str = "tune") -> dict[Run, float]:
        return losses(make(runs, text, data, results, workers), held_out)

    text, bests, means = corpus.write(data), {}, {}
    for name in optimizers:
        tried = protocol.trials(name)
        bests[name] = best = protocol.best_of(tried, made(tried))
        means[name] = statistics.fmean(made(protocol.finals(best), "test").values())
        for steps in protocol.LENGTHS:
            if statistics.fmean(made(protocol.shorter(best, steps), "test").values()) > means["adam"]:
                break
        yield f"{name}: {best.label} of {len(tried)}, mean test loss {means[name]:.4f}"
    if bests.keys() != protocol.SPACES.keys():
        return
    chosen: dict[str, list[Run]] = {name: [] for name in protocol.leaders(means)}
    for width, steps in protocol.SIZES:
        for name, so_far in chosen.items():
            tried = protocol.size_trials(bests[name], width, steps)
            so_far.append(protocol.best_of(tried, made(tried)))
            made(protocol.size_finals(so_far[-1]))
            yield f"{name}: {so_far[-1].label}"
    for name, so_far in chosen.items():
        made(protocol.size_finals(best := protocol.largest(bests[name], so_far)))
        yield f"{name}: {best.label}"
