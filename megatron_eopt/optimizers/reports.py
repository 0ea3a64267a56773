"""What metrics are shown of the updates of Muon and its relatives."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.watched import Watched

# (rows, cols, group) -> RMS of a matrix's update before the learning rate; None where gradients decide
PredictedRms = Callable[[int, int, Mapping[str, Any]], float | None]


def show_updates(
    watched: Watched,
    engine: Engine,
    groups: Sequence[Mapping[str, Any]],
    predicted_rms: PredictedRms,
    indices: Sequence[int],
    updates: Sequence[Tensor],
) -> None:
    """Show ``watched`` this rank's updates and their predicted RMS."""
    of_all = iter(updates)
    shown = list[Tensor]()
    predicted = list[float | None]()
    for i in indices:
        shards = list(islice(of_all, len(engine.matrices[i])))
        if engine.counts(i):
            shown += shards
            predicted += [predicted_rms(*matrix.shape, groups[i]) for matrix in engine.matrices[i]]
    watched.updates(shown, predicted)
