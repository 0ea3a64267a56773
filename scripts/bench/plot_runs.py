"""Draw losses and figures of several runs, by their TensorBoard files.

python scripts/bench/plot_runs.py RUN... [--out plot.png]
"""

import argparse
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from colors import LINES, OTHER, shade
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Points = list[tuple[int, float]]
"""(iteration, value), ascending."""

Curves = dict[str, Points]
"""By tag."""

LOSS = "lm loss"
PANELS = {  # title -> figures, and their line styles
    "update RMS (dotted: predicted)": {"update_rms": "-", "predicted_update_rms": ":"},
    "residual, mean (dotted: largest)": {"residual": "-", "largest_residual": ":"},
    "effective rank / short side (dotted: smallest)": {
        "effective_rank_share": "-",
        "smallest_effective_rank_share": ":",
    },
    "gradient norm": {"grad_norm": "-"},
    "learning rate": {"learning_rate": "-"},
    "orthogonalize, ms": {"orthogonalize_ms": "-"},
    "exchange, ms": {"exchange_ms": "-"},
    "update, ms": {"update_ms": "-"},
}
COLUMNS = 2
SMOOTHED = 15  # measured steps of a running median of times: one step in a hundred takes ten times as long
TIMES = f"\nof times: thin lines are measured steps, thick ones the median of {SMOOTHED} around each"


class Line(NamedTuple):
    """A curve of one optimizer."""

    run: str
    optimizer: str  # empty for a loss
    points: Points
    style: str


def curves(folder: str | Path) -> Curves:
    """Curves of a folder's TensorBoard files; ``ValueError`` without any."""
    files = sorted(Path(folder).rglob("events.out.tfevents.*"))
    if not files:
        raise ValueError(f"{folder} has no TensorBoard files (events.out.tfevents.*): give that of --tensorboard-dir")
    found: dict[str, dict[int, float]] = {}
    for file in files:  # by their times: of steps that a resumed run repeated, the later file counts
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values = found.setdefault(tag, {})
            for event in events.Scalars(tag):
                values[event.step] = event.value
    if not found:
        raise ValueError(f"the TensorBoard files in {folder} hold no curve yet")
    return {tag: sorted(values.items()) for tag, values in found.items()}


def draw(runs: dict[str, Curves], out: str | Path) -> None:
    """Draw the loss and :data:`PANELS`; ``ValueError`` without curves."""
    panels = {LOSS: [Line(name, "", found[LOSS], "-") for name, found in runs.items() if LOSS in found]}
    for title, styles in PANELS.items():
        panels[title] = lines_of(runs, styles)
    drawn = {title: lines for title, lines in panels.items() if lines}
    if not drawn:
        raise ValueError(f"{', '.join(runs)}: no loss and no figures of an optimizer (--optimizer-metrics-interval)")
    rows = -(-len(drawn) // COLUMNS)
    first = 1 + -len(drawn) % COLUMNS  # as wide as leaves no place empty
    colors = colors_of(runs)
    with matplotlib.rc_context({"font.size": 10, "axes.titlesize": 10}):
        figure = Figure(figsize=(3.6 * COLUMNS, 2.3 * rows), layout="constrained")
        named: dict[str, Any] = {}
        for number, (title, lines) in enumerate(drawn.items(), first):
            axes = figure.add_subplot(rows, COLUMNS, (1, number) if number == first else number)
            highest = 0.0
            for line in lines:
                of_line = colors[line.run, line.optimizer]
                if title.endswith("ms"):
                    axes.plot(*zip(*line.points, strict=True), color=of_line, alpha=0.3, linewidth=0.6)
                    line = line._replace(points=running_median(line.points))
                    highest = max(highest, *(value for _, value in line.points))
                (shown,) = axes.plot(*zip(*line.points, strict=True), line.style, color=of_line, linewidth=1.6)
                if line.optimizer or not any(of == line.run and name for of, name in colors):
                    named.setdefault(label(line, len(runs)), shown)
            if highest:  # of single steps, the thin ones, some take ten times as long
                axes.set_ylim(0, 1.5 * highest)
            axes.set_title(title, loc="left")
            axes.grid(color="#e4e4e4")
            axes.spines[["top", "right"]].set_visible(False)
        measured = any(title.endswith("ms") for title in drawn)
        figure.supxlabel(f"iteration{TIMES if measured else ''}", fontsize=9)
        figure.legend(named.values(), named, loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(out, dpi=160)


def label(line: Line, runs: int) -> str:
    """What the legend calls a line."""
    return line.optimizer if line.optimizer and runs == 1 else ": ".join(filter(None, (line.run, line.optimizer)))


def colors_of(runs: dict[str, Curves]) -> dict[tuple[str, str], str]:
    """Color of each run and optimizer, paler in each further run, and of each run's loss, that of its main one."""
    found: dict[tuple[str, str], str] = {}
    seen: Counter[str] = Counter()
    for run, tags in runs.items():
        main = "adam"
        for name in optimizers_of(tags):
            known = LINES[name].color if name in LINES else OTHER
            found[run, name] = shade(known, seen[name])
            seen[name] += 1
            if name != "adam":
                main = name
        if (run, main) not in found:  # a loss alone
            found[run, ""] = shade(OTHER, seen[""])
            seen[""] += 1
        else:
            found[run, ""] = found[run, main]
    return found


def running_median(points: Points) -> Points:
    """Each value as the median of those around it."""
    found = []
    for place, (iteration, _) in enumerate(points):
        around = points[max(0, place - SMOOTHED // 2) : place + SMOOTHED // 2 + 1]
        found.append((iteration, median(value for _, value in around)))
    return found


def optimizers_of(tags: Curves) -> list[str]:
    """Optimizers that have figures."""
    return sorted({tag.partition("/")[0] for tag in tags if "/" in tag})


def lines_of(runs: dict[str, Curves], styles: dict[str, str]) -> list[Line]:
    """Lines of each optimizer, but those that are zero throughout."""
    lines = []
    for run, tags in runs.items():
        for optimizer in optimizers_of(tags):
            for figure, style in styles.items():
                points = tags.get(f"{optimizer}/{figure}", [])
                if any(value for _, value in points):
                    lines.append(Line(run, optimizer, points, style))
    return lines


def main() -> None:
    """Draw the runs of the command line."""
    parser = argparse.ArgumentParser(description="Draw losses and figures of several runs.")
    parser.add_argument("folders", nargs="+", metavar="RUN", help="a folder that was given by --tensorboard-dir")
    parser.add_argument("--out", default="plot.png", metavar="FILE", help="the picture (plot.png)")
    options = parser.parse_args()
    names = [Path(folder).resolve().name for folder in options.folders]
    if len(set(names)) < len(names):
        names = options.folders
    runs = {}
    for name, folder in zip(names, options.folders, strict=True):
        runs[name] = curves(folder)
    draw(runs, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
