"""What a run would do, described from its flags."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_eopt.manifest import ParamPattern, families, merged, problems, warnings
from megatron_eopt.megatron.described.model import Memory, described_run, ranks_to_describe
from megatron_eopt.registry import takes_matrices


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is one."""

    families: list[ParamPattern]  # the manifest, as the run will print it
    explained: list[str]  # the plan of each optimizer on the first rank, as a table, and deals
    stages: list[tuple[int, Memory]]  # of each pipeline stage its matrices on all ranks, and what a rank holds
    problems: list[str]  # what the run will end on at its start
    warnings: list[str]
    notes: tuple[str, ...]  # on the names of parameters


def planned_run(flags: Sequence[str], world_size: int | None, progress: Callable[[int, int], None]) -> PlannedRun:
    """Describe every rank that has own parameters; plan the first.

    A ValueError is for flags that Megatron or an optimizer refuses, and for an optimizer that Megatron builds alone.
    """
    with described_run(flags, 0, world_size) as run:
        # only now: importing Megatron may need what stands in for a GPU
        from megatron_eopt.megatron.arguments import unread, without_effect
        from megatron_eopt.megatron.described.optimizers import matches_here, planned_rank

        ranks, name = ranks_to_describe(run.args), run.args.optimizer.removeprefix("dist_")
        counts, unused = matches_here(run), [*without_effect(run.args), *unread(run.optimizer_config)]
    for done, rank in enumerate(ranks[1:], 1):
        progress(done, 2 * len(ranks))
        with described_run(flags, rank, world_size) as run:
            counts = [a + b for a, b in zip(counts, matches_here(run), strict=True)]
    planned = []
    for done, rank in enumerate(ranks, len(ranks)):
        progress(done, 2 * len(ranks))
        with described_run(flags, rank, world_size) as run:
            planned.append(planned_rank(run, counts))
    rows, explained, scale_modes, memory = zip(*planned, strict=True)
    together = merged([families(each) for each in rows])
    experts = len(ranks) // run.args.pipeline_model_parallel_size
    of_ranks = [sum(len(row.matrices) for row in each) for each in rows]
    counted = [sum(of_ranks[first : first + experts]) for first in range(0, len(ranks), experts)]
    return PlannedRun(
        together,
        next(filter(None, explained), []),
        list(zip(counted, memory[::experts], strict=True)),
        problems(together, name, takes_matrices(name)),
        [*unused, *warnings(together, scale_modes[0])],
        run.notes,
    )
