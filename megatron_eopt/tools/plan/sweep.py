"""A step over ever more GPUs, and where more of them no longer help."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_eopt.parallel.cost import Work, plan_cost, step_bytes, whole_flops
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.rates import Rates
from megatron_eopt.parallel.records import Plan, TpMode
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.screen import aligned, counted, figure, megabytes
from megatron_eopt.tools.plan.models import Stage, dealt_matrices
from megatron_eopt.tools.plan.sizes import Model, Parallel

HELPS = 0.95  # of the time of half as many GPUs: more of it is no help

_HEAD = [
    "GPUs",
    "data- parallel",
    "step ms",
    "step / mean",
    "gather ms",
    "sent MB",
    "parameters, gradients MB",
    "state MB",
    "temporaries MB",
]


@dataclass(frozen=True)
class Point:
    """A number of GPUs, and what a step takes there."""

    gpus: int
    data: int  # data-parallel ranks
    stage: Stage
    plan: Plan  # of the busiest rank
    sent: int  # bytes of the busiest rank, to orthogonalize
    gather: float  # seconds in which bf16 parameters come to all data-parallel ranks
    memory: tuple[int, int, int, int]  # bytes of parameters, gradients, state and temporaries

    @property
    def cells(self) -> list[str]:
        """A line of the table."""
        parameters, gradients, state, temporaries = self.memory
        return [
            f"{self.gpus:,}",
            f"{self.data:,}",
            figure(self.stage.seconds * 1e3),
            f"{self.stage.seconds / self.stage.mean:.1f}",
            figure(self.gather * 1e3),
            megabytes(self.sent),
            megabytes(parameters + gradients),
            megabytes(state),
            megabytes(temporaries),
        ]


def point_of(model: Model, parallel: Parallel, work: Work, mode: TpMode, rates: Rates, workspace: Workspace) -> Point:
    """What a step takes on so many ranks."""
    stage = dealt_matrices(model, parallel, work, mode, rates)
    plan = make_plan(stage.matrices, mode, work, rates, workspace=workspace)
    return Point(
        gpus=parallel.tensor * parallel.pipeline * parallel.data,
        data=parallel.data,
        stage=stage,
        plan=plan,
        sent=plan_cost(plan, work, rates).bytes,
        gather=2 * stage.gathered / rates.bytes,
        memory=(*stage.memory, step_bytes(plan, work, workspace)),
    )


def swept(
    model: Model,
    parallel: Parallel,
    gpus: Sequence[int],
    work: Work,
    mode: TpMode,
    rates: Rates,
    workspace: Workspace,
) -> list[Point]:
    """A point for each number of GPUs, whose data parallelism follows from it."""
    points = []
    for number in gpus:
        data = number // (parallel.tensor * parallel.pipeline)
        points.append(point_of(model, replace(parallel, data=data), work, mode, rates, workspace))
    return points


def last_that_helps(points: Sequence[Point]) -> Point | None:
    """The number of GPUs beyond which a step gets no faster."""
    for fewer, more in pairwise(points):
        if more.stage.seconds > HELPS * fewer.stage.seconds:
            return fewer
    return None


def table(points: Sequence[Point]) -> str:
    """The points as lines of text."""
    return "\n".join(aligned(_HEAD, [point.cells for point in points], _HEAD))


def where_it_stops(points: Sequence[Point], work: Work, mode: TpMode, rates: Rates) -> str:
    """Where more GPUs no longer help, and because of what."""
    if len(points) == 1:
        return "Where more GPUs stop to help can be said of two numbers of GPUs or more."
    last = last_that_helps(points)
    if last is None:
        return f"Up to {points[-1].gpus:,} GPUs more of them make the step faster."
    longest = max(last.stage.matrices, key=lambda matrix: whole_flops(matrix.shape, work))
    alone = plan_cost(make_plan([longest], mode, work, rates), work, rates)
    rows, cols = longest.shape
    return (
        f"More than {counted(last.gpus, 'GPU')} hardly make the step faster: {longest.name}, {rows} x {cols}, is the "
        f"work of one data-parallel rank and takes {figure(alone.seconds * 1e3)} ms."
    )
