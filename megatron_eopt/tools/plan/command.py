"""The command ``megatron-eopt plan``: the cost of a step.

``plan --model llama3-70b --tensor-model-parallel-size 8`` takes a model, or its sizes by Megatron's flags.
``plan -- FLAGS`` takes the flags of a pretrain command, and also says which optimizer each parameter will have.
"""

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_eopt.family import DEFAULT_TP_MODE
from megatron_eopt.from_config import workspace_from
from megatron_eopt.orthogonalize.choices import listing
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.explain import explain
from megatron_eopt.parallel.rates import DEFAULT_RATES, Rates
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.routing import table, write_json
from megatron_eopt.screen import aligned, figure, megabytes, wrapped
from megatron_eopt.tools.plan.given import gpus_of, model_of, parallel_of
from megatron_eopt.tools.plan.sizes import GPUS, Model, Parallel
from megatron_eopt.tools.plan.sweep import Point, point_of, swept, where_it_stops
from megatron_eopt.tools.plan.sweep import table as swept_table

if TYPE_CHECKING:
    from megatron_eopt.tools.plan.described import PlannedRun

_OF_POINTS = """step: of the busiest rank, with 10 ps an entry for momentum, decay and update.
mean: of all ranks, if the work were shared evenly.
gather: of bf16 parameters to all data-parallel ranks, at the same bandwidth;
between nodes it takes as much longer as their network is slower.
state: a momentum and a copy of the parameters, in fp32.
Embeddings, output layer and activations are not counted."""

_OF_STAGES = """state: with fp32 copies of bf16 parameters; of whole parameters that are dealt
to data-parallel ranks, what the fullest rank holds at most.
Activations are not counted. Matrices are those of all ranks of a stage."""


def run(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    """Print a plan; returns the exit status."""
    if flags is not None:
        return _print_planned_run(options, flags)
    model = model_of(options)
    parallel = parallel_of(options)
    given: dict[str, Any] = {"steps": options.muon_num_ns_steps, "coefficient_type": options.muon_coefficient_type}
    iteration = NewtonSchulz(**{name: value for name, value in given.items() if value is not None})
    work = Work(
        schedule=iteration.schedule,
        restarts=iteration.restarts,
        share=1.0 if options.dense else 0.5,
        itemsize=options.exchange_itemsize,
    )
    mode = options.muon_tp_mode or DEFAULT_TP_MODE
    rates = _rates(options)
    workspace = Workspace(bytes=workspace_from(options)["workspace"])
    if options.sweep_gpus is None:
        point = point_of(model, parallel, work, mode, rates, workspace)
        points = [point]
        print(explain(point.plan, work, rates, workspace))
        for deal in point.stage.deals:
            print(f"\n{wrapped(f'{deal}.')}")
        print(f"\n{swept_table(points)}\n\n{_OF_POINTS}")
    else:
        gpus = gpus_of(options, parallel)
        points = swept(model, parallel, gpus, work, mode, rates, workspace)
        print(f"{swept_table(points)}\n\n{wrapped(where_it_stops(points, work, mode, rates))}\n")
        print(
            f"Modelled at {rates.flops / 1e12:,.4g} TFLOP/s and {rates.bytes / 1e9:,.4g} GB/s, nothing overlapped.\n"
            f"{_OF_POINTS}"
        )
    _print_notes(options.gpu, model, parallel, points)
    return 0


def _print_notes(gpu: str | None, model: Model, parallel: Parallel, points: Sequence[Point]) -> None:
    if gpu is not None:
        memory = GPUS[gpu].memory
        full = [f"{point.gpus:,}" for point in points if sum(point.memory) > memory]
        if full:
            gpus = "GPU" if full == ["1"] else "GPUs"
            more = f"with {', '.join(full)} {gpus} that is more memory than the {memory / 1e9:.0f} GB of one {gpu}."
            print(f"\n{wrapped(f'note: {more}')}")
    if model.num_layers % parallel.pipeline:
        uneven = (
            f"note: {model.num_layers} layers are not shared equally by {parallel.pipeline} pipeline stages. This is "
            f"the plan of a longest stage of {-(-model.num_layers // parallel.pipeline)}. Megatron takes "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers for that."
        )
        print(f"\n{wrapped(uneven)}")


def _print_planned_run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU stands in for the run's GPUs
    from megatron_eopt.tools.plan.described import planned_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of missing packages
        run = planned_run(flags, options.world_size)
    _print_run(run, options.full)
    if options.json is not None:
        write_json(run.families, options.json)
    return 1 if run.problems else 0


def _print_run(run: "PlannedRun", full: bool) -> None:
    print(f"{wrapped(run.layout)}\n\n{table(run.families, full=full)}")
    head = ("pipeline stage", "matrices", "parameters MB", "gradients MB", "state MB", "temporaries MB", "all MB")
    lines = []
    for number, (matrices, memory) in enumerate(run.stages):
        temporaries = "-" if run.uncounted and not memory.temporaries else megabytes(memory.temporaries)
        others = map(megabytes, memory[:3])
        lines.append([str(number), f"{matrices:,}", *others, temporaries, megabytes(sum(memory))])
    print("\nmemory of each GPU:", *aligned(head, lines, head), sep="\n")
    print(_OF_STAGES)
    if run.explained:
        slowest = f"in pipeline stage {run.slowest}: {figure(run.seconds * 1e3)} ms on its busiest rank."
        print(f"\n{wrapped(f'A step takes the longest {slowest}')}")
        print("That is 10 ps an entry for momentum, decay and update, and what this rank\northogonalizes:")
    for explained in run.explained:
        print(f"\n{explained if '\n' in explained else wrapped(explained)}")
    if run.uncounted:
        names = listing(run.uncounted, "and")
        print(f"\n{wrapped(f'Work and temporaries of {names} are not counted: there is no plan for them.')}")
    for kind, messages in (("warning", run.warnings), ("note", run.notes), ("problem", run.problems)):
        for message in messages:
            print(f"\n{wrapped(f'{kind}: {message}')}")


def _rates(options: argparse.Namespace) -> Rates:
    rates = DEFAULT_RATES if options.gpu is None else GPUS[options.gpu].rates
    if options.tflops is not None:
        rates = replace(rates, flops=options.tflops * 1e12)
    if options.bandwidth is not None:
        rates = replace(rates, bytes=options.bandwidth * 1e9)
    return replace(rates, latency=options.latency * 1e-6)
