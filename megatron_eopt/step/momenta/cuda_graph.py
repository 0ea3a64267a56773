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

import torch
from torch import Tensor

from megatron_eopt.step.stacks import Inputs
from megatron_eopt.step.state import settings_in

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
    """Runs an update, from the third step on by a CUDA graph."""

    def __init__(self, update: Callable[[Inputs], None], capture: Callable[[Replay], Replay] | None = None) -> None:
        self._update = update
        self._capture = capture
        self._fixed: Inputs | None = None  # with rates and flag in memory of their own
        self._places: list[object] = []  # of gradients
        self._copies = False  # gradients, which do not stay where they are
        self._steps = 0  # with these inputs
        self._replay: Replay | None = None
        self._key: list[object] = []
        self._captured: list[object] = []

    def check(self, inputs: Inputs, places: Sequence[int]) -> None:
        """Raise a ``RuntimeError`` if something captured has changed since.

        ``places`` are where the weights and the state lie that an update changes.
        """
        settings = [settings_in(group) | _RATES for group in inputs.groups]
        self._key = [list(inputs.gradients), places, settings]
        if self._fixed is not None and self._key != self._captured:
            raise RuntimeError(
                "the parameters with gradients, or the settings of a group, are not those that the CUDA graph of the "
                "step was captured with: only learning rate and weight decay may change. Turn cuda_graphs off"
            )

    def __call__(self, inputs: Inputs) -> None:
        """Update as ``update`` would; call :meth:`check` before."""
        gradients = list(inputs.gradients.values())
        if not gradients:  # nor anything to capture
            self._update(inputs)
            return
        places: list[object] = [(x.data_ptr(), x.stride(), x.dtype) for x in gradients]
        if self._fixed is not None and not self._copies and places != self._places:
            self._copies = True
            self._fixed = None
        if self._fixed is None:
            self._places = places
            self._captured = self._key
            self._fixed = self._in_own_memory(inputs)
            self._steps = 0
            self._replay = None
        self._fill(self._fixed, inputs)
        run = self._fixed if self._copies else replace(self._fixed, gradients=inputs.gradients)
        self._steps += 1
        if self._steps <= _EAGER:
            self._update(run)
            return
        if self._replay is None:
            capture = self._capture or partial(capture_cuda, device=gradients[0].device)
            self._replay = capture(lambda: self._update(run))
            how = "copies of gradients, which had moved" if self._copies else "gradients where they are"
            logger.info("cuda_graphs: from now on a CUDA graph makes the steps, from %s", how)
        self._replay()

    def _in_own_memory(self, inputs: Inputs) -> Inputs:
        """With rates, flag and perhaps gradients that stay in place; others' gradients are not held on to."""
        device = next(iter(inputs.gradients.values())).device
        groups = []
        for group in inputs.groups:
            lr, decay = torch.zeros(2, dtype=torch.float64, device=device).unbind()
            groups.append({**group, "lr": lr, "weight_decay": decay})
        gradients = {}
        if self._copies:
            gradients = {index: torch.empty_like(x) for index, x in inputs.gradients.items()}
        return Inputs(groups, gradients, torch.ones((), dtype=torch.bool, device=device))

    def _fill(self, fixed: Inputs, inputs: Inputs) -> None:
        """Copy what may differ from step to step into fixed memory."""
        if self._copies:
            torch._foreach_copy_(list(fixed.gradients.values()), list(inputs.gradients.values()))
        if inputs.ok is not None:
            assert fixed.ok is not None
            fixed.ok.copy_(inputs.ok)
        for group, own in zip(inputs.groups, fixed.groups, strict=True):
            for key in _RATES:
                own[key].copy_(group[key]) if isinstance(group[key], Tensor) else own[key].fill_(group[key])
