"""A watched step: times of phases, figures of matrices."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.forms import Iteration, Watch
from megatron_eopt.parallel.collectives import counters

PHASES = ("exchange", "orthogonalize", "update")


@dataclass
class _Grams:
    """Traces and norms, (2 x matrices) in fp64, of Gram matrices of a bucket."""

    one_step: bool  # whether the first ones are the last ones
    first: list[Tensor] = field(default_factory=list)  # before the first step; of parts of the bucket
    last: list[Tensor] = field(default_factory=list)  # before the last step, of the same parts in this order
    short: int = 1  # rows
    square: float = 1.0  # what they are multiplied by

    def figures(self, on_host: Tensor) -> Tensor:
        """Effective ranks, their shares and residuals, from all of these, (2 x first and last)."""
        first, last = on_host.chunk(2, 1)
        trace, norm = first
        rank = (trace / norm).square()
        if self.one_step:  # the norm is not divided out yet
            last = last / trace
        else:
            last = last / self.square
        trace, norm = last
        short = self.short
        residual = ((norm.square() - 2 * trace + short).clamp(min=0) / short).sqrt()  # ||R - I||_F / sqrt(short)
        return torch.stack((rank, rank / short, residual))


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
        self._grams: list[_Grams] = []
        self._norms: list[Tensor] = []  # of updates, without their scales on the host
        self._entries: list[tuple[int, float, float | None]] = []  # how many, those scales, and the predicted RMS

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
        seen = _Grams(one_step=last == 0)
        self._grams.append(seen)

        def watch(step: int, R: Tensor, unit: float = 1.0) -> None:
            if step not in (0, last):
                return
            trace = R.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
            norm = torch.linalg.vector_norm(R, dim=(-2, -1), dtype=torch.promote_types(R.dtype, torch.float32))
            of_stack = torch.stack((trace, norm)).reshape(2, -1)
            seen.short = R.size(-1)
            seen.square = unit**2
            if step == 0:
                seen.first.append(of_stack)
            if step == last:
                seen.last.append(of_stack)

        return watch

    def updates(
        self,
        shards: Sequence[Tensor],
        scales: Sequence[float | Tensor],
        predicted: Sequence[float | None],
    ) -> None:
        """Record updates before the learning rate, shards times scales, and their predicted RMS."""
        filled = [(x, scale, rms) for x, scale, rms in zip(shards, scales, predicted, strict=True) if x.numel()]
        if not filled:
            return
        norms = torch.stack(torch._foreach_norm([x for x, _, _ in filled], dtype=torch.float32)).double()
        if any(isinstance(scale, Tensor) for _, scale, _ in filled):
            one = norms.new_ones(())
            norms = norms * torch.stack([scale if isinstance(scale, Tensor) else one for _, scale, _ in filled])
        self._norms.append(norms)
        for x, scale, rms in filled:
            self._entries.append((x.numel(), 1.0 if isinstance(scale, Tensor) else scale, rms))

    def figures(self) -> Tensor:
        """Effective ranks, their shares and residuals: (3 x nonzero matrices); waits for the device."""
        seen = [of_bucket for of_bucket in self._grams if of_bucket.first]
        if not seen:
            return torch.empty(3, 0, dtype=torch.float64)
        stacks = [torch.cat((*of_bucket.first, *of_bucket.last), 1) for of_bucket in seen]
        on_host = torch.cat(stacks, 1).cpu().split([x.size(1) for x in stacks], 1)
        figures = torch.cat([of_bucket.figures(x) for of_bucket, x in zip(seen, on_host, strict=True)], 1)
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
        norms = torch.cat(self._norms).tolist() if self._norms else []
        squares = 0.0
        entries = 0
        predicted = 0.0
        for norm, (count, scale, rms) in zip(norms, self._entries, strict=True):
            squares += (scale * norm) ** 2
            entries += count
            predicted += math.nan if rms is None else count * rms**2
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
