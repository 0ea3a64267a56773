"""A step over ever more GPUs, and where more of them no longer help."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_eopt.parallel.cost import Rates, Work, plan_cost, step_bytes, whole_flops
from megatron_eopt.parallel.explain import figure
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.records import Plan, TpMode
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.plan.models import Model, Parallel, Stage, dealt_matrices
from megatron_eopt.routing.text import aligned, megabytes

HELPS = 0.95  # of the time of half as many GPUs: more of it is no help

_HEAD = [
    *("GPUs", "data- parallel", "step ms", "mean ms", "step / mean", "gather ms", "sent MB"),
    *("parameters MB", "gradients MB", "state MB", "temporaries MB"),
]


@dataclass(frozen=True)
class Point:
    """A number of GPUs, and what a step takes there."""

    gpus: int
    data: int  # data-parallel ranks
    stage: Stage
    sent: int  # bytes of the busiest rank, to orthogonalize
    gather: float  # seconds in which bf16 parameters come to all data-parallel ranks
    memory: tuple[int, int, int, int]  # bytes of parameters, gradients, state and temporaries

    @property
    def cells(self) -> list[str]:
        """A line of the table."""
        times = [figure(each * 1e3) for each in (self.stage.seconds, self.stage.mean)]
        sizes = [megabytes(each) for each in (self.sent, *self.memory)]
        ratio = f"{self.stage.seconds / self.stage.mean:.1f}"
        return [f"{self.gpus:,}", f"{self.data:,}", *times, ratio, figure(self.gather * 1e3), *sizes]


def numbers_of(text: str, model_parallel: int) -> list[int]:
    """Numbers of GPUs from the first to the last, each twice the one before.

    Args:
        text: the first and the last, as in ``8..4096``.
        model_parallel: GPUs that hold the model once; numbers that are no multiple are left out.

    Raises:
        ValueError: for another text, and if no number is left.
    """
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ValueError(f"--sweep-gpus takes the first and the last number of GPUs, as in 8..4096, got {text!r}")
    doubled = [int(first) << k for k in range(int(last).bit_length()) if int(first) << k <= int(last)]
    if not (found := [number for number in doubled if not number % model_parallel]):
        raise ValueError(
            f"--sweep-gpus {text}: the parallel sizes take a multiple of {model_parallel} GPUs, and none of "
            f"{', '.join(map(str, doubled))} is one"
        )
    return found


def point_of(stage: Stage, plan: Plan, gpus: int, data: int, work: Work, rates: Rates, workspace: Workspace) -> Point:
    """What a step takes where a plan is that of a stage's busiest rank."""
    memory = *stage.memory, step_bytes(plan, work, workspace)
    sent, gather = plan_cost(plan, work, rates).bytes, 2 * stage.gathered / rates.bytes
    return Point(gpus, data, stage, sent, gather, memory)


def swept(
    model: Model,
    parallel: Parallel,
    gpus: Sequence[int],
    work: Work,
    mode: TpMode,
    rates: Rates,
    workspace: Workspace,
    *,
    split_gate_up: bool = False,
) -> list[Point]:
    """A point for each number of GPUs, whose data parallelism follows from it."""
    points = []
    for number in gpus:
        data = number // (parallel.tensor * parallel.pipeline)
        here = replace(parallel, data=data)
        stage = dealt_matrices(model, here, work, mode, rates, split_gate_up=split_gate_up)
        plan = make_plan(stage.matrices, mode, work, rates, workspace=workspace)
        points.append(point_of(stage, plan, number, data, work, rates, workspace))
    return points


def last_that_helps(points: Sequence[Point]) -> Point | None:
    """The number of GPUs beyond which a step gets no faster."""
    pairs = pairwise(points)
    return next((a for a, b in pairs if b.stage.seconds > HELPS * a.stage.seconds), None)


def table(points: Sequence[Point]) -> str:
    """The points as lines of text."""
    return "\n".join(aligned(_HEAD, [point.cells for point in points], _HEAD))


def where_it_stops(points: Sequence[Point], work: Work, mode: TpMode, rates: Rates) -> str:
    """Where more GPUs no longer help, and because of what."""
    if len(points) == 1:
        return "Where more GPUs stop to help can be said of two numbers of GPUs or more."
    if (last := last_that_helps(points)) is None:
        return f"Up to {points[-1].gpus:,} GPUs more of them make the step faster."
    longest = max(last.stage.matrices, key=lambda matrix: whole_flops(matrix.shape, work))
    (rows, cols), alone = longest.shape, plan_cost(make_plan([longest], mode, work, rates), work, rates).seconds
    beyond = f"More than {last.gpus:,} GPUs hardly make the step faster"
    if alone < last.stage.seconds / 2:  # such as logical matrices of one parameter, or dense ones beside experts
        return f"{beyond}: what the busiest rank then has is one parameter, or one of a kind."
    return (
        f"{beyond}: {longest.name}, {rows} x {cols}, is the work of one data-parallel rank and takes "
        f"{figure(alone * 1e3)} ms."
    )


def draw(points: Sequence[Point], file: str) -> None:
    """Draw times over numbers of GPUs; ``ValueError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, StrMethodFormatter
    except ImportError as error:
        raise ValueError(f"pictures are drawn by matplotlib: pip install matplotlib ({error})") from error
    drawn = Figure(figsize=(6.4, 4), layout="constrained")
    axes = drawn.add_subplot()
    gpus = [point.gpus for point in points]
    for label, style, seconds in (
        ("step of the busiest rank", "-", [point.stage.seconds for point in points]),
        ("if the work were shared evenly", ":", [point.stage.mean for point in points]),
        ("gather of the parameters", "--", [point.gather for point in points]),
    ):
        ms = [each * 1e3 or math.nan for each in seconds]  # one replica gathers nothing
        axes.plot(gpus, ms, style, label=label, marker="o", markersize=3)
    if (last := last_that_helps(points)) is not None:
        axes.axvline(last.gpus, color="0.7", linewidth=1)
        axes.annotate("more hardly help", (last.gpus, 0.02), xycoords=("data", "axes fraction"), ha="left", va="bottom")
    axes.set(xlabel="GPUs", ylabel="ms, modelled", xscale="log", yscale="log")
    axes.set_xticks(gpus, [f"{each:,}" for each in gpus])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    drawn.savefig(file, dpi=140)
