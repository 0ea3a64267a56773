"""What an optimizer will own and do in a run that is described by its flags alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_eopt.manifest import Family, families, merged, problems
from megatron_eopt.megatron.described.model import described_run, ranks_to_describe
from megatron_eopt.registry import takes_matrices


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is one.

    Attributes:
        families: the manifest, as the run will print it.
        explained: the plan of each optimizer on the first rank, as a table.
        problems: what the run will end on at its start.
        warnings: what it will warn of.
        notes: on the names of parameters.
    """

    families: list[Family]
    explained: list[str]
    problems: list[str]
    warnings: list[str]
    notes: tuple[str, ...]


def planned_run(flags: Sequence[str], world_size: int | None = None) -> PlannedRun:
    """Describe every rank that holds parameters of its own, one after another, and plan the first.

    Args:
        flags: of a Megatron pretrain command.
        world_size: number of ranks; None for as few as the parallel sizes allow.

    Raises:
        ValueError: for flags that Megatron or an optimizer refuses, and for an optimizer that Megatron builds alone.
    """
    with described_run(flags, 0, world_size) as run:
        # only now: importing Megatron may need what stands in for a GPU
        from megatron_eopt.megatron.described.optimizers import DescribedOptimizers, matches_here

        ranks, notes, name = ranks_to_describe(run.args), run.notes, run.args.optimizer.removeprefix("dist_")
        counts = matches_here(run)
    for rank in ranks[1:]:
        with described_run(flags, rank, world_size) as run:
            counts = [a + b for a, b in zip(counts, matches_here(run), strict=True)]
    found: list[list[Family]] = []
    explained: list[str] = []
    for rank in ranks:
        with described_run(flags, rank, world_size) as run:
            optimizers = DescribedOptimizers(run, counts)
            found.append(families(optimizers.rows()))
            explained = explained or optimizers.explained()
    together = merged(found)
    return PlannedRun(
        together, explained, problems(together, name, takes_matrices(name)), optimizers.warnings(together), notes
    )
