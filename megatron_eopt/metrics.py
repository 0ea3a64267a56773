"""Figures of sampled steps of optimizers, reduced over all ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import local, parameters_in
from megatron_eopt.optimizers.with_adamw import Muon
from megatron_eopt.parallel.watched import PHASES, Watched
from megatron_eopt.registry import BUILT_AS, EMERGING_OPTIMIZERS

Metrics = dict[str, dict[str, float]]
"""Optimizer -> figure of docs/metrics.md -> value."""

_MS = tuple(f"{phase}_ms" for phase in PHASES)
# What is kept of an optimizer on a rank, by how that of several, and of all ranks, follows.
_SUMS = "matrices effective_rank effective_rank_share residual squares entries predicted gradient".split()
_LARGEST = ["largest_residual", "smallest_effective_rank_share", "learning_rate", "skipped", "sent_mb", *_MS]


class Sampler:
    """Watches single steps of torch optimizers.

    Times and bytes are those of the rank with the most. Figures of matrices are means over the whole model.
    """

    def __init__(self, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        self._optimizers = list(optimizers)
        self._device = device
        self._began = False
        self._watched: dict[int, Watched] = {}
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def begin(self) -> None:
        """Watch the next step of each optimizer."""
        self._began = True
        self._watched = {}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._began:
            watched = self._watched[id(optimizer)] = Watched(self._device)
            if isinstance(optimizer, BaseOptimizer):
                optimizer.watch(watched)
            watched.enter("update")

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._began:
            self._watched[id(optimizer)].leave()
            if isinstance(optimizer, BaseOptimizer):
                optimizer.watch(None)

    def end(self, squared_gradients: Mapping[int, float], norm: float | None = None) -> Metrics:
        """Figures since :meth:`begin`; all ranks call it together.

        It waits for the device, and all ranks get the same.

        Args:
            squared_gradients: ``id`` of an optimizer -> this rank's summand of its squared gradient norm; if absent, no
                norm.
            norm: of all gradients before clipping, if they were clipped.
        """
        self._began = False
        names = [*sorted(EMERGING_OPTIMIZERS), "adam", "other"]
        sums = {name: dict.fromkeys(_SUMS, 0.0) for name in names}
        largest = {name: dict.fromkeys(_LARGEST, -math.inf) for name in names}
        for optimizer in self._optimizers:
            watched = self._watched.get(id(optimizer))
            if watched is None or not any(group["params"] for group in optimizer.param_groups):
                continue
            name = name_of(optimizer)
            figures = watched.figures()
            for figure, value in _summands(watched, figures, squared_gradients.get(id(optimizer), math.nan)).items():
                sums[name][figure] += value
            for figure, value in _peaks(optimizer, watched, figures).items():
                largest[name][figure] = max(largest[name][figure], value)
        self._watched = {}
        if dist.is_initialized():
            _reduce(sums, dist.ReduceOp.SUM, self._device)
            _reduce(largest, dist.ReduceOp.MAX, self._device)
        total = sum(of_one["gradient"] for of_one in sums.values())
        if norm and total > 0:
            for of_one in sums.values():
                of_one["gradient"] *= norm**2 / total
        metrics: Metrics = {}
        for name in names:
            if largest[name]["skipped"] >= 0:  # it stepped on some rank
                metrics[name] = _figures(sums[name], largest[name])
        return metrics


def _reduce(figures: Mapping[str, dict[str, float]], op: Any, device: torch.device) -> None:
    """Reduce figures of optimizers over all ranks."""
    values = [list(of_one.values()) for of_one in figures.values()]
    reduced = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op)
    for of_one, row in zip(figures.values(), reduced.tolist(), strict=True):
        of_one.update(zip(of_one, row, strict=True))


def _summands(watched: Watched, figures: Tensor, gradient: float) -> dict[str, float]:
    """What is summed over ranks."""
    ranks, shares, residuals = figures
    squares, entries, predicted = watched.sizes()
    return {
        "matrices": len(ranks),
        "effective_rank": ranks.sum().item(),
        "effective_rank_share": shares.sum().item(),
        "residual": residuals.sum().item(),
        "squares": squares,
        "entries": entries,
        "predicted": predicted,
        "gradient": gradient,
    }


def _peaks(optimizer: Optimizer, watched: Watched, figures: Tensor) -> dict[str, float]:
    """Of what the largest counts; of the smallest share, the negative."""
    _, shares, residuals = figures
    peaks = {
        "largest_residual": max(residuals.tolist(), default=-math.inf),
        "smallest_effective_rank_share": -min(shares.tolist(), default=math.inf),
        "learning_rate": max(float(group["lr"]) for group in optimizer.param_groups if group["params"]),
        "skipped": 0.0,
        "sent_mb": watched.sent / 1e6,
    }
    if isinstance(optimizer, BaseOptimizer):
        peaks["skipped"] = optimizer.skipped_steps()
    for phase, seconds in watched.seconds().items():
        peaks[f"{phase}_ms"] = 1e3 * seconds
    return peaks


def _figures(sums: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, float]:
    figures = {"learning_rate": largest["learning_rate"]}
    if not math.isnan(sums["gradient"]):
        figures["grad_norm"] = math.sqrt(max(sums["gradient"], 0.0))
    if sums["entries"]:
        figures["update_rms"] = math.sqrt(sums["squares"] / sums["entries"])
        if not math.isnan(sums["predicted"]):
            figures["predicted_update_rms"] = math.sqrt(sums["predicted"] / sums["entries"])
    if sums["matrices"]:
        figures |= {
            "residual": sums["residual"] / sums["matrices"],
            "largest_residual": largest["largest_residual"],
            "effective_rank": sums["effective_rank"] / sums["matrices"],
            "effective_rank_share": sums["effective_rank_share"] / sums["matrices"],
            "smallest_effective_rank_share": -largest["smallest_effective_rank_share"],
        }
    for name in ("skipped", *_MS, "sent_mb"):
        figures[name] = largest[name]
    return figures


def name_of(optimizer: Optimizer) -> str:
    """Name for ``--optimizer``, else ``adam`` or ``other``."""
    if optimizer in BUILT_AS:
        return BUILT_AS[optimizer]
    names = {entry.optimizer_cls: name for name, entry in sorted(EMERGING_OPTIMIZERS.items())}
    bases = type(optimizer).__mro__
    for cls in bases:
        if cls in names:
            return names[cls]
    return "adam" if any(cls.__name__.endswith(("Adam", "AdamW")) for cls in bases) else "other"


def line(metrics: Metrics) -> str:
    """The figures for a log line; equal rates come once."""
    # Megatron's own line has the rate of the step after this one
    rates = {name: f"{figures['learning_rate']:.3g}" for name, figures in metrics.items()}
    different = sorted(set(rates.values()))
    if len(different) > 1:
        different = [f"{rate} ({name})" for name, rate in rates.items()]
    parts = [f"stepped by a rate of {', '.join(different)}"]
    for name, figures in metrics.items():
        parts.append(f"{name}: {_text(figures)}")
    return " | ".join(parts)


def _text(figures: Mapping[str, float]) -> str:
    parts = []
    if "grad_norm" in figures:
        parts.append(f"grad norm {figures['grad_norm']:.3g}")
    if "update_rms" in figures:
        update = f"update RMS {figures['update_rms']:.3g}"
        if "predicted_update_rms" in figures:
            update += f" ({figures['predicted_update_rms']:.3g} predicted)"
        parts.append(update)
    if "residual" in figures:
        parts.append(f"residual {figures['residual']:.2g} (largest {figures['largest_residual']:.2g})")
        parts.append(f"effective rank {figures['effective_rank']:.3g} ({figures['effective_rank_share']:.1%})")
    if figures["skipped"]:
        parts.append(f"skipped {figures['skipped']:.0f}")
    times = [f"{phase} {figures[f'{phase}_ms']:.3g}" for phase in PHASES]
    parts.append(f"ms {', '.join(times)}")
    if figures["sent_mb"]:
        parts.append(f"{figures['sent_mb']:.3g} MB sent")
    return ", ".join(parts)


def watch(
    optimizer: Optimizer | Sequence[Optimizer], callback: Callable[[int, Metrics], None], interval: int = 100
) -> None:
    """Call ``callback(step, metrics)`` after every ``interval``-th step.

    Other steps measure nothing and wait for no device. With ``torch.distributed`` all ranks step together, and each
    calls its own callback with the same figures, which docs/metrics.md lists.

    Args:
        optimizer: of this package or of torch, or several that step in turn, in this order.
        callback: gets the number of steps since this call, from 1, and the figures.
        interval: at least 1.

    Raises:
        ValueError: for an ``interval`` that is no positive integer, or without parameters.
    """
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval is a number of steps, 1 or more, got {interval!r}")
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    inner = list[Optimizer]()
    for outer in given:
        inner += _inside(outer)
    parameters = list[Tensor]()
    for each in inner:
        parameters += parameters_in(each.param_groups)
    if not parameters:
        raise ValueError("there is nothing to watch: the optimizers have no parameters")
    steps = 0
    due = False

    def before(*_: Any) -> None:
        nonlocal steps, due
        steps += 1
        due = steps % interval == 0
        if due:
            sampler.begin()

    def after(*_: Any) -> None:
        if due:
            callback(steps, sampler.end({id(each): _squared_gradients(each) for each in inner}))

    given[0].register_step_pre_hook(before)  # before those of the sampler
    sampler = Sampler(inner, local(parameters[0]).device)
    given[-1].register_step_post_hook(after)


def _inside(optimizer: Optimizer) -> list[Optimizer]:
    if isinstance(optimizer, Muon):
        return [part for part in (optimizer.matrices, optimizer.adamw) if part is not None]
    return [optimizer]


def _squared_gradients(optimizer: Optimizer) -> float:
    """This rank's summand of an optimizer's squared gradient norm."""
    gradients = [p.grad for p in parameters_in(optimizer.param_groups) if p.grad is not None]
    total = 0.0
    for gradient, square in zip(gradients, squared_norms(gradients), strict=True):
        shards = _shards(gradient) if isinstance(gradient, DTensor) else 1
        total += shards * square
    return total / dist.get_world_size() if dist.is_initialized() else total


def _shards(x: DTensor) -> int:
    return math.prod(x.device_mesh.size(i) for i, each in enumerate(x.placements) if not each.is_replicate())


def squared_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Squared norms of this rank's shards; waits for the device."""
    if not tensors:
        return []
    norms = torch._foreach_norm([local(x.detach()) for x in tensors], dtype=torch.float32)
    return torch.stack(norms).double().square().tolist()
