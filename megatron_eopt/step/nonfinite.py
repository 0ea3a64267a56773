"""Steps that are skipped, because a gradient is not finite or too large.

A value that is not finite would stay in the momentum for ever, and so would the square of one that is too large. So the
whole step is skipped, of all parameters and on all ranks that share some, and counted; several in a row are an error. A
CPU knows before anything is changed. On a GPU nothing waits: one flag goes through the step, which changes no tensor
where it is false, and the host reads it two steps later; what the host counts, such as steps until a refresh of factors
or of a warm-up, counts that step. If an update by a user's function is not finite, all of the step count as zero;
momenta have followed their gradients before.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from megatron_eopt.screen import listed

logger = logging.getLogger(__name__)

MAX_IN_A_ROW = 5  # so many skipped steps in a row are an error
# Of a shard of a gradient, 1.1e15. Squares of 2^16 shards add up to 2^116 at most, and fp32 ends at 2^128: the rest is
# for preconditioners, which divide such squares by those of small gradients before.
LARGEST_NORM = 2.0**50
_DELAY = 2  # steps: by then the copy to the host is there, and all ranks read it in the same step

Flag = Tensor | None
"""A bool () on the device: whether the step is made; None where the host knows that it is."""


class NonFinite:
    """Counts skipped steps on a device.

    Args:
        names: tells those of the parameters.
        device: of all of them.
        looked_at: what is not finite, for messages.
        advice: what to look for then.
        outcome: what becomes of the step.
    """

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        device: torch.device,
        looked_at: str = "gradients",
        advice: str = "a learning rate that is too high, or for a loss that overflows",
        outcome: str = "the whole step is skipped",
    ) -> None:
        self._names = names
        self._device = device
        self._looked_at = looked_at
        self._advice = advice
        self._outcome = outcome
        # skipped in a row, in all, and -1 if, of ranks that share a parameter, only some had a gradient
        self._counts = torch.zeros(3, dtype=torch.int32, device=device)
        self._pending: deque[tuple[Sequence[int], Sequence[bool], Callable[[], Tensor]]] = deque()
        self._reported = 0

    @property
    def total(self) -> int:
        """Skipped steps. Waits for the device."""
        return int(self._counts[1] + self.of_updates._counts[1])

    @cached_property
    def of_updates(self) -> "NonFinite":
        """The same for updates by functions of the user's."""
        looked_at = "updates by your own orthogonalize"
        advice = "what it cannot take, such as zeros"
        return NonFinite(self._names, self._device, looked_at, advice, "all updates of the step count as zero")

    def accept(
        self,
        gradients: Sequence[Tensor | None],
        agree: Callable[[Tensor], Tensor] = lambda flag: flag,
        at_once: bool = False,
    ) -> Tensor:
        """Whether all ranks can step with their gradients: a number in int32 on the device.

        1 for a step, 0 where it is skipped, and -1 where, of ranks that share a parameter, only some have a gradient.
        ``agree`` takes the minimum over ranks, and tells of the latter; the host waits for it if it is to know
        ``at_once``. A ``RuntimeError`` after :data:`MAX_IN_A_ROW` skipped steps in a row, and for -1.
        """
        found = {i: x for i, x in enumerate(gradients) if x is not None and x.numel()}
        norms = norms_of(found.values())
        norms = [x if x.device == self._device else x.to(self._device) for x in norms]
        usable = (torch.stack(norms) if norms else self._counts[:0]) <= LARGEST_NORM  # false for NaN, too
        flag = agree(usable.all().int())
        skipped = flag < 1
        self._counts[:2].add_(skipped)
        self._counts[0].mul_(skipped)
        torch.clamp(flag, max=0, out=self._counts[2])
        self._report(list(found), [x is None for x in gradients], usable, at_once)
        return flag

    def _report(self, here: Sequence[int], missing: Sequence[bool], usable: Tensor, at_once: bool) -> None:
        found = torch.cat([self._counts, usable])
        if self._device.type != "cpu" and not at_once:  # those of some steps ago, on the host by now
            self._pending.append((here, missing, to_host(found, self._device)))
            if len(self._pending) <= _DELAY:
                return
            here, missing, wait = self._pending.popleft()
            found = wait()
        in_a_row, total, uneven, *of_gradients = found.tolist()
        if total == self._reported:
            return
        self._reported = total
        names = self._names()
        if uneven:
            lacking = [name for name, is_missing in zip(names, missing, strict=True) if is_missing]
            raise RuntimeError(
                "a parameter has a gradient on some of the ranks that share it, none on others; here "
                f"{listed(lacking) or 'no parameter'} has none: let its module take part in the loss on all of them or "
                "on none"
            )
        bad = [names[i] for i, is_usable in zip(here, of_gradients, strict=True) if not is_usable]
        of_which = listed(bad) or "another rank"
        if in_a_row >= MAX_IN_A_ROW:
            raise RuntimeError(
                f"{self._looked_at} were not finite in {MAX_IN_A_ROW} steps in a row, or above 2^50 in norm, now of "
                f"{of_which}: nothing is trained any more; look for {self._advice}"
            )
        logger.warning(
            f"{self._looked_at} are not finite, or above 2^50 in norm, of {of_which}: {self._outcome}, {total} in "
            "all so far"
        )


def norms_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Norms of tensors that have entries, in fp32, or in fp64 where they are."""
    tensors = list(tensors)
    norms: dict[int, Tensor] = {}
    for wide in (torch.float32, torch.float64):
        some = {i: x for i, x in enumerate(tensors) if (x.dtype == torch.float64) is (wide == torch.float64)}
        if some:
            norms |= zip(some, torch._foreach_norm(list(some.values()), 2, dtype=wide), strict=True)
    return [norms[i] for i in sorted(norms)]


def to_host(x: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Start a copy to the host; the result waits."""
    if device.type == "cpu":
        return lambda: x
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copy.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # the device may be another than the current one

    def wait() -> Tensor:
        if not event.query():
            event.synchronize()
        return copy

    return wait
