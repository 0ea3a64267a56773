"""The command ``megatron-eopt plan``: what a run will do in a step, by the flags of its pretrain command."""

import argparse
import os
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
    idle: list[str]  # what the run will refuse: typed flags without effect


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print a plan; returns the exit status."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU stands in for the run's GPUs
    planned = planned_run(flags, options.world_size)
    print(f"{planned.ranks}\n\n{table(planned.families, full=options.full)}")
    for text in dict.fromkeys(planned.stages):
        numbers = [str(number) for number, other in enumerate(planned.stages) if other == text]
        print(f"\n{wrapped(f'The first rank of pipeline stage {", ".join(numbers)}:')}\n\n{text}")
    for line in planned.idle:
        print(f"\n{wrapped(f'The run will be refused: {line}')}")
    if options.json is not None:
        write_json(planned.families, options.json)
    return 1 if planned.idle else 0


def planned_run(flags: Sequence[str], world_size: int = 1) -> PlannedRun:
    """Describe and plan the first rank of each pipeline stage."""
    from megatron_eopt.tools.plan.model import described_run

    ranks = [0]
    texts: list[str] = []
    of_stages = []
    while len(texts) < len(ranks):
        with described_run(flags, ranks[len(texts)], world_size) as (described, overrides):
            # only now: importing Megatron may need what stands in for a GPU
            from megatron_eopt.megatron.given import idle_flags
            from megatron_eopt.tools.plan.stages import planned_stage

            ranks = dist.get_process_group_ranks(described.groups.pp)
            rows, text = planned_stage(described, overrides)
            of_stages.append(families(rows))
            texts.append(text)
    args = described.facts.args
    of_all = f"{counted(world_size, 'rank')}, data-parallel size {args.data_parallel_size}"
    manifest = merged(of_stages)
    names = {family.like.optimizer for family in manifest if family.like.optimizer}
    idle = idle_flags(described.config, args, names)
    return PlannedRun(manifest, of_all, texts, idle)
