"""What a run that is described by its flags alone would do: its model without numbers, its optimizers, their plans."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_eopt.manifest import Family, families, merged, problems, warnings
from megatron_eopt.megatron.described.model import described_run, ranks_to_describe
from megatron_eopt.registry import takes_matrices


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is one."""

    families: list[Family]  # the manifest, as the run will print it
    explained: list[str]  # the plan of each optimizer on the first rank, as a table, and deals
    problems: list[str]  # what the run will end on at its start
    warnings: list[str]
    notes: tuple[str, ...]  # on the names of parameters


def planned_run(flags: Sequence[str], world_size: int | None = None) -> PlannedRun:
    """Describe every rank that holds parameters of its own, one after another, and plan the first.

    ``flags`` and ``world_size`` as for :func:`described_run`. A ``ValueError`` is for flags that Megatron or an
    optimizer refuses, and for an optimizer that Megatron builds alone.
    """
    with described_run(flags, 0, world_size) as run:
        # only now: importing Megatron may need what stands in for a GPU
        from megatron_eopt.megatron.described.optimizers import matches_here, planned_rank

        ranks, name = ranks_to_describe(run.args), run.args.optimizer.removeprefix("dist_")
        counts = matches_here(run)
    for rank in ranks[1:]:
        with described_run(flags, rank, world_size) as run:
            counts = [a + b for a, b in zip(counts, matches_here(run), strict=True)]
    planned = []
    for rank in ranks:
        with described_run(flags, rank, world_size) as run:
            planned.append(planned_rank(run, counts))
    rows, explained, scale_modes = zip(*planned, strict=True)
    together = merged([families(each) for each in rows])
    return PlannedRun(
        together,
        next(filter(None, explained), []),
        problems(together, name, takes_matrices(name)),
        warnings(together, scale_modes[0]),
        run.notes,
    )
