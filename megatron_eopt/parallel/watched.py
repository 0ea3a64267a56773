"""A watched step: times of phases, figures of matrices."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.forms import Iteration, Watch
from megatron_eopt.parallel.collectives import counters

PHASES = ("exchange", "orthogonalize", "update")


class Watched:
    """A step of an optimizer, whose phases are told apart.

    Time belongs to the innermost phase: ``exchange`` is the packing, sending and taking of shards, as far as the device
    waits for them, ``update`` the step without the two others. Nothing waits for the device until it is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []  # seconds, or events of a GPU
        self._open: list[str] = []
        self.sent = 0  # bytes that this rank sent in the phases
        self._grams: list[tuple[Tensor, Tensor, Tensor]] = []
        self._squares: list[Tensor] = []
        self._entries: list[tuple[int, float | None]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose time is that of a phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def exchange(self, bucket: Iterator[object]) -> None:
        """Let a bucket go on, whose time is that of exchange but where it says otherwise."""
        with self.phase("exchange"):
            next(bucket)

    def grams(self, iteration: Iteration) -> Watch:
        """Watch effective ranks (first Gram matrix) and residuals (last one)."""
        last = len(iteration.schedule) - 1
        first = deque[tuple[Tensor, Tensor]]()

        def watch(step: int, R: Tensor) -> None:
            if step not in (0, last):
                return
            trace = R.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64).reshape(-1)
            squares = torch.linalg.vector_norm(R.float(), dim=(-2, -1)).double().square().reshape(-1)
            if step == 0:
                first.append((trace, squares))
            if step == last:  # of the matrices that were the first of those before it
                norms, squared = first.popleft()
                short = R.size(-1)
                rank = norms.square() / squared
                if last == 0:  # the norm is not divided out yet
                    squares = squares / trace.square()
                    trace = torch.ones_like(trace)
                residual = ((squares - 2 * trace + short).clamp(min=0) / short).sqrt()  # ||R - I||_F / sqrt(short)
                self._grams.append((rank, rank / short, residual))

        return watch

    def updates(self, shards: Sequence[Tensor], predicted: Sequence[float | None]) -> None:
        """Record updates, before the learning rate, and their predicted RMS."""
        filled = [(x, rms) for x, rms in zip(shards, predicted, strict=True) if x.numel()]
        if filled:
            norms = torch._foreach_norm([x for x, _ in filled], dtype=torch.float32)
            self._squares.append(torch.stack(norms).double().square().sum())
            self._entries += [(x.numel(), rms) for x, rms in filled]

    def figures(self) -> Tensor:
        """Effective ranks, their shares and residuals: (3 x nonzero matrices)."""
        if not self._grams:
            return torch.empty(3, 0, dtype=torch.float64)
        figures = torch.cat([torch.stack(of_stack) for of_stack in self._grams], 1).cpu()
        return figures[:, figures.isfinite().all(0)]

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase; waits for the device."""
        seconds = dict.fromkeys(PHASES, 0.0)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        for (name, start), (_, end) in pairwise(self._marks):
            if name:
                seconds[name] += start.elapsed_time(end) / 1e3 if on_gpu else end - start
        return seconds

    def sizes(self) -> tuple[float, int, float]:
        """Of this rank's updates: square sum, entries, predicted square sum (NaN if not all are)."""
        squares = torch.stack(self._squares).sum().item() if self._squares else 0.0
        entries = sum(n for n, _ in self._entries)
        predicted = sum(math.nan if rms is None else n * rms**2 for n, rms in self._entries)
        return squares, entries, predicted

    def enter(self, name: str) -> None:
        """Begin a phase."""
        if not self._open:
            self.sent -= sum(counters.bytes.values())
        self._open.append(name)
        self._mark(name)

    def leave(self) -> None:
        """End the innermost phase."""
        self._open.pop()
        self._mark(self._open[-1] if self._open else "")
        if not self._open:
            self.sent += sum(counters.bytes.values())

    def _mark(self, name: str) -> None:
        now: Any
        if self._device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        else:
            now = time.perf_counter()
        self._marks.append((name, now))
