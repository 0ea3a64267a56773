"""Reports of Muon and its relatives: matrices and updates."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from typing import Any

from torch import Tensor

from megatron_eopt.optimizers.parameters import DescribedMatrix
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.watched import Watched

# (rows, cols, group) -> RMS of a matrix's update before the learning rate; None where gradients decide
PredictedRms = Callable[[int, int, Mapping[str, Any]], float | None]


def described(
    engine: Engine, groups: Sequence[Mapping[str, Any]], scales: Sequence[Sequence[float]], predicted_rms: PredictedRms
) -> list[list[DescribedMatrix]]:
    """Logical matrices of each parameter, with ``groups`` and ``scales``."""
    schemes = {i: bucket.scheme.replace("_", " ") for bucket in engine.plan.buckets for i in bucket.matrices}
    numbers = count()
    return [
        [
            DescribedMatrix(
                matrix.name.partition("[")[2].rstrip("]"),
                matrix.shape,
                schemes[next(numbers)],
                scale,
                predicted_rms(*matrix.shape, group),
            )
            for matrix, scale in zip(matrices, of_parameter, strict=True)
        ]
        for matrices, group, of_parameter in zip(engine.matrices, groups, scales, strict=True)
    ]


def show_updates(
    watched: Watched,
    engine: Engine,
    groups: Sequence[Mapping[str, Any]],
    predicted_rms: PredictedRms,
    indices: Sequence[int],
    updates: Sequence[Tensor],
) -> None:
    """Show ``watched`` this rank's updates and their predicted RMS."""
    of_all, shown, predicted = iter(updates), list[Tensor](), list[float | None]()
    for i in indices:
        shards = list(islice(of_all, len(engine.matrices[i])))
        if engine.counts(i):
            shown += shards
            predicted += [predicted_rms(*matrix.shape, groups[i]) for matrix in engine.matrices[i]]
    watched.updates(shown, predicted)
