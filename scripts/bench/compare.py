"""Compare optimizers by the protocol of docs/compare.md.

``make compare`` trains each optimizer once with the setting that its trials chose, and shows it beside the recorded
runs: some ten minutes on two cores. ``--whole`` makes all runs of the protocol, which takes hours; interrupted, it goes
on where it was. Runs are kept under ``scripts/bench/results``. ``--seconds`` times a step of each, one after another,
on a machine that does nothing else. ``--docs`` writes tables and pictures of what is kept into docs/.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import compare_figures as figures
import corpus
import protocol
import trials
from compare_figures import Summary
from pages import DOCS, markdown, put
from quiet import Load, add_flag, spread
from training import ROOT, THREADS, machine, read_times

from megatron_eopt.routing import from_json
from megatron_eopt.screen import progress

OUT = ROOT / "bench-out" / "compare"
TIMED = 40  # steps
ROUNDS = 3  # in which the machine may be slower for a while


def small(found: Mapping[str, Summary], kept: Path, out: Path, workers: int) -> str:
    """Train each optimizer once more as in a recorded run; the Markdown of both losses.

    A run of the same seed on the same kind of processor has the same loss; on another it differs by rounding, which
    grows over the steps to as much as other seeds do. A line below the table says so where the text is another one.

    Args:
        found: of each optimizer that is to be trained.
        kept: folder of the recorded runs.
        out: folder of text and logs, and of the new runs.
        workers: runs at a time.
    """
    seed = protocol.FINAL_SEEDS[0]
    results = out / "small"
    runs = [replace(summary.best, label=f"final-seed-{seed}", seed=seed) for summary in found.values()]
    for run in runs:
        trials.path_of(run, results).unlink(missing_ok=True)
    made = trials.make(runs, corpus.write(out), out, results, workers)
    now = trials.losses(made, "test")
    rows = []
    for run, summary in sorted(zip(runs, found.values(), strict=True), key=lambda pair: now[pair[0]]):
        recorded = figures.estimate(summary.of(protocol.STEPS))
        before = summary.test[run]
        rows.append((run.optimizer, f"{now[run]:.3f}", f"{before:.3f}", recorded.words))
    head = ("optimizer", "test loss now", f"recorded, seed {seed}", f"recorded, {len(protocol.FINAL_SEEDS)} seeds")
    text = markdown(head, rows)
    if any(trials.read(run, kept)["text"] != made[run]["text"] for run in runs):
        text += "\n\nThe text is not that of the recorded runs: torch or megatron-core is of another release."
    return text


def time_steps(names: Sequence[str], out: Path, results: Path, anyway: bool = False) -> None:
    """Time a step of each optimizer, one after another in several rounds; keep it with its state, of the manifest."""
    load = Load(THREADS, anyway)
    text = corpus.write(out)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    manifests = {}
    turns = [*names] * ROUNDS
    for name in progress(turns, [1.0] * len(turns), "steps timed"):
        manifest = out / f"{name}.json"
        first = protocol.trials(name)[0]
        run = replace(
            first, label="timed", steps=TIMED, settings=(*first.settings, "--optimizer-manifest-file", str(manifest))
        )
        trials.execute(run, text, out, out / "timed")
        # a line is the mean of ten steps, and SOAP makes bases in every tenth; the first of them also warm up
        times = read_times(trials.log_of(run, out).read_text(encoding="utf-8").splitlines())[2:]
        seconds[name] += times
        load.check()
        if run.named != "adam":
            manifests[name] = from_json(json.loads(manifest.read_text(encoding="utf-8")))
        print(f"  {name:20} {min(times):.3f} s per step", flush=True)
    for name, times in seconds.items():
        print(f"  {name:20} {spread(times, '.3f')} s per step, {len(times)} times ten steps")
    found = {
        "seconds": {name: round(min(times), 4) for name, times in seconds.items()},
        "median": {name: round(statistics.median(times), 4) for name, times in seconds.items()},
        "most": {name: round(max(times), 4) for name, times in seconds.items()},
        "state": {name: round(value, 3) for name, value in figures.states(manifests).items()},
        "machine": machine(),
        "load before": load.before,
        "load": load.words,
    }
    (results / "seconds.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_docs(found: Mapping[str, Summary], results: Path) -> None:
    """Write tables and pictures of what is kept into docs/."""
    import compare_pictures as pictures

    timed = results / "seconds.json"
    known = json.loads(timed.read_text(encoding="utf-8")) if timed.exists() else {"seconds": {}, "state": {}}
    text = figures.table(found, known["seconds"], known["state"], known.get("median"), known.get("most"))
    if timed.exists():
        load = known.get("load", f"load of the machine before: {known['load before']:.2f}")
        text += f"\n\nSeconds on: {known['machine']}; {load}."
    if missing := [name for name in protocol.SPACES if name not in found]:
        text += f"\n\nStill without all their runs: {', '.join(missing)}."
    put("compare.md", "figures", text)
    put("compare.md", "chosen", figures.settings_table(found))
    pictures.draw_all(found, DOCS / "compare.png")
    if {"adam", "muon"} <= found.keys():
        pictures.draw_hero(found, DOCS / "hero.png")
    if of_leaders := figures.sizes(found, results):
        drawn = "![test loss less Adam's over the steps, a panel for each width](compare-sizes.png)"
        text = f"{figures.size_table(of_leaders)}\n\n{drawn}"
        all_sizes = (*protocol.SIZES, protocol.LARGEST)
        if lacking := [size for size in all_sizes if any(size not in own for own in of_leaders.values())]:
            named = ", ".join(f"width {width} with {steps} steps" for width, steps in lacking)
            text += f"\n\nStill without all their runs: {named}."
        put("compare.md", "sizes", text)
        pictures.draw_sizes(of_leaders, DOCS / "compare-sizes.png")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(protocol.SPACES)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of {', '.join(names)}"
    )
    parser.add_argument("--whole", action="store_true", help="make all runs of the protocol that are missing")
    parser.add_argument(
        "--seconds", action="store_true", help="time a step of each optimizer, in the place of kept times"
    )
    parser.add_argument("--docs", action="store_true", help="write tables and pictures of the kept runs into docs/")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one core each")
    parser.add_argument("--results", type=Path, default=trials.RESULTS, help="folder of the kept runs")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of text, logs and the small table")
    add_flag(parser)
    arguments = parser.parse_args(argv)
    only = [name for name in names if name in arguments.only]
    if arguments.workers < 1:
        parser.error(f"--workers {arguments.workers}: expected 1 or more")
    if arguments.whole and "adam" not in only:
        parser.error("--whole compares with adam: name it behind --only, too; runs that are kept are not made again")
    arguments.out = arguments.out.resolve()  # runs start in another folder
    if arguments.whole:
        for line in trials.whole(only, arguments.out, arguments.results, arguments.workers):
            print(line, flush=True)
    if arguments.seconds:
        time_steps(only, arguments.out, arguments.results, arguments.any_load)
    found = figures.summaries(arguments.results)
    if not found.keys() & {*only}:
        raise SystemExit(f"no optimizer has all its runs in {arguments.results}; --whole makes them")
    if arguments.docs and "adam" not in found:
        raise SystemExit(f"adam, which all are compared with, lacks runs in {arguments.results}; --whole makes them")
    if arguments.docs:
        write_docs(found, arguments.results)
    if not (arguments.whole or arguments.seconds or arguments.docs):
        chosen = {name: found[name] for name in only if name in found}
        text = small(chosen, arguments.results, arguments.out, arguments.workers)
        if missing := [name for name in only if name not in found]:
            text += f"\n\nWithout all their runs in {arguments.results}, and not trained: {', '.join(missing)}."
        (arguments.out / "compare.md").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\n\nThe table is in {arguments.out / 'compare.md'}")


if __name__ == "__main__":
    main()
