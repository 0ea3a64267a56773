"""Pictures of the comparison: all optimizers, two of them as lines, and how the gain changes with size."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pictures
import protocol
from compare_figures import Summary, against, estimate
from matplotlib.figure import Figure
from trials import BLOCK

WORDS = "test loss after the last step (nats per byte)"


def draw_all(found: Mapping[str, Summary], picture: Path) -> None:
    """Draw each optimizer's mean, interval and seeds, lowest at the top."""
    names = sorted(found, key=lambda name: statistics.fmean(found[name].of(protocol.STEPS)), reverse=True)
    with pictures.look():
        figure = Figure(figsize=(pictures.WIDTH, 0.36 * len(names) + 1.4))
        axes = figure.subplots()
        for row, name in enumerate(names):
            own, color = found[name].of(protocol.STEPS), pictures.style(name)["color"]
            of_mean = estimate(own)
            axes.plot(own, [row] * len(own), "o", color=color, alpha=0.25, markersize=5, markeredgewidth=0)
            axes.errorbar(of_mean.mean, row, xerr=of_mean.half, fmt="o", color=color, markersize=5, capsize=4)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel=WORDS)
        axes.set_title(f"Mean of {len(protocol.FINAL_SEEDS)} seeds and its 95 % interval; pale: each seed", loc="left")
        figure.savefig(picture)


def draw_hero(found: Mapping[str, Summary], picture: Path, names: Sequence[str] = ("adam", "muon")) -> None:
    """Draw training losses of two optimizers over the steps, with bands of one deviation over the seeds."""
    with pictures.look():
        figure = Figure(figsize=(pictures.WIDTH, 3.9))
        axes = figure.subplots()
        second = 0.0
        held_out = []
        for name in names:
            # the first is that of one step
            blocks = list(zip(*(curve[1:] for curve in found[name].curves), strict=True))
            steps = [BLOCK * (place + 1) for place in range(len(blocks))]
            means, deviations = map(statistics.fmean, blocks), map(statistics.stdev, blocks)
            mean, deviation = list(means), list(deviations)
            style = pictures.style(name)
            axes.plot(steps, mean, label=f"{name} {mean[-1]:.2f}", **style)
            held_out.append(f"{name} {estimate(found[name].of(protocol.STEPS)).words}")
            low = [at - by for at, by in zip(mean, deviation, strict=True)]
            high = [at + by for at, by in zip(mean, deviation, strict=True)]
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
            second = max(second, high[1])
        axes.set(xlabel="step", ylabel="training loss (nats per byte)")
        axes.set_ylim(top=second + 0.1)  # the first steps would take half of the picture
        axes.set_title(
            f"A GPT of 0.8 million parameters, both tuned by {protocol.TRIALS} trials.\n"
            f"Mean of {len(protocol.FINAL_SEEDS)} seeds and their deviation; numbers: of the last {BLOCK} steps.\n"
            f"Held-out loss: {', '.join(held_out)} (95 %).",
            loc="left",
        )
        pictures.name_ends(axes)
        figure.savefig(picture)


def draw_sizes(of_leaders: Mapping[str, Mapping[tuple[int, int], Sequence[float]]], picture: Path) -> None:
    """Draw the differences to Adam over the length of the runs, a panel for each width."""
    widths = sorted({width for own in of_leaders.values() for width, _ in own})
    with pictures.look():
        figure = Figure(figsize=(pictures.WIDTH, 3.0 * len(widths)))
        panels = figure.subplots(len(widths), sharex=True, squeeze=False)[:, 0]
        for axes, width in zip(panels, widths, strict=True):
            for name, own in of_leaders.items():
                at = sorted(steps for of_width, steps in own if of_width == width)
                if at:
                    less = [against(own[width, steps], of_leaders["adam"][width, steps]) for steps in at]
                    means, halves = [each.mean for each in less], [each.half for each in less]
                    axes.errorbar(at, means, yerr=halves, label="_", fmt="none", color=pictures.style(name)["color"])
                    axes.plot(at, means, label=name, marker="o", **pictures.style(name))
            axes.set(title=f"width {width}", ylabel="test loss less Adam's", xscale="log")
            axes.set_xticks(sorted({steps for own in of_leaders.values() for _, steps in own}))
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.minorticks_off()
        figure.supxlabel("steps")
        for axes in panels:
            pictures.name_ends(axes)
        figure.savefig(picture)
