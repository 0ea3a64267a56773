"""The command ``megatron-eopt plot``: losses and figures of several runs."""

import argparse
from pathlib import Path

Curves = dict[str, list[tuple[int, float]]]
"""Tag -> (iteration, value), ascending."""

LOSS = "lm loss"
PANELS = (  # title, and figure -> line style
    ("update RMS before the rate (dotted: predicted)", {"update_rms": "-", "predicted_update_rms": ":"}),
    ("residual before the last step (dotted: largest)", {"residual": "-", "largest_residual": ":"}),
    (
        "effective rank / short side (dotted: smallest)",
        {"effective_rank_share": "-", "smallest_effective_rank_share": ":"},
    ),
    ("gradient norm", {"grad_norm": "-"}),
    ("learning rate", {"learning_rate": "-"}),
    (
        "ms: orthogonalize (dashed: exchange, dotted: update)",
        {"orthogonalize_ms": "-", "exchange_ms": "--", "update_ms": ":"},
    ),
)
COLUMNS = 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("folders", nargs="+", metavar="RUN", help="a folder that was given by --tensorboard-dir")
    parser.add_argument("--out", default="plot.png", metavar="FILE", help="the picture (plot.png)")
    parser.set_defaults(run=_plot)


def _plot(options: argparse.Namespace, flags: list[str] | None) -> int:
    names = [Path(folder).resolve().name for folder in options.folders]
    names = names if len(set(names)) == len(names) else options.folders
    runs = {name: curves(folder) for name, folder in zip(names, options.folders, strict=True)}
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
            found.setdefault(tag, {}).update((each.step, each.value) for each in events.Scalars(tag))
    if not found:
        raise ValueError(f"the TensorBoard files in {folder} hold no curve yet")
    return {tag: sorted(values.items()) for tag, values in found.items()}


def draw(runs: dict[str, Curves], out: str | Path) -> None:
    """Draw the loss and :data:`PANELS`; ``ValueError`` without curves."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"pictures are drawn by matplotlib: pip install matplotlib ({error})") from error
    panels = [(LOSS, [(name, found[LOSS], "-") for name, found in runs.items() if LOSS in found])]
    panels += [(title, lines_of(runs, styles)) for title, styles in PANELS]
    panels = [(title, lines) for title, lines in panels if lines]
    if not panels:
        raise ValueError(f"{', '.join(runs)}: no loss and no figures of an optimizer (--optimizer-metrics-interval)")
    rows = -(-len(panels) // COLUMNS)
    empty = -len(panels) % COLUMNS
    figure = Figure(figsize=(4 * COLUMNS, 2.8 * rows), layout="constrained")
    colors: dict[str, str] = {}  # of runs; their Adams are pale
    for number, (title, lines) in enumerate(panels, 1 + empty):  # the first is as wide as leaves no place empty
        axes = figure.add_subplot(rows, COLUMNS, (1, number) if number == 1 + empty else number)
        for label, points, style in sorted(lines, key=lambda line: -line[1][-1][1]):  # the legend follows
            color = colors.setdefault(label.partition(": ")[0], f"C{len(colors) % 10}")
            [line] = axes.plot(*zip(*points, strict=True), style, label=label if style == "-" else None)
            line.set(color=color, alpha=0.45 if label.endswith(": adam") else 1)
        # one step in a hundred takes ten times as long
        axes.set(xlabel="iteration", yscale="log" if title.startswith("ms") else "linear")
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(out, dpi=140)


def lines_of(runs: dict[str, Curves], styles: dict[str, str]) -> list[tuple[str, list[tuple[int, float]], str]]:
    """Label, points and style of each optimizer's lines."""
    lines = []
    for name, tags in runs.items():
        for optimizer in sorted({tag.partition("/")[0] for tag in tags if "/" in tag}):
            label = optimizer if len(runs) == 1 else f"{name}: {optimizer}"
            lines += [
                (label, tags[f"{optimizer}/{figure}"], style)
                for figure, style in styles.items()
                if any(value for _, value in tags.get(f"{optimizer}/{figure}", ()))
            ]
    return lines
