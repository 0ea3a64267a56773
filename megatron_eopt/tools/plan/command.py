"""The command ``megatron-eopt plan``: what a run will do in a step, by the flags of its pretrain command."""

import argparse
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_eopt.orthogonalize.choices import listing
from megatron_eopt.routing import table, write_json
from megatron_eopt.screen import aligned, megabytes, wrapped

if TYPE_CHECKING:
    from megatron_eopt.tools.plan.described import PlannedRun

_OF_STAGES = """state: with fp32 copies of bf16 parameters; of whole parameters that are dealt
to data-parallel ranks, what the fullest rank holds at most.
Activations are not counted. Matrices are those of all ranks of a stage."""


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print a plan; returns the exit status."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU stands in for the run's GPUs
    from megatron_eopt.tools.plan.described import planned_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of missing packages
        planned = planned_run(flags, options.world_size)
    _print_run(planned, options.full)
    if options.json is not None:
        write_json(planned.families, options.json)
    return 1 if planned.problems else 0


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
        print(f"\nThe busiest is pipeline stage {run.busiest}. What its busiest rank orthogonalizes:")
    for explained in run.explained:
        print(f"\n{explained if '\n' in explained else wrapped(explained)}")
    if run.uncounted:
        names = listing(run.uncounted, "and")
        print(f"\n{wrapped(f'Work and temporaries of {names} are not counted: there is no plan for them.')}")
    for kind, messages in (("warning", run.warnings), ("note", run.notes), ("problem", run.problems)):
        for message in messages:
            print(f"\n{wrapped(f'{kind}: {message}')}")
