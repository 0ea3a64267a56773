"""The command ``megatron-eopt plan``: what a run will do in a step, by the flags of its pretrain command."""

import argparse
import os
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from megatron_eopt.routing import ParamPattern, families, merged, table, write_json
from megatron_eopt.screen import counted, wrapped


class PlannedRun(NamedTuple):
    """What the first rank of each pipeline stage would do."""

    families: list[ParamPattern]  # the manifest, as the run will print it
    ranks: str
    stages: list[str]  # state and plans
    refused: list[str]
    doubtful: list[str]  # refused, unless it is for what a plan does not build
    warned: list[str]


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print a plan; returns the exit status."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU stands in for the run's GPUs
    try:
        planned = planned_run(flags, options.world_size)
    except AssertionError as error:  # by which Megatron refuses flags, often without a word
        failed = traceback.extract_tb(error.__traceback__)[-1].line
        raise ValueError(f"Megatron refuses these flags: {str(error) or failed}") from error
    print(f"{planned.ranks}\n\n{table(planned.families, full=options.full)}")
    for text in dict.fromkeys(planned.stages):
        numbers = [str(number) for number, other in enumerate(planned.stages) if other == text]
        print(f"\n{wrapped(f'The first rank of pipeline stage {", ".join(numbers)}:')}\n\n{text}")
    for start, lines in (
        ("The run will warn", planned.warned),
        ("The run may be refused", planned.doubtful),
        ("The run will be refused", planned.refused),
    ):
        for line in lines:
            print(f"\n{wrapped(f'{start}: {line}')}")
    if options.json is not None:
        write_json(planned.families, options.json)
    return 1 if planned.refused else 0


def planned_run(flags: Sequence[str], world_size: int = 1) -> PlannedRun:
    """Describe and plan the first rank of each pipeline stage."""
    from megatron_eopt.tools.plan.model import described_run

    ranks = [0]
    texts: list[str] = []
    of_stages = []
    infos = []
    warned: list[str] = []
    while len(texts) < len(ranks):
        with described_run(flags, ranks[len(texts)], world_size) as (described, overrides):
            # only now: importing Megatron may need what stands in for a GPU
            from megatron_eopt.tools.plan.foreseen import foreseen
            from megatron_eopt.tools.plan.stages import planned_stage

            ranks = dist.get_process_group_ranks(described.groups.pp)
            rows, text = planned_stage(described, overrides)
            of_stages.append(families(rows))
            texts.append(text)
            infos += [parameter.info for parameter in described.parameters]
            warned += described.warnings()
    args = described.facts.args
    of_all = f"{counted(world_size, 'rank')}, data-parallel size {args.data_parallel_size}"
    manifest = merged(of_stages)
    found = foreseen(described, overrides, manifest, infos)
    warned = list(dict.fromkeys([*warned, *found.warned]))
    return PlannedRun(manifest, of_all, texts, found.refused, found.doubtful, warned)
