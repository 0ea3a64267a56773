"""What a run would do, described from its flags."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_eopt.registry import takes_matrices
from megatron_eopt.routing import ParamPattern, families, merged, problems, warnings
from megatron_eopt.screen import counted
from megatron_eopt.tools.plan.described.model import described_run, ranks_to_describe

if TYPE_CHECKING:
    from megatron_eopt.tools.plan.described.optimizers import PlannedStage


@dataclass(frozen=True)
class PlannedRun:
    """The first rank of each pipeline stage, before it is one."""

    families: list[ParamPattern]  # the manifest, as the run will print it
    ranks: str
    stages: list[str]  # state and plans
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
            from megatron_eopt.tools.plan.described.optimizers import planned_stage

            ranks = ranks_to_describe(run.args)
            # an override may be for experts of ranks that are not described
            all_known = len(stages) == len(ranks) - 1 and run.args.expert_model_parallel_size == 1
            before = stages[-1].matches if stages else ()
            stages.append(planned_stage(run, before, refuse_unmatched=all_known))
            noted = warnings_of(run.optimizer_config, run.args)
    together = merged(families(stage.rows) for stage in stages)
    names = {family.like.optimizer for family in together if family.like.optimizer is not None}
    name = run.args.optimizer.removeprefix("dist_")
    given = (run.optimizer_config, run.args, names)
    return PlannedRun(
        families=together,
        ranks=f"{counted(run.args.world_size, 'rank')}, data-parallel size {run.args.data_parallel_size}",
        stages=[stage.text for stage in stages],
        problems=[*problems(together, name, takes_matrices(name)), *idle_flags(*given)],
        warnings=[*idle_settings(*given), *noted, *warnings(together, stages[0].scale_mode)],
        notes=run.notes,
    )
