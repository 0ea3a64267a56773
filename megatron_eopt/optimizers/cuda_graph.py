"""A step captured as a CUDA graph and replayed.

Captured memory stays in place, so flags, learning rate and weight decay are copied to fixed tensors before each replay:
schedulers keep working. Gradients are read where they are, as long as they stay there, as in Megatron's buffers; once
one has moved, all are copied, too. All other settings of a group are part of the capture.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from megatron_eopt.optimizers.step import Batch

Replay = Callable[[], None]

_RATES = {"lr": None, "weight_decay": None}  # settings that may change
_WARM_UPS = 2  # torch's advice is a few runs before the capture: kernels are compiled and chosen in them


def capture_cuda(run: Replay, device: torch.device | None = None) -> Replay:
    """Capture ``run`` as a CUDA graph; returns its replay."""
    graph = torch.cuda.CUDAGraph()
    # a thread that pins memory for a data loader would break a capture in the default mode
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


class GraphedUpdate:
    """Runs an update of masked batches through a CUDA graph."""

    def __init__(
        self, update: Callable[[Sequence[Batch]], None], capture: Callable[[Replay], Replay] | None = None
    ) -> None:
        self._update = update
        self._capture = capture
        self._replay: Replay | None = None
        self._copies = False  # gradients, which do not stay where they are
        self._places: list[object] = []  # of gradients

    def check(self, batches: Sequence[Batch]) -> None:
        """Raise a ``RuntimeError`` if something captured has changed since."""
        if self._replay is not None and self._key(batches) != self._captured:
            raise RuntimeError(
                "the parameters with gradients, or the settings of a group, are not those that the CUDA graph of the "
                "step was captured with: only learning rate and weight decay may change. Turn cuda_graphs off"
            )

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Update as ``update`` would; call :meth:`check` before."""
        places: list[object] = [(x.data_ptr(), x.stride(), x.dtype) for batch in batches for x in batch.gradients]
        if self._replay is not None and not self._copies and places != self._places:
            self._copies = True
            self._replay = None
        if self._replay is None:
            self._places = places
            self._replay = self._record(batches)
        for batch, static in zip(batches, self._batches, strict=True):
            assert static.accepted is not None
            assert batch.accepted is not None  # both are masked
            if self._copies:
                torch._foreach_copy_(static.gradients, batch.gradients)
            static.accepted.copy_(batch.accepted)
            for rate, static_rate in ((batch.lr, static.lr), (batch.weight_decay, static.weight_decay)):
                assert isinstance(static_rate, Tensor)
                static_rate.copy_(rate) if isinstance(rate, Tensor) else static_rate.fill_(rate)
        self._replay()

    def _record(self, batches: Sequence[Batch]) -> Replay:
        self._captured = self._key(batches)
        static = []  # the same ones, but for rates, flags and perhaps gradients, which get memory of their own
        device: torch.device | None = None
        for batch in batches:
            assert batch.accepted is not None
            device = batch.accepted.device
            accepted = batch.accepted.clone()
            gradients = batch.gradients
            if self._copies:
                gradients = [gradient.clone() for gradient in gradients]
            lr, decay = torch.zeros(2, dtype=torch.float64, device=device).unbind()
            fixed = replace(batch, gradients=gradients, lr=lr, weight_decay=decay, decays=True, accepted=accepted)
            static.append(fixed)
        # the runs before the capture change parameters and state, so these are put back
        changed = [t for batch in batches for t in chain(*batch.changed)]
        before = [t.clone() for t in changed]
        for _ in range(_WARM_UPS):
            self._update(static)
        capture = self._capture or partial(capture_cuda, device=device)
        replay = capture(lambda: self._update(static))
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
        self._batches = static
        if not self._copies:  # memory of gradients belongs to others
            self._batches = [replace(batch, gradients=[]) for batch in static]
        return replay

    def _key(self, batches: Sequence[Batch]) -> list[object]:
        return [(b.indices, [t.data_ptr() for t in chain(*b.changed)], {**b.group_settings, **_RATES}) for b in batches]
