"""A step over ever more GPUs, and where more of them no longer help. Nothing is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from model_matrices import Stage, dealt_matrices
from model_sizes import Model, Parallel

from megatron_eopt.parallel.cost import Work, plan_cost, step_bytes, whole_flops
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.rates import Rates
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE
from megatron_eopt.screen import counted, figure

HELPS = 0.95  # of the time of half as many GPUs: more of it is no help


@dataclass(frozen=True)
class Point:
    """A number of GPUs, and what a step takes there."""

    gpus: int
    stage: Stage
    gather: float  # seconds in which bf16 parameters come to all data-parallel ranks
    memory: tuple[int, int, int, int]  # bytes of parameters, gradients, state and temporaries


def swept(model: Model, parallel: Parallel, gpus: Sequence[int], work: Work, rates: Rates) -> list[Point]:
    """A point for each number of GPUs, whose data parallelism follows from it."""
    points = []
    for number in gpus:
        data = number // (parallel.tensor * parallel.pipeline)
        stage = dealt_matrices(model, replace(parallel, data=data), work, "auto", rates)
        plan = make_plan(stage.matrices, "auto", work, rates, workspace=DEFAULT_WORKSPACE)
        temporaries = step_bytes(plan, work, DEFAULT_WORKSPACE)
        gather = 2 * stage.gathered / rates.bytes
        points.append(Point(number, stage, gather, (*stage.memory, temporaries)))
    return points


def last_that_helps(points: Sequence[Point]) -> Point | None:
    """The number of GPUs beyond which a step gets no faster."""
    for fewer, more in pairwise(points):
        if more.stage.seconds > HELPS * fewer.stage.seconds:
            return fewer
    return None


def where_it_stops(last: Point, work: Work, rates: Rates) -> str:
    """Where more GPUs no longer help, and because of what."""
    longest = max(last.stage.matrices, key=lambda matrix: whole_flops(matrix.shape, work))
    alone = plan_cost(make_plan([longest], "auto", work, rates), work, rates)
    rows, cols = longest.shape
    return (
        f"More than {counted(last.gpus, 'GPU')} hardly make the step faster: {longest.name}, {rows} x {cols}, is the "
        f"work of one data-parallel rank and takes {figure(alone.seconds * 1e3)} ms."
    )
