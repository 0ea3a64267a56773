"""Draw what plans are predicted to cost for Llama-3 8B and 70B, and print their table of docs/measured.md.

Nothing is measured: these are the predictions of the planner at its default rates, for the data-parallel rank with the
most to do. ``.venv/bin/python scripts/bench/plan_figures.py`` writes docs/planning.png.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pictures
from matplotlib.figure import Figure
from model_matrices import dealt_matrices
from model_sizes import MODELS, Parallel

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Work, plan_cost
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.rates import DEFAULT_RATES
from megatron_eopt.parallel.records import Plan, TpMode

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "planning.png"
TENSOR, DATA = 8, (4, 16, 64)
PIPELINE = {"llama3-8b": 1, "llama3-70b": 4}
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MODES: tuple[TpMode, ...] = ("auto", *(mode for mode in get_args(TpMode) if mode != "auto"))
NEWTON_SCHULZ = NewtonSchulz()
WORK = Work(schedule=NEWTON_SCHULZ.schedule, restarts=NEWTON_SCHULZ.restarts, itemsize=2)

STYLES: dict[TpMode, dict[str, Any]] = {  # auto lies behind the scheme that it takes
    "auto": {"color": "#c4c4c4", "linewidth": 6},
    "blockwise": {"color": "#3e81a3", "linestyle": "--"},  # another update
    "duplicated": {"color": "#f97000"},
    "distributed": {"color": "#5ca265"},
    "owner": {"color": "#d1361b"},
    "gram": {"color": "#0036b4"},
}


def plans(name: str, data: int) -> dict[TpMode, Plan]:
    """The plan of every mode."""
    parallel = Parallel(tensor=TENSOR, pipeline=PIPELINE[name], data=data)
    matrices = dealt_matrices(MODELS[name], parallel, WORK).matrices
    return {mode: make_plan(matrices, mode, WORK) for mode in MODES}


def chosen(plan: Plan) -> str:
    """How many matrices each scheme has, in words."""
    counts: dict[str, int] = {}
    for bucket in plan.buckets:
        counts[bucket.scheme] = counts.get(bucket.scheme, 0) + len(bucket.matrices)
    return ", ".join(f"{count} {scheme}" for scheme, count in counts.items())


def draw(seconds: Mapping[str, Mapping[TpMode, Sequence[float]]], picture: Path) -> None:
    """Draw a panel for each model, with a line for each mode over :data:`DATA`."""
    with pictures.look():
        figure = Figure(figsize=(pictures.WIDTH, 3.8 * len(seconds)))
        panels = figure.subplots(len(seconds), 1)
        for axes, (name, of_modes) in zip(panels, seconds.items(), strict=True):
            for mode, of_mode in of_modes.items():
                axes.plot(DATA, [1e3 * each for each in of_mode], label=mode, marker="o", **STYLES[mode])
            axes.set(title=f"{name}, TP={TENSOR}, PP={PIPELINE[name]}", ylabel="ms per step")
            axes.set(xscale="log", yscale="log", xticks=DATA, xticklabels=DATA, yticks=TICKS, yticklabels=TICKS)
            times = [1e3 * each for of_mode in of_modes.values() for each in of_mode]
            axes.set_ylim(0.8 * min(times), 1.25 * max(times))
            axes.minorticks_off()
        panels[-1].set_xlabel("data-parallel ranks")
        figure.suptitle(
            "Orthogonalization of one step: modelled, not measured,\n"
            f"at {DEFAULT_RATES.flops / 1e12:g} TFLOP/s, {DEFAULT_RATES.bytes / 1e9:g} GB/s and "
            f"{DEFAULT_RATES.latency * 1e6:g} us a collective"
        )
        for axes in panels:
            pictures.name_ends(axes)
        figure.savefig(picture)


def main() -> None:
    """Print the table, draw the picture."""
    print("| | auto takes | " + " | ".join(MODES) + " |\n|" + "---|" * (len(MODES) + 2))
    seconds: dict[str, dict[TpMode, list[float]]] = {name: {mode: [] for mode in MODES} for name in PIPELINE}
    for name, of_modes in seconds.items():
        for data in DATA:
            made = plans(name, data)
            for mode, plan in made.items():
                of_modes[mode].append(plan_cost(plan, WORK).seconds)
            times = " | ".join(f"{of_mode[-1] * 1e3:.3g}" for of_mode in of_modes.values())
            print(f"| {name}, DP{data} | {chosen(made['auto'])} | {times} |")
    draw(seconds, PICTURE)
    print(f"\n{PICTURE}")


if __name__ == "__main__":
    main()
