"""Train the demo's GPT with every optimizer at the settings that docs/optimizers.md recommends, on the same tokens.

``make compare`` runs it and leaves a table and a picture in ``bench-out/compare/``: losses at equal steps and at equal
seconds, and the optimizer's memory. Each run is one process on the CPU, one after another, so that none takes another's
time. ``--docs`` also puts both into the docs. ``--sweep`` tries other learning rates around the recommended ones.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_eopt.manifest import from_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import compare_figures as figures  # noqa: E402
import demo  # noqa: E402
from compare_figures import Record  # noqa: E402

DOCS = ROOT / "docs"
SETTINGS = DOCS / "optimizers.md"
OUT = ROOT / "bench-out" / "compare"

STEPS, SWEEP_STEPS = 200, 60
FACTORS = (1 / 3, 1.0, 3.0)
THREADS = 1  # of each run, so that what else the machine does finds another core
# A hundredth of the files is held out. Precision 'high': with Megatron's 'medium', a CPU multiplies in bf16 if it can,
# and the figures depend on the machine.
COMMON = (
    "--split 99,1,0 --num-workers 0 --eval-iters 8 --eval-interval 1000000 --log-interval 1 "
    "--muon-fp32-matmul-prec high"
)


def command(name: str, flags: Sequence[str], steps: int, out: Path) -> list[str]:
    """The command line of a run: the demo's model and schedule, then what differs, since the last of a flag counts."""
    data = ["--data-path", str(out / "stdlib"), "--data-cache-path", str(out / "cache")]
    of_steps = ["--train-iters", str(steps)]
    # without effect for Megatron's own Adam, of which nothing is collected
    manifest = ["--optimizer-manifest-file", str(out / f"{name}.json")]
    return [
        *[sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node", "1"],
        *["--master-addr", "127.0.0.1", "--master-port", str(demo.free_port())],
        *["-m", "megatron_eopt.run", "--cpu", "examples/pretrain_gpt.py"],
        *[*demo.MODEL.split(), *demo.SCHEDULE.split(), *demo.CPU.split(), *COMMON.split()],
        *[*data, *of_steps, "--optimizer", name, *flags, *manifest],
    ]


def train(name: str, flags: Sequence[str], steps: int, out: Path) -> Record:
    """Train with an optimizer; ``out`` has the data, and gets the log and, but for Adam, the manifest.

    Raises:
        SystemExit: it failed, or its log lacks losses.
    """
    log = out / f"{name}.log"
    lines = list(demo.execute(command(name, flags, steps, out), log, THREADS))
    try:
        losses = demo.read_losses(lines, 1, steps)
    except ValueError as error:
        raise SystemExit(f"{name}: {error}; its log is {log}") from error
    record = Record(
        name=name,
        losses=losses,
        seconds=figures.seconds_per_step(figures.read_times(lines)),
        held_out=figures.read_held_out(lines),
    )
    print(f"  {name:22} loss {figures.loss_at(losses, steps):.4f}   {record.seconds:.3f} s per step", flush=True)
    return record


def write_data(out: Path) -> None:
    """Write the data set of the demo into a folder, with a log of it."""
    out.mkdir(parents=True, exist_ok=True)
    list(demo.execute([sys.executable, "examples/stdlib_dataset.py", str(out / "stdlib")], out / "data.log"))


def machine() -> str:
    """What the figures were measured on, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    return f"{processor}, {THREADS} of {os.cpu_count()} cores, torch {torch.__version__}"


def compare(settings: dict[str, list[str]], steps: int, out: Path) -> tuple[list[Record], str]:
    """Train with each, one after another; the records, and the Markdown of their figures."""
    load = os.getloadavg()[0]
    records = [train(name, flags, steps, out) for name, flags in settings.items()]
    written = {name: json.loads((out / f"{name}.json").read_text()) for name in settings if name != "adam"}
    state = figures.states({name: from_json(manifest) for name, manifest in written.items()})
    records = [replace(record, state=state.get(record.name)) for record in records]
    measured = f"Measured on: {machine()}; load of the machine before the first run: {load:.2f}."
    return records, f"{figures.table(records)}\n\n{measured}"


def sweep(settings: dict[str, list[str]], steps: int, factors: Sequence[float], out: Path) -> str:
    """Train with each at several rates; the Markdown of all losses so far at these settings."""
    path = out / "sweep.json"
    known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    for name, flags in settings.items():
        for factor in factors:
            changed = figures.at_rate(flags, figures.rate(flags) * factor)
            key = " ".join([name, str(steps), *changed])
            if key not in known:
                print(f"  {key}", flush=True)
                known[key] = figures.loss_at(train(name, changed, steps, out).losses, steps)
                path.write_text(json.dumps(known, indent=2))
    return figures.sweep_table(_of_settings(known, settings), settings)


def _of_settings(known: dict[str, float], settings: dict[str, list[str]]) -> dict[tuple[str, int], dict[float, float]]:
    """(name, steps) -> rate -> loss, of what was swept with these flags but for the rate."""
    found: dict[tuple[str, int], dict[float, float]] = {}
    for name, flags in settings.items():
        for key, loss in known.items():
            of_name, steps, *swept = key.split()
            if of_name == name and figures.at_rate(swept, 1.0) == figures.at_rate(flags, 1.0):
                found.setdefault((name, int(steps)), {})[figures.rate(swept)] = loss
    return found


def put_into_docs(mark: str, lines: str) -> None:
    """Write lines into their place in docs/compare.md."""
    page = DOCS / "compare.md"
    page.write_text(figures.replaced(page.read_text(encoding="utf-8"), mark, lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison, or the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recommended = figures.read_settings(SETTINGS.read_text(encoding="utf-8"))
    parser.add_argument("--only", nargs="+", choices=list(recommended), default=list(recommended), metavar="NAME")
    parser.add_argument("--steps", type=int, help=f"of each run; {STEPS}, and {SWEEP_STEPS} of a sweep")
    parser.add_argument("--sweep", action="store_true", help="try several learning rates, and compare nothing else")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS, help="of the recommended rates in a sweep")
    parser.add_argument("--docs", action="store_true", help="write table and picture into docs/, too")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs, table and picture")
    arguments = parser.parse_args(argv)
    settings = {name: recommended[name] for name in arguments.only}
    write_data(arguments.out)
    if arguments.sweep:
        swept = sweep(settings, arguments.steps or SWEEP_STEPS, arguments.factors, arguments.out)
        print(swept)
        if arguments.docs:
            put_into_docs("sweep", swept)
        return
    records, text = compare(settings, arguments.steps or STEPS, arguments.out)
    (arguments.out / "compare.md").write_text(text + "\n", encoding="utf-8")
    pictures = [arguments.out / "compare.png", *([DOCS / "compare.png"] if arguments.docs else [])]
    for picture in pictures:
        figures.draw(records, picture)
    if arguments.docs:
        put_into_docs("figures", text)
    print(f"\n{text}\n\nTable and picture: {arguments.out / 'compare.md'}, {pictures[0]}")


if __name__ == "__main__":
    main()
