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
    factors: Sequence[Tensor],
    scales: Sequence[float | Tensor],
) -> None:
    """Show ``watched`` this rank's updates, factors times scales, and their predicted RMS."""
    of_all = zip(factors, scales, strict=True)
    shown = list[Tensor]()
    of_shown = list[float | Tensor]()
    predicted = list[float | None]()
    known = dict[tuple[int, tuple[int, int]], float | None]()  # by group and shape, which many matrices share
    for i in indices:
        matrices = engine.matrices[i]
        shards = list(islice(of_all, len(matrices)))
        if not engine.counts(i):
            continue
        for (factor, scale), matrix in zip(shards, matrices, strict=True):
            kind = id(groups[i]), matrix.shape
            if kind not in known:
                known[kind] = predicted_rms(*matrix.shape, groups[i])
            shown.append(factor)
            of_shown.append(scale)
            predicted.append(known[kind])
    watched.updates(shown, of_shown, predicted)
