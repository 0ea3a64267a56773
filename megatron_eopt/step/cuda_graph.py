"""A step captured as a CUDA graph and replayed.

Captured memory stays in place, so the flag of a step, learning rate and weight decay are copied to fixed tensors before
each replay: schedulers keep working. Gradients are read where they are, as long as they stay there, as in Megatron's
buffers; once one has moved, all are copied, too. All other settings of a group are part of the capture. The first two
steps run as they are captured later: they compile kernels, which a capture cannot.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from megatron_eopt.step.state import settings_in
from megatron_eopt.step.step import Batch

Replay = Callable[[], None]

_RATES = {"lr": None, "weight_decay": None}  # settings that may change
_EAGER = 2  # steps before the capture, in which kernels are compiled

logger = logging.getLogger(__name__)


def capture_cuda(run: Replay, device: torch.device | None = None) -> Replay:
    """Capture ``run`` as a CUDA graph; returns its replay."""
    graph = torch.cuda.CUDAGraph()
    # a thread that pins memory for a data loader would break a capture in the default mode
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


class GraphedUpdate:
    """Runs an update of batches, from the third step on by a CUDA graph."""

    def __init__(
        self, update: Callable[[Sequence[Batch]], None], capture: Callable[[Replay], Replay] | None = None
    ) -> None:
        self._update = update
        self._capture = capture
        self._fixed: list[Batch] | None = None  # the batches, with rates and flag in memory of their own
        self._places: list[object] = []  # of gradients
        self._copies = False  # gradients, which do not stay where they are
        self._steps = 0  # with these batches
        self._replay: Replay | None = None

    def check(self, batches: Sequence[Batch]) -> None:
        """Raise a ``RuntimeError`` if something captured has changed since."""
        if self._fixed is not None and self._key(batches) != self._captured:
            raise RuntimeError(
                "the parameters with gradients, or the settings of a group, are not those that the CUDA graph of the "
                "step was captured with: only learning rate and weight decay may change. Turn cuda_graphs off"
            )

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Update as ``update`` would; call :meth:`check` before."""
        places: list[object] = [(x.data_ptr(), x.stride(), x.dtype) for batch in batches for x in batch.gradients]
        if self._fixed is not None and not self._copies and places != self._places:
            self._copies = True
            self._fixed = None
        if self._fixed is None:
            self._places = places
            self._captured = self._key(batches)
            self._fixed = list(map(self._in_own_memory, batches))
            self._steps = 0
            self._replay = None
        for batch, fixed in zip(batches, self._fixed, strict=True):
            self._fill(fixed, batch)
        run = self._fixed
        if not self._copies:
            run = [replace(fixed, gradients=batch.gradients) for fixed, batch in zip(run, batches, strict=True)]
        self._steps += 1
        if self._steps <= _EAGER:
            self._update(run)
            return
        if self._replay is None:
            capture = self._capture or partial(capture_cuda, device=batches[0].weights[0].device)
            self._replay = capture(lambda: self._update(run))
            how = "copies of gradients, which had moved" if self._copies else "gradients where they are"
            logger.info("cuda_graphs: from now on a CUDA graph makes the steps, from %s", how)
        self._replay()

    def _in_own_memory(self, batch: Batch) -> Batch:
        """With rates, flag and perhaps gradients that stay in place; others' gradients are not held on to."""
        device = batch.weights[0].device
        ok = torch.ones((), dtype=torch.bool, device=device)
        lr, decay = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        gradients = [torch.empty_like(x) for x in batch.gradients] if self._copies else []
        return replace(batch, gradients=gradients, lr=lr, weight_decay=decay, decays=True, ok=ok)

    def _fill(self, fixed: Batch, batch: Batch) -> None:
        """Copy what may differ from step to step into fixed memory."""
        if self._copies:
            torch._foreach_copy_(fixed.gradients, batch.gradients)
        if batch.ok is not None:
            assert fixed.ok is not None
            fixed.ok.copy_(batch.ok)
        for rate, own in ((batch.lr, fixed.lr), (batch.weight_decay, fixed.weight_decay)):
            assert isinstance(own, Tensor)
            own.copy_(rate) if isinstance(rate, Tensor) else own.fill_(rate)

    def _key(self, batches: Sequence[Batch]) -> list[object]:
        key = list[object]()
        for batch in batches:
            places = [x.data_ptr() for x in chain(*batch.changed)]
            key.append((batch.indices, places, settings_in(batch.group) | _RATES))
        return key
