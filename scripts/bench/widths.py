"""Find Muon's best learning rate for the demo's GPT at three widths, with Megatron's muP and as it is.

``make widths`` runs it and leaves a table and a picture in ``bench-out/widths/``; ``--docs`` puts both into
docs/measured.md. Each run is one process on the CPU. Heads have as many channels at each width, so there are more
of them. What was trained before, with the same flags, is not trained again.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pages
import pictures
import training
from matplotlib.figure import Figure

OUT = training.ROOT / "bench-out" / "widths"
PAGE = pages.DOCS / "measured.md"

WIDTHS = (64, 128, 256)
STEPS = 120
CHANNELS = 32  # of a head
COLORS = ("#f97000", "#3e81a3", "#122168")  # of the widths, from light to dark

Losses = dict[float, float]  # rate -> loss


@dataclass(frozen=True)
class Way:
    """A way of making a model wider, and the rates of matrices that are tried at each width."""

    title: str
    flags: str
    rates: tuple[float, ...]


WAYS = {
    "mup": Way(
        "muP, --muon-preset unit_rms",
        f"--use-mup --mup-base-hidden-size {WIDTHS[0]} --muon-preset unit_rms",
        (0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    ),
    "adamw": Way(
        "without muP, --muon-preset match_adamw",
        "--muon-preset match_adamw",
        (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1),
    ),
}


def flags(way: Way, width: int, rate: float) -> list[str]:
    """Those of a run beside the demo's; embeddings, output layer and vectors keep its ``--lr``."""
    heads = width // CHANNELS
    sizes = f"--hidden-size {width} --ffn-hidden-size {width * 11 // 4} --num-attention-heads {heads}"
    groups = f"--num-query-groups {heads // 2} --kv-channels {CHANNELS}"
    rates = f"--muon-lr {rate:g} --muon-min-lr {rate / 10:g} --muon-momentum 0.95 --muon-nesterov"
    return f"{sizes} {groups} {way.flags} {rates}".split()


def best(losses: Losses) -> float:
    """The rate of least loss: between the rates that were tried, by the parabola in ``log(rate)`` around the best.

    Raises:
        ValueError: the best is the lowest or the highest of them, so that there may be a better one outside.
    """
    rates = sorted(losses)
    place = rates.index(min(rates, key=losses.__getitem__))
    if place in (0, len(rates) - 1):
        raise ValueError(f"the best rate {rates[place]:g} is at the end of those that were tried: {rates}; try more")
    around = rates[place - 1 : place + 2]
    a, b, _ = np.polyfit([math.log(rate) for rate in around], [losses[rate] for rate in around], 2)
    return math.exp(-b / (2 * a))


def measure(way: Way, width: int, steps: int, known: dict[str, float], out: Path) -> Losses:
    """The loss at each rate, of runs that are new or ``known``, which they are put into."""
    found = {}
    for rate in way.rates:
        own = flags(way, width, rate)
        key = " ".join([str(steps), *own])
        if key not in known:
            known[key] = training.loss_at(training.train("muon", own, steps, out), steps)
            (out / "widths.json").write_text(json.dumps(known, indent=2))
        found[rate] = known[key]
    return found


def table(found: Mapping[str, Mapping[int, Losses]]) -> str:
    """The Markdown table of losses and best rates, and by how much these differ."""
    rows, sentences = [], []
    for name, of_widths in found.items():
        bests = {width: best(losses) for width, losses in of_widths.items()}
        for width, losses in of_widths.items():
            cells = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(losses.items()))
            rows.append((WAYS[name].title, str(width), cells, f"{bests[width]:.3g}"))
        ratio = max(bests.values()) / min(bests.values())
        sentences.append(f"{WAYS[name].title}: the best rates differ by a factor of {ratio:.2f}.")
    return "\n\n".join([pages.markdown(("way", "width", "rate: loss", "best rate"), rows), *sentences])


def draw(found: Mapping[str, Mapping[int, Losses]], steps: int, picture: Path) -> None:
    """Draw losses over rates, a curve for each width, with the best rate of each."""
    with pictures.look():
        figure = Figure(figsize=(pictures.WIDTH, 3.6 * len(found)))
        panels = list(figure.subplots(len(found), 1, sharey=True, squeeze=False).flat)
        for axes, (name, of_widths) in zip(panels, found.items(), strict=True):
            for color, (width, losses) in zip(COLORS, of_widths.items(), strict=True):
                axes.plot(*zip(*sorted(losses.items()), strict=True), "o-", color=color, label=f"width {width}")
                axes.axvline(best(losses), color=color, linestyle=":", linewidth=1.2)
            axes.set(xscale="log", title=WAYS[name].title)
            axes.set_xticks(WAYS[name].rates, labels=[f"{rate:g}" for rate in WAYS[name].rates])
            axes.minorticks_off()
        axes.set_xlabel("learning rate of the matrices; dotted: the best")
        figure.supylabel(f"training loss at step {steps} (nats per byte)", fontsize=11)
        for axes in panels:
            pictures.name_ends(axes)
        figure.savefig(picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Train at all widths and rates, or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of making a model wider")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--docs", action="store_true", help="write table and picture into docs/, too")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs, table and picture")
    options = parser.parse_args(argv)
    training.write_data(options.out)
    path = options.out / "widths.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    found = {
        name: {width: measure(WAYS[name], width, options.steps, known, options.out) for width in options.widths}
        for name in options.ways
    }
    of_steps = f"losses are means of the last {training.LAST} of {options.steps} steps"
    text = f"{table(found)}\n\nMeasured on: {training.machine()}; {of_steps}."
    print(f"\n{text}")
    drawn = [options.out / "widths.png", *([pages.DOCS / "widths.png"] if options.docs else [])]
    for picture in drawn:
        draw(found, options.steps, picture)
    if options.docs:
        pages.put(PAGE, "widths", text)


if __name__ == "__main__":
    main()
