"""What a run would do, described from its flags."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_eopt.registry import takes_matrices
from megatron_eopt.routing import ParamPattern, families, merged, problems, warnings
from megatron_eopt.tools.plan.described.model import Memory, PlannedStage, described_run, ranks_to_describe


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is one."""

    families: list[ParamPattern]  # the manifest, as the run will print it
    explained: list[str]  # the plan of each optimizer in the busiest stage, as a table, and deals
    uncounted: list[str]  # classes of optimizers whose work and temporaries are not counted
    busiest: int  # that stage
    operations: float  # of a step of its busiest rank
    layout: str  # numbers of ranks
    stages: list[tuple[int, Memory]]  # of each pipeline stage its matrices on all ranks, and what a rank holds
    problems: list[str]  # what the run will end on at its start
    warnings: list[str]
    notes: tuple[str, ...]  # on the names of parameters


def planned_run(flags: Sequence[str], world_size: int | None) -> PlannedRun:
    """Describe and plan the first rank of each pipeline stage.

    A ValueError is for flags that Megatron or an optimizer refuses, and for an optimizer that Megatron builds alone.
    """
    ranks = [0]
    stages: list[PlannedStage] = []
    while len(stages) < len(ranks):
        with described_run(flags, ranks[len(stages)], world_size) as run:
            # only now: importing Megatron may need what stands in for a GPU
            from megatron_eopt.megatron.given import idle_flags, idle_settings, warnings_of
            from megatron_eopt.tools.plan.described.arguments import problems_of_training, sizes
            from megatron_eopt.tools.plan.described.optimizers import planned_stage, refuse_unmatched

            if not stages:
                ranks = ranks_to_describe(run.args)
                name = run.args.optimizer.removeprefix("dist_")
                of_training = problems_of_training(run.args)
                noted = warnings_of(run.optimizer_config, run.args)
            stages.append(planned_stage(run))
            if len(stages) == len(ranks):
                refuse_unmatched(run, stages)
        if len(ranks) > 1:
            print(f"{len(stages)} of {len(ranks)} pipeline stages planned", file=sys.stderr, flush=True)
    rows = []
    matrices = []
    for stage in stages:
        rows += stage.rows
        matrices.append(sum(len(row.matrices) for rank in stage.rows for row in rank))
    together = merged(map(families, rows))
    names = {family.like.optimizer for family in together if family.like.optimizer is not None}
    given = (run.optimizer_config, run.args, names)
    busiest = max(stages, key=lambda stage: (stage.operations, bool(stage.explained)))
    return PlannedRun(
        families=together,
        explained=busiest.explained,
        uncounted=sorted(set[str]().union(*(stage.uncounted for stage in stages))),
        busiest=stages.index(busiest),
        operations=busiest.operations,
        layout=sizes(run.args),
        stages=list(zip(matrices, [stage.memory for stage in stages], strict=True)),
        problems=[*problems(together, name, takes_matrices(name)), *idle_flags(*given), *of_training],
        warnings=[*idle_settings(*given), *noted, *warnings(together, stages[0].scale_mode)],
        notes=run.notes,
    )
