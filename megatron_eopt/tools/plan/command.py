"""The command ``megatron-eopt plan``: what a run will do in a step, by the flags of its pretrain command."""

import argparse
import os
import warnings
from collections.abc import Sequence

from megatron_eopt.routing import table, write_json
from megatron_eopt.screen import wrapped


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print a plan; returns the exit status."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU stands in for the run's GPUs
    from megatron_eopt.tools.plan.described import planned_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of missing packages
        planned = planned_run(flags, options.world_size)
    print(f"{planned.ranks}\n\n{table(planned.families, full=options.full)}")
    numbers_of: dict[str, list[str]] = {}
    for number, text in enumerate(planned.stages):
        numbers_of.setdefault(text, []).append(str(number))
    for text, numbers in numbers_of.items():
        print(f"\n{wrapped(f'The first rank of pipeline stage {", ".join(numbers)}:')}\n\n{text}")
    for kind, messages in (("warning", planned.warnings), ("note", planned.notes), ("problem", planned.problems)):
        for message in messages:
            print(f"\n{wrapped(f'{kind}: {message}')}")
    if options.json is not None:
        write_json(planned.families, options.json)
    return 1 if planned.problems else 0
