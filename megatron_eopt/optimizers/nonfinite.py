"""Skipped steps of gradients that are not finite, or too large.

A value that is not finite would stay in the momentum for ever, and so would the square of one that is too large. So all
ranks skip, count and report the step of that parameter, and several in a row are an error. A CPU knows before anything
is changed. On a GPU nothing waits: the step masks what is skipped, and the host reads it two steps later. Updates by a
user's function are treated alike.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.parameters import has_dtensors, local, parameter_names, parameters_in

logger = logging.getLogger(__name__)

MAX_IN_A_ROW = 5  # so many steps of a parameter are skipped before it is an error
# Of a shard of a gradient, 1.1e15. Squares of 2^16 shards add up to 2^116 at most, and fp32 ends at 2^128: the rest is
# for preconditioners, which divide such squares by those of small gradients before.
LARGEST_NORM = 2.0**50
_DELAY = 2  # steps: by then the copy to the host is there, and all ranks read it in the same step


class NonFinite:
    """Counts skipped steps of named parameters on a device.

    Args:
        names: of the parameters.
        device: of all of them.
        looked_at: what is not finite, for messages.
        advice: what to look for then.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        looked_at: str = "gradients",
        advice: str = "a learning rate that is too high, or for a loss that overflows",
    ) -> None:
        self._names = list(names)
        self._device = device
        self._looked_at = looked_at
        self._advice = advice
        # per parameter: skipped in a row, skipped in all, gradients that only some ranks had
        self._counts = torch.zeros(3, len(names), dtype=torch.int32, device=device)
        self._zero = torch.zeros((), device=device)
        self._pending: deque[Callable[[], Tensor]] = deque()
        self._reported = 0
        self._last: tuple[tuple[bool, ...], Tensor] = ((), self._counts)

    @property
    def total(self) -> dict[str, int]:
        """Name -> skipped steps, if any. Waits for the device."""
        counts = (self._counts[1] + self.of_updates._counts[1]).tolist()
        return {name: count for name, count in zip(self._names, counts, strict=True) if count}

    @cached_property
    def of_updates(self) -> "NonFinite":
        """The same for updates by functions of the user's."""
        looked_at = "updates by your own orthogonalize"
        return NonFinite(self._names, self._device, looked_at, "what it cannot take, such as zeros")

    def accept(self, gradients: Sequence[Tensor | None], agree: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Which parameters have a gradient to step with on all ranks.

        ``agree`` takes the element-wise minimum of an int32 tensor (3 x parameters) over the ranks that share them. A
        ``RuntimeError`` after :data:`MAX_IN_A_ROW` skipped steps of one parameter in a row, and where only some of the
        ranks that share a parameter have a gradient of it.
        """
        known = tuple([gradient is not None for gradient in gradients])
        if known != self._last[0]:
            self._last = known, torch.tensor(known, device=self._device)
        present = self._last[1]
        accepted = self._usable(gradients) & present
        if agree is None:
            skipped = accepted ^ present
        else:
            flags = torch.stack([accepted, present, ~present]).int()
            flags[2] -= 1  # -1 where a gradient is present: its minimum tells of any rank, that of the row above of all
            flags = agree(flags)
            accepted = flags[0] == 1
            on_all = flags[1] == 1
            on_some = flags[2] == -1
            skipped = on_all & ~accepted
            self._counts[2] += on_some & ~on_all
        self._counts[:2] += skipped
        self._counts[0] *= ~accepted
        self._report()
        return accepted

    def _usable(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Which gradients have a norm of at most :data:`LARGEST_NORM`."""
        norms = [self._zero] * len(gradients)
        nonempty = {i: x for i, x in enumerate(gradients) if x is not None and x.numel()}
        for i, norm in zip(nonempty, norms_of(nonempty.values()), strict=True):
            norms[i] = norm
        return torch.stack(norms) <= LARGEST_NORM  # false for NaN, too

    def _report(self) -> None:
        counts = self._counts
        if self._device.type != "cpu":  # those of some steps ago, on the host by now
            self._pending.append(to_host(counts, self._device))
            if len(self._pending) <= _DELAY:
                return
            counts = self._pending.popleft()()
        total = int(counts[1].sum())
        if not counts[2].any() and total == self._reported:
            return
        in_a_row, _, partly = counts.tolist()
        for name, count in zip(self._names, partly, strict=True):
            if count:
                raise RuntimeError(
                    f"{name} has a gradient on some of the ranks that share it, none on others: let its module take "
                    "part in the loss on all of them or on none"
                )
        names = {name: count for name, count in zip(self._names, in_a_row, strict=True) if count}
        if max(names.values(), default=0) >= MAX_IN_A_ROW:
            raise RuntimeError(
                f"{self._looked_at} were not finite in {MAX_IN_A_ROW} steps in a row, or above 2^50 in norm, "
                f"of {listed(names)}: these parameters stand still; look for {self._advice}"
            )
        skipped = f"their steps are skipped, {total} in all so far"
        logger.warning(f"{self._looked_at} are not finite, or above 2^50 in norm, of {listed(names)}: {skipped}")
        self._reported = total


class Refusing:
    """Refuses gradients that an optimizer can neither leave out nor go on from.

    Args:
        name: of the optimizer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # of each step and device: parameters, and which of their gradients are usable
        self._pending: deque[list[tuple[list[Tensor], Callable[[], Tensor]]]] = deque()

    def look(self, parameters: Iterable[Tensor], groups: Sequence[dict[str, Any]]) -> None:
        """Look at the gradients of a step; a GPU tells of those two steps before.

        A ``RuntimeError`` as :meth:`read`.
        """
        by_device: dict[torch.device, dict[Tensor, Tensor]] = {}  # parameters and their gradients
        for parameter in parameters:
            gradient = None if parameter.grad is None else local(parameter.grad)
            if gradient is not None and gradient.numel():
                by_device.setdefault(gradient.device, {})[parameter] = gradient
        of_step = []
        for device, some in by_device.items():
            usable = torch.stack(norms_of(some.values())) <= LARGEST_NORM
            of_step.append((list(some), to_host(usable, device)))
        self._pending.append(of_step)
        on_cpu = {device.type for device in by_device} == {"cpu"}  # which knows at once
        self.read(groups, 0 if on_cpu else _DELAY)

    def read(self, groups: Sequence[dict[str, Any]], but: int = 0) -> None:
        """Refuse, by a ``RuntimeError``, gradients of all ``but`` the last steps.

        ``groups`` say what parameters are called.
        """
        while len(self._pending) > but:
            refused = []
            for some, usable in self._pending.popleft():
                refused += [p for p, is_usable in zip(some, usable().tolist(), strict=True) if not is_usable]
            if refused:
                raise RuntimeError(
                    f"{self._name} got gradients that are not finite, or above 2^50 in norm, of "
                    f"{listed(_called(p, groups) for p in refused)}: it leaves out no step, and would keep them in its "
                    "state for ever. Look for a learning rate that is too high, or for a loss that overflows, and let "
                    "a clipper or scaler look before the step. On a GPU the step is made: go on from the last "
                    "checkpoint"
                )


def norms_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Norms of tensors that have entries, in fp32, or in fp64 where they are."""
    of_dtypes: dict[torch.dtype, dict[int, Tensor]] = {}
    for i, x in enumerate(tensors):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        of_dtypes.setdefault(wide, {})[i] = x
    norms: dict[int, Tensor] = {}
    for wide, some in of_dtypes.items():
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


def check_gradients(
    name: str, parameters: Iterable[Tensor], groups: Sequence[dict[str, Any]], placements: bool = True
) -> None:
    """Refuse gradients that are sparse or placed otherwise."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters]
    placements = placements and (has_dtensors(parameters) or has_dtensors(gradients))
    if not placements and all(x is None or x.layout is torch.strided for x in gradients):
        return
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{name} takes dense gradients, but that of {_called(parameter, groups)} is sparse ({gradient.layout})"
            )
        if not placements or not (isinstance(gradient, DTensor) or isinstance(parameter, DTensor)):
            continue
        if _is_summand(gradient) or local(gradient).shape != local(parameter).shape:
            raise ValueError(
                f"{name} takes gradients that lie as their parameters, but that of {_called(parameter, groups)} has "
                f"placements {getattr(gradient, 'placements', None)}, and the parameter "
                f"{getattr(parameter, 'placements', None)}: before the step, set parameter.grad to "
                "parameter.grad.redistribute(placements=parameter.placements)"
            )


def _called(parameter: Tensor, groups: Sequence[dict[str, Any]]) -> str:
    return dict(zip(parameters_in(groups), parameter_names(groups), strict=True))[parameter]


def _is_summand(gradient: Tensor) -> bool:
    """Whether each rank has its own summand, as torch leaves those of norms under sequence parallelism."""
    if not isinstance(gradient, DTensor):
        return False
    placed = enumerate(gradient.placements)
    return any(x.is_partial() and gradient.device_mesh.size(i) > 1 for i, x in placed)


class WithoutGradients:
    """Warns once of groups that have no gradient in two steps."""

    def __init__(self) -> None:
        self.told = False
        self._before: set[int] = set()  # groups without a gradient in the last step

    def look(self, name: str, groups: Sequence[dict[str, Any]]) -> None:
        """Look at the gradients of a step; an optimizer's ``name`` begins the warning."""
        if self.told:
            return
        now = set()
        for number, group in enumerate(groups):
            if group["params"] and all(p.grad is None for p in group["params"]):
                now.add(number)
        twice = now & self._before
        self._before = now
        if not twice:
            return
        self.told = True
        without = parameters_in([groups[number] for number in sorted(twice)])
        called = dict(zip(parameters_in(groups), parameter_names(groups), strict=True))
        if any(p.requires_grad for p in without):
            why = (
                "fully_shard and the like replace the parameters of a model, so build the optimizer after them, of "
                "those that the model has then; else call backward() before step(), and zero_grad() after it"
            )
        else:
            why = (
                "they are frozen. PEFT, also by TRL's peft_config, freezes a model's parameters and adds others: wrap "
                "the model first, and build the optimizer of what it trains then"
            )
        logger.warning(
            f"{name}: in two steps no parameter of a whole group had a gradient, so these {len(without)} stay as they "
            f"are: {listed(called[p] for p in without)}: {why}"
        )


def warn_of_fp16(names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Warn of parameters in fp16, whose range is too small."""
    half = [name for name, p in zip(names, parameters, strict=True) if p.dtype == torch.float16]
    if half:
        logger.warning(
            f"{listed(half)}: in fp16, gradients and state below 6e-8 become 0 (AdamW's eps of 1e-8 too) and those "
            "above 65504 inf; keep parameters in fp32 and compute under torch.autocast, or take bf16"
        )


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the first names and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
