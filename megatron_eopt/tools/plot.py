"""The command ``megatron-eopt plot``: losses and figures of several runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

Points = list[tuple[int, float]]
"""(iteration, value), ascending."""

Curves = dict[str, Points]
"""By tag."""

LOSS = "lm loss"
PANELS = {  # title -> figures, and their line styles
    "update RMS before the rate (dotted: predicted)": {"update_rms": "-", "predicted_update_rms": ":"},
    "residual before the last step (dotted: largest)": {"residual": "-", "largest_residual": ":"},
    "effective rank / short side (dotted: smallest)": {
        "effective_rank_share": "-",
        "smallest_effective_rank_share": ":",
    },
    "gradient norm": {"grad_norm": "-"},
    "learning rate": {"learning_rate": "-"},
    "ms: orthogonalize (dashed: exchange, dotted: update)": {
        "orthogonalize_ms": "-",
        "exchange_ms": "--",
        "update_ms": ":",
    },
}
COLUMNS = 2


class Line(NamedTuple):
    """A curve of one optimizer."""

    label: str  # run and optimizer
    points: Points
    style: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("folders", nargs="+", metavar="RUN", help="a folder that was given by --tensorboard-dir")
    parser.add_argument("--out", default="plot.png", metavar="FILE", help="the picture (plot.png)")


def run(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    """Draw the picture; returns the exit status."""
    names = [Path(folder).resolve().name for folder in options.folders]
    if len(set(names)) < len(names):
        names = options.folders
    runs = {}
    for name, folder in zip(names, options.folders, strict=True):
        runs[name] = curves(folder)
    draw(runs, options.out)
    print(f"{options.out}: {', '.join(f'{name} ({len(found)} curves)' for name, found in runs.items())}")
    return 0


def curves(folder: str | Path) -> Curves:
    """Curves of a folder's TensorBoard files; ``ValueError`` without any."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError(f"TensorBoard files are read by tensorboard: pip install tensorboard ({error})") from error
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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"pictures are drawn by matplotlib: pip install matplotlib ({error})") from error
    panels = {LOSS: [Line(name, found[LOSS], "-") for name, found in runs.items() if LOSS in found]}
    for title, styles in PANELS.items():
        panels[title] = lines_of(runs, styles)
    drawn = {title: lines for title, lines in panels.items() if lines}
    if not drawn:
        raise ValueError(f"{', '.join(runs)}: no loss and no figures of an optimizer (--optimizer-metrics-interval)")
    rows = -(-len(drawn) // COLUMNS)
    first = 1 + -len(drawn) % COLUMNS  # as wide as leaves no place empty
    figure = Figure(figsize=(4 * COLUMNS, 2.8 * rows), layout="constrained")
    colors: dict[str, str] = {}  # of runs; their Adams are pale
    for number, (title, lines) in enumerate(drawn.items(), first):
        axes = figure.add_subplot(rows, COLUMNS, (1, number) if number == first else number)
        lines.sort(key=lambda line: -line.points[-1][1])  # the legend follows
        for line in lines:
            run = line.label.partition(": ")[0]
            color = colors.setdefault(run, f"C{len(colors) % 10}")
            axes.plot(
                *zip(*line.points, strict=True),
                line.style,
                label=line.label if line.style == "-" else None,
                color=color,
                alpha=0.45 if line.label.endswith(": adam") else 1,
            )
        axes.set_xlabel("iteration")
        axes.set_title(title, fontsize=9)
        if title.startswith("ms"):
            axes.set_yscale("log")  # one step in a hundred takes ten times as long
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(out, dpi=140)


def lines_of(runs: dict[str, Curves], styles: dict[str, str]) -> list[Line]:
    """Lines of each optimizer, but those that are zero throughout."""
    lines = []
    for name, tags in runs.items():
        for optimizer in sorted({tag.partition("/")[0] for tag in tags if "/" in tag}):
            label = optimizer if len(runs) == 1 else f"{name}: {optimizer}"
            for figure, style in styles.items():
                points = tags.get(f"{optimizer}/{figure}", [])
                if any(value for _, value in points):
                    lines.append(Line(label, points, style))
    return lines
