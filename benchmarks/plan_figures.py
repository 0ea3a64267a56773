"""Draw what plans are predicted to cost for Llama-3 8B and 70B, and print the tables of docs/planning.md.

Nothing is measured: these are the predictions of the planner at its default rates, for the data-parallel rank with the
most to do. ``.venv/bin/python benchmarks/plan_figures.py`` writes docs/planning.png.
"""

from pathlib import Path
from typing import get_args

import matplotlib

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Cost, Work, plan_cost
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.records import Plan, TpMode
from megatron_eopt.plan.models import MODELS, Parallel, dealt_matrices

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "planning.png"
TENSOR, DATA = 8, (4, 16, 64)
PIPELINE = {"llama3-8b": 1, "llama3-70b": 4}
DEALT = (8, 16, 32, 64)
RUNS = (
    ("llama3-8b", {"tensor": 8}),
    ("llama3-70b", {"tensor": 8, "pipeline": 4}),
    ("qwen3-30b-a3b", {"expert": 8, "pipeline": 2}),
    ("qwen3-30b-a3b", {"tensor": 4, "expert": 8, "pipeline": 2}),
)
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MODES: tuple[TpMode, ...] = ("auto", *(mode for mode in get_args(TpMode) if mode != "auto"))
NEWTON_SCHULZ = NewtonSchulz()
WORK = Work(schedule=NEWTON_SCHULZ.schedule, restarts=NEWTON_SCHULZ.restarts, itemsize=2)


def plans(name: str, data: int) -> dict[TpMode, Plan]:
    """The plan of every mode."""
    parallel = Parallel(tensor=TENSOR, pipeline=PIPELINE[name], data=data)
    matrices = dealt_matrices(MODELS[name], parallel, WORK)[0]
    return {mode: make_plan(matrices, mode, WORK) for mode in MODES}


def chosen(plan: Plan) -> str:
    """How many matrices each scheme has, in words."""
    counts: dict[str, int] = {}
    for bucket in plan.buckets:
        counts[bucket.scheme] = counts.get(bucket.scheme, 0) + len(bucket.matrices)
    return ", ".join(f"{count} {scheme}" for scheme, count in counts.items())


def busiest(name: str, data: int, **parallel: int) -> str:
    """Milliseconds of the busiest data-parallel rank, by size and by time: of dense parameters, then of experts."""
    _, deals = dealt_matrices(MODELS[name], Parallel(data=data, **parallel), WORK)
    found = (tuple(f"{max(each) * 1e3:.3g}" for each in (deal.by_size, deal.seconds)) for deal in deals)
    return ", ".join(f"{before} → {after}" for before, after in found)


def main() -> None:
    """Print the tables, draw the picture."""
    print("| | " + " | ".join(f"DP{data}" for data in DEALT) + " |\n|" + "---|" * (len(DEALT) + 1))
    for name, parallel in RUNS:
        sizes = ", ".join(f"{kind} {size}" for kind, size in parallel.items())
        print(f"| {name}, {sizes} | " + " | ".join(busiest(name, data, **parallel) for data in DEALT) + " |")
    print()
    figure, axes = plt.subplots(1, len(PIPELINE), figsize=(11, 4))
    print("| | auto takes | " + " | ".join(MODES) + " |\n|" + "---|" * (len(MODES) + 2))
    for axis, (name, pipeline) in zip(axes, PIPELINE.items(), strict=True):
        costs: dict[TpMode, list[Cost]] = {mode: [] for mode in MODES}
        for data in DATA:
            made = plans(name, data)
            for mode, plan in made.items():
                costs[mode].append(plan_cost(plan, WORK))
            times = " | ".join(f"{of_mode[-1].seconds * 1e3:.3g}" for of_mode in costs.values())
            print(f"| {name}, DP{data} | {chosen(made['auto'])} | {times} |")
        for mode, of_mode in costs.items():
            style = {"color": "black", "linewidth": 2.5} if mode == "auto" else {"linestyle": "--"}
            axis.plot(DATA, [cost.seconds * 1e3 for cost in of_mode], marker="o", label=mode, **style)
        axis.set(title=f"{name}, TP{TENSOR} PP{pipeline}", xlabel="data-parallel ranks", ylabel="predicted ms per step")
        axis.set(xscale="log", yscale="log", xticks=DATA, xticklabels=DATA, yticks=TICKS, yticklabels=TICKS)
        times_of_all = [cost.seconds * 1e3 for of_mode in costs.values() for cost in of_mode]
        axis.set_ylim(0.8 * min(times_of_all), 1.25 * max(times_of_all))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)
    print(f"\n{PICTURE}")


if __name__ == "__main__":
    main()
