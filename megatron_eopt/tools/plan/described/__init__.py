"""What a run would do, described from its flags."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_eopt.registry import takes_matrices
from megatron_eopt.routing import OverrideError, ParamPattern, families, merged, problems, warnings
from megatron_eopt.tools.plan.described.model import Memory, PlannedStage, described_run, ranks_to_describe


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is one."""

    families: list[ParamPattern]  # the manifest, as the run will print it
    explained: list[str]  # the plan of each optimizer in the slowest stage, as a table, and deals
    slowest: int  # that stage
    seconds: float  # predicted of its step
    layout: str  # numbers of ranks
    stages: list[tuple[int, Memory]]  # of each pipeline stage its matrices on all ranks, and what a rank holds
    problems: list[str]  # what the run will end on at its start
    warnings: list[str]
    notes: tuple[str, ...]  # on the names of parameters


def planned_run(flags: Sequence[str], world_size: int | None, progress: Callable[[int, int], None]) -> PlannedRun:
    """Describe and plan the first rank of each pipeline stage.

    ``progress`` is told of each stage, and how many there are. A ValueError is for flags that Megatron or an optimizer
    refuses, and for an optimizer that Megatron builds alone.
    """
    ranks = [0]
    stages: list[PlannedStage] = []
    while len(stages) < len(ranks):
        with described_run(flags, ranks[len(stages)], world_size) as run:
            # only now: importing Megatron may need what stands in for a GPU
            from megatron_eopt.megatron.arguments import unread, without_effect
            from megatron_eopt.tools.plan.described.arguments import problems_of_training, sizes
            from megatron_eopt.tools.plan.described.optimizers import planned_stage

            if not stages:
                ranks = ranks_to_describe(run.args)
                name = run.args.optimizer.removeprefix("dist_")
                of_training = problems_of_training(run.args)
                unused = unread(run.optimizer_config)
            try:
                stages.append(planned_stage(run))
            except OverrideError:
                break
        progress(len(stages), len(ranks))
    if len(stages) < len(ranks) or frozenset.intersection(*(stage.unmatched for stage in stages)):
        failed = len(stages) if len(stages) < len(ranks) else 0
        _refuse(flags, world_size, ranks, failed)
    rows = [each for stage in stages for each in stage.rows]
    together = merged(map(families, rows))
    names = {family.like.optimizer for family in together if family.like.optimizer is not None}
    unused = without_effect(run.args, names) + unused
    slowest = max(stages, key=lambda stage: (stage.seconds, bool(stage.explained)))
    return PlannedRun(
        families=together,
        explained=slowest.explained,
        slowest=stages.index(slowest),
        seconds=slowest.seconds,
        layout=sizes(run.args),
        stages=[(sum(len(row.matrices) for rank in stage.rows for row in rank), stage.memory) for stage in stages],
        problems=[*problems(together, name, takes_matrices(name)), *of_training],
        warnings=[*unused, *warnings(together, stages[0].scale_mode)],
        notes=run.notes,
    )


def _refuse(flags: Sequence[str], world_size: int | None, ranks: Sequence[int], stage: int) -> None:
    """Raise all that is wrong with overrides, as the run would."""
    from megatron_eopt.tools.plan.described.optimizers import matches_here, planned_stage

    of_stages = []
    for rank in ranks:
        with described_run(flags, rank, world_size) as run:
            of_stages.append(matches_here(run))
    with described_run(flags, ranks[stage], world_size) as run:
        planned_stage(run, [sum(each) for each in zip(*of_stages, strict=True)])
