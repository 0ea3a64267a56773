"""Predict steps over 8 to 4,096 GPUs, for the tables and the picture of docs/scale.md. Nothing is measured.

``scripts/bench/scale.py`` prints and writes them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pictures
from matplotlib.figure import Figure
from model_matrices import dealt_matrices
from model_sizes import GPUS, MODELS, Parallel
from model_steps import Point, last_that_helps, swept, where_it_stops
from pages import DOCS, markdown

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.rates import Rates
from megatron_eopt.screen import figure

NUMBERS = tuple(8 << doubled for doubled in range(10))
NEWTON_SCHULZ = NewtonSchulz()
WORK = Work(schedule=NEWTON_SCHULZ.schedule, restarts=NEWTON_SCHULZ.restarts, itemsize=2)

RECIPES = DOCS.parent / "examples" / "recipes"
REACHED = 0.4  # of the published operations, in forward and backward passes
ACTIVE = {"llama3-8b": 8.0e9, "llama3-70b": 70.6e9, "qwen3-30b-a3b": 3.3e9, "deepseek-v3": 37e9}  # parameters a token


def in_short(parallel: Parallel) -> str:
    """Sizes such as TP8 PP4."""
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "EP": parallel.expert}
    return " ".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1) or "TP1"


@dataclass(frozen=True)
class Row:
    """A model and how it is laid out, on H100s; its name and color in the picture."""

    model: str
    parallel: Parallel
    name: str
    color: str
    split_gate_up: bool = False

    @property
    def layout(self) -> str:
        """Sizes in short, and whether gate and up are split."""
        return in_short(self.parallel) + ", gate and up split" * self.split_gate_up

    def points(self) -> list[Point]:
        """A point for each number of GPUs that can hold the model."""
        one = self.parallel
        least = one.pipeline * max(one.tensor, one.expert)
        gpus = [number for number in NUMBERS if number >= least]
        rates = GPUS["h100"].rates
        model = replace(MODELS[self.model], split_gate_up=self.split_gate_up)
        return swept(model, one, gpus, WORK, rates)


ROWS = (
    Row("llama3-8b", Parallel(), "8B", "#f97000"),
    Row("llama3-8b", Parallel(tensor=2), "8B, TP2", "#7f4100"),
    Row("llama3-70b", Parallel(tensor=8, pipeline=4), "70B", "#d1361b"),
    Row("llama3.1-405b", Parallel(tensor=8, pipeline=16), "405B", "#cd00cf"),
    Row("qwen3-30b-a3b", Parallel(expert=8), "Qwen3 30B-A3B", "#5ca265"),
    Row("deepseek-v3", Parallel(expert=32, pipeline=8), "DeepSeek-V3", "#0036b4"),
    Row("deepseek-v3", Parallel(expert=32, pipeline=8), "V3, split", "#4f92f7", split_gate_up=True),
    Row("kimi-k2", Parallel(expert=32, pipeline=16), "Kimi-K2", "#000000"),
)


@cache
def all_points() -> Mapping[Row, Sequence[Point]]:
    """The points of each row, for tables and picture."""
    return {row: row.points() for row in ROWS}


def steps(found: Mapping[Row, Sequence[Point]]) -> str:
    """Milliseconds of a step by number of GPUs."""
    head = ["model", "layout", *(f"{number:,}" for number in NUMBERS)]
    rows = []
    for row, points in found.items():
        times = {point.gpus: figure(point.stage.seconds * 1e3) for point in points}
        rows.append([row.model, row.layout, *(times.get(number, "") for number in NUMBERS)])
    return markdown(head, rows)


def limits() -> str:
    """Where more GPUs stop to help, and what a GPU holds there."""
    head = ["model", "layout", "GPUs", "step", "if shared evenly", "gather", "parameters", "gradients", "state"]
    head += ["temporaries"]
    rows = []
    for row, points in all_points().items():
        last = last_that_helps(points) or points[-1]
        times = [f"{figure(each * 1e3)} ms" for each in (last.stage.seconds, last.stage.mean, last.gather)]
        memory = [f"{each / 1e9:.1f} GB" for each in last.memory]
        rows.append([row.model, row.layout, f"{last.gpus:,}", *times, *memory])
    return markdown(head, rows)


def reasons() -> str:
    """What stops each model that stops, a line each."""
    lines = []
    for row, points in all_points().items():
        last = last_that_helps(points)
        if last is not None:
            lines.append(f"- {row.model}, {row.layout}: {where_it_stops(last, WORK, GPUS['h100'].rates)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Published:
    """What NVIDIA measured of Muon on GB300, in TFLOP/s of a GPU: the model's with AdamW and with Muon, and Muon's."""

    model: str
    parallel: Parallel
    adamw: int
    muon: int
    of_muon: int


# https://developer.nvidia.com/blog/advancing-emerging-optimizers-for-accelerated-llm-training-with-nvidia-megatron/
PUBLISHED = (
    Published("kimi-k2", Parallel(expert=64, pipeline=4, data=64), 1051, 1029, 51),
    Published("qwen3-30b-a3b", Parallel(expert=8, data=8), 713, 686, 35),
)


def newton_schulz_flops(model: str) -> float:
    """Operations of five steps for all matrices, each product counted whole."""
    matrices = dealt_matrices(MODELS[model], Parallel(), WORK).matrices
    sides = (sorted(matrix.shape) for matrix in matrices)
    return sum(5 * (4 * short**2 * long + 2 * short**3) for short, long in sides)


def beside_published(rates: Rates = GPUS["gb300"].rates) -> str:
    """What Muon adds to an iteration, as measured by others, and our step as modelled."""
    head = [
        "model",
        "GB300",
        "layout",
        "iteration, from their figures",
        "of which Muon adds to AdamW",
        "our step, modelled",
    ]
    rows = []
    for one in PUBLISHED:
        gpus = one.parallel.pipeline * one.parallel.data
        iteration = newton_schulz_flops(one.model) / gpus / (one.of_muon * 1e12)
        added = iteration * (1 - one.muon / one.adamw)
        ours = dealt_matrices(MODELS[one.model], one.parallel, WORK, "auto", rates).seconds
        cells = (f"{iteration:.2f} s", f"{added * 1e3:.0f} ms", f"{ours * 1e3:.0f} ms")
        rows.append([one.model, str(gpus), in_short(one.parallel), *cells])
    return markdown(head, rows)


def flags_of(recipe: Path) -> dict[str, str]:
    """Values of the flags of a recipe."""
    lines = (line.partition("#")[0].split() for line in recipe.read_text(encoding="utf-8").splitlines())
    return dict(line for line in lines if len(line) == 2)


@dataclass(frozen=True)
class Recipe:
    """A file of flags, and the run that it makes."""

    file: Path
    model: str
    parallel: Parallel
    gpus: int
    tokens: int  # of a step

    def at(self, gpus: int) -> tuple[Point, float]:
        """A step on so many GPUs, and seconds of its iteration."""
        (point,) = swept(MODELS[self.model], self.parallel, [gpus], WORK, GPUS["h100"].rates)
        return point, 6 * ACTIVE[self.model] * self.tokens / gpus / (REACHED * GPUS["h100"].flops)


def all_recipes() -> list[Recipe]:
    """The recipes of examples."""
    found = []
    for model in ACTIVE:
        file = RECIPES / f"{model}.flags"
        gpus = int(re.findall(r"on (\d+) GPUs", file.read_text(encoding="utf-8"))[0])
        flags = flags_of(file)
        sizes = {name: int(flags.get(f"--{name}-model-parallel-size", 1)) for name in ("tensor", "pipeline", "expert")}
        tokens = int(flags["--global-batch-size"]) * int(flags["--seq-length"])
        found.append(Recipe(file, model, Parallel(**sizes), gpus, tokens))
    return found


def recipes() -> str:
    """What the recipes take: share of the optimizer, and memory."""
    rows = []
    for recipe in all_recipes():
        point, iteration = recipe.at(recipe.gpus)
        step, layout = point.stage.seconds, in_short(recipe.parallel)
        cells = [f"{recipe.tokens / 1e6:.1f} million", f"{iteration:.1f} s", f"{figure(step * 1e3)} ms"]
        share, memory = f"{100 * step / iteration:.1f} %", f"{sum(point.memory) / 1e9:.0f} GB"
        rows.append([f"`{recipe.file.name}`", f"{recipe.gpus:,}", layout, *cells, share, memory])
    head = ["recipe", "GPUs", "layout", "tokens of a step", "iteration", "of which Muon", "share", "memory of a GPU"]
    return markdown(head, rows)


# the tables of the page, by their names there
TABLES: dict[str, Callable[[], str]] = {
    "steps": lambda: steps(all_points()),
    "limits": limits,
    "reasons": reasons,
    "recipes": recipes,
    "published": beside_published,
}


def draw(picture: Path = DOCS / "scale.png") -> None:
    """Draw a line for each model."""
    found = all_points()
    with pictures.look():
        drawn = Figure(figsize=(pictures.WIDTH, 4.2))
        axes = drawn.subplots()
        for row, points in found.items():
            style = "--" if row.split_gate_up else "-"
            gpus, ms = [x.gpus for x in points], [x.stage.seconds * 1e3 for x in points]
            axes.plot(gpus, ms, style, label=row.name, color=row.color, marker="o", markersize=3)
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms per step")
        axes.set_xticks(NUMBERS[::3], [f"{number:,}" for number in NUMBERS[::3]])
        ticks = (1, 3, 10, 30, 100, 300, 1000)
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        drawn.suptitle("A step of Muon on H100s: modelled, not measured")
        pictures.name_ends(axes)
        drawn.savefig(picture)
