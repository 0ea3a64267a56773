"""Draw losses and figures of several runs, by their TensorBoard files.

python scripts/bench/plot_runs.py RUN... [--out plot.png]
"""

import argparse
from collections import Counter
from pathlib import Path
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
PANELS = {  # figure -> title
    "update_rms": "update RMS",
    "residual": "residual of updates",
    "weight_norm": "weight norm",
    "momentum_norm": "momentum norm",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
}
COLUMNS = 2


class Line(NamedTuple):
    """A curve of one optimizer."""

    run: str
    optimizer: str  # empty for a loss
    points: Points


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
    panels = {LOSS: [Line(name, "", found[LOSS]) for name, found in runs.items() if LOSS in found]}
    for figure, title in PANELS.items():
        panels[title] = lines_of(runs, figure)
    drawn = {title: lines for title, lines in panels.items() if lines}
    if not drawn:
        raise ValueError(f"{', '.join(runs)}: no loss and no figures of an optimizer (--optimizer-metrics-interval)")
    rows = -(-len(drawn) // COLUMNS)
    first = 1 + -len(drawn) % COLUMNS  # as wide as leaves no place empty
    colors = colors_of(runs)
    with matplotlib.rc_context({"font.size": 10, "axes.titlesize": 10}):
        picture = Figure(figsize=(3.6 * COLUMNS, 2.3 * rows), layout="constrained")
        named: dict[str, Any] = {}
        for number, (title, lines) in enumerate(drawn.items(), first):
            axes = picture.add_subplot(rows, COLUMNS, (1, number) if number == first else number)
            for line in lines:
                of_line = colors[line.run, line.optimizer]
                style: dict[str, Any] = {"color": of_line, "linewidth": 1.6}
                if line.optimizer == "adam":  # on top of an equal rate, which it leaves to be seen
                    style |= {"linestyle": (0, (4, 3)), "zorder": 3}
                (shown,) = axes.plot(*zip(*line.points, strict=True), **style)
                if line.optimizer or not any(of == line.run and name for of, name in colors):
                    named.setdefault(label(line, len(runs)), shown)
            if title == PANELS["learning_rate"]:
                axes.set_yscale("log")  # those of two optimizers may be far apart
            axes.set_title(title, loc="left")
            axes.grid(color="#e4e4e4")
            axes.spines[["top", "right"]].set_visible(False)
        picture.supxlabel("iteration", fontsize=9)
        picture.legend(named.values(), named, loc="outside upper center", ncols=2, frameon=False)
        picture.savefig(out, dpi=160)


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


def optimizers_of(tags: Curves) -> list[str]:
    """Optimizers that have figures."""
    return sorted({tag.partition("/")[0] for tag in tags if "/" in tag})


def lines_of(runs: dict[str, Curves], figure: str) -> list[Line]:
    """Lines of each optimizer, but those that are zero throughout."""
    lines = []
    for run, tags in runs.items():
        for optimizer in optimizers_of(tags):
            points = tags.get(f"{optimizer}/{figure}", [])
            if any(value for _, value in points):
                lines.append(Line(run, optimizer, points))
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
