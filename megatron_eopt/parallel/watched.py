"""What one step shows of itself where somebody asked: the time of its phases, and figures of its matrices.

Nothing waits for the device until the figures are read; steps that nobody watches do nothing of this.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.forms import Watch
from megatron_eopt.orthogonalize.newton_schulz import Iteration, residual, trace_and_squares
from megatron_eopt.parallel.collectives import counters

PHASES = ("exchange", "orthogonalize", "update")


class Watched:
    """A step of an optimizer on a device, whose phases are told apart as it runs.

    The time between two marks is that of the innermost phase that has begun: ``update`` is the whole step but for the
    two others in it, ``exchange`` the packing, sending and taking of shards, as far as the device waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._open: list[str] = []
        self._sent = 0
        self._grams: list[tuple[Tensor, Tensor, Tensor]] = []
        self._squares: list[Tensor] = []
        self._entries: list[tuple[int, float | None]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which the time is that of a phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def timed[**P, R](self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """A function, whose time is that of a phase."""

        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.phase(name):
                return function(*args, **kwargs)

        return called

    def run(self, iteration: Iteration, counts: bool = True) -> Callable[..., Tensor]:
        """``iteration.run``, watched; without ``counts`` its time alone."""
        watch = self.grams(iteration) if counts else None

        def run(x: Tensor, own: bool = False) -> Tensor:
            with self.phase("orthogonalize"):
                return iteration.run(x, watch, own=own)

        return run

    def grams(self, iteration: Iteration) -> Watch:
        """What is shown the Gram matrices of an iteration, of which the first and the last are looked at.

        The first tells the effective rank of what is orthogonalized, of any norm; the last, that before the last step,
        how far its rows are from orthonormal ones.
        """
        last, first = len(iteration.schedule) - 1, deque[tuple[Tensor, Tensor]]()

        def watch(step: int, R: Tensor) -> None:
            if step not in (0, last):
                return
            trace, squares = (x.reshape(-1) for x in trace_and_squares(R))
            if step == 0:
                first.append((trace, squares))
            if step == last:  # of the matrices that were the first of those before it
                (norms, squared), short = first.popleft(), R.size(-1)
                rank = norms.square() / squared
                if last == 0:  # the norm is not divided out yet
                    trace, squares = torch.ones_like(trace), squares / trace.square()
                self._grams.append((rank, rank / short, residual(trace, squares, short)))

        return watch

    def updates(self, shards: Sequence[Tensor], predicted: Sequence[float | None]) -> None:
        """Take notice of updates, before the learning rate, and of the RMS that is predicted of each."""
        filled = [(x, rms) for x, rms in zip(shards, predicted, strict=True) if x.numel()]
        if filled:
            norms = torch._foreach_norm([x for x, _ in filled], dtype=torch.float32)
            self._squares += [torch.stack(norms).double().square().sum()]
            self._entries += [(x.numel(), rms) for x, rms in filled]

    def figures(self) -> Tensor:
        """(3 x matrices that were orthogonalized here), without those of zeros: effective rank, its share, residual."""
        if not self._grams:
            return torch.empty(3, 0, dtype=torch.float64)
        found = torch.stack([torch.cat(each) for each in zip(*self._grams, strict=True)]).cpu()
        return found[:, found.isfinite().all(0)]

    def seconds(self) -> dict[str, float]:
        """Of each phase; waits for the device."""
        found = dict.fromkeys(PHASES, 0.0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                found[name] += _between(start, end)
        return found

    def sizes(self) -> tuple[float, int, float | None]:
        """Of this rank's updates the sum of squares, the number of entries, and the sum predicted, if one is."""
        entries, known = sum(n for n, _ in self._entries), [(n, rms) for n, rms in self._entries if rms is not None]
        predicted = sum(n * rms**2 for n, rms in known) if len(known) == len(self._entries) else None
        return torch.stack(self._squares).sum().item() if self._squares else 0.0, entries, predicted

    def sent(self) -> int:
        """Bytes that this rank sent in the phases."""
        return self._sent

    def enter(self, name: str) -> None:
        """A phase begins."""
        if not self._open:
            self._sent -= sum(counters.bytes.values())
        self._open.append(name)
        self._mark(name)

    def leave(self) -> None:
        """The innermost phase ends."""
        self._open.pop()
        self._mark(self._open[-1] if self._open else "")
        if not self._open:
            self._sent += sum(counters.bytes.values())

    def _mark(self, name: str) -> None:
        if self._device.type != "cuda":
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((name, event))


def _between(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event), "the marks of a step are of one kind"
    assert isinstance(end, torch.cuda.Event), "the marks of a step are of one kind"
    return start.elapsed_time(end) / 1e3
