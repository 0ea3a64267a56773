"""Figures of sampled steps of optimizers, reduced over all ranks.

They compare weights before a step with those after it. No step knows that it is measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.distributed_muon import DistributedMuon
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.optimizers.with_adamw import WithAdamW
from megatron_eopt.parallel.collectives import values_of
from megatron_eopt.parallel.exchange import gather
from megatron_eopt.registry import EMERGING_OPTIMIZERS, name_of
from megatron_eopt.routing.patterns import split_name
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.foreach import decay_power
from megatron_eopt.step.parameters import NAME, local, parameters_in, sharing_groups

Metrics = dict[str, dict[str, float]]
"""Optimizer -> figure of docs/manifest.md -> value; and :data:`LAYERS` -> figure and kind of layer -> value."""

Shares = Mapping[Tensor, float]
"""Parameter -> what part of it counts on this rank, so that all ranks together count it once."""

_MOMENTA = ("momentum_buffer", "exp_avg", "exp_avg_fast", "momentum_sum")  # keys of state
LAYERS = "layers"
_MOST_KINDS = 12  # of layers; the others are one
_SAMPLE = 2**26  # entries of weights that are compared on a rank, at most twice as many


class Sample:
    """Weights before a step, and the figures that follow when it was made."""

    @torch.no_grad()
    def __init__(self, optimizers: Sequence[Optimizer], shares: Shares, device: torch.device) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if parameters_in(optimizer.param_groups)]
        self._shares = shares
        self._device = device
        # odd, to meet every column of a matrix with 2^n of them
        self._stride = sum(local(p).numel() for p in shares) // _SAMPLE | 1
        self._entries = {p: _copy(self._sampled(p)) for p in shares}
        self._middle = {}  # the same parameter on all ranks that share it
        for optimizer in self._optimizers:
            if isinstance(optimizer, TensorParallelMuon):
                parameters = parameters_in(optimizer.param_groups)
                index = len(parameters) // 2
                self._middle[optimizer] = index, parameters[index], _copy(local(parameters[index]))

    def _sampled(self, parameter: Tensor) -> Tensor:
        return local(parameter.detach()).reshape(-1)[:: self._stride]

    @torch.no_grad()
    def metrics(self, norm: float | None = None) -> Metrics:
        """The same on all ranks, which call it together.

        ``norm`` is that of all gradients before clipping, if they were clipped.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # state may be on its way to host memory
        self._weights = {p: _square(p) for p in self._shares}
        self._moved = {p: _square(self._entries[p] - self._sampled(p)) for p in self._shares}
        names = [*sorted(EMERGING_OPTIMIZERS), "adam", "sgd", "other"]
        sums = torch.zeros(len(names), 7, dtype=torch.float64, device=self._device)
        largest = torch.full((len(names), 2), -math.inf, dtype=torch.float64, device=self._device)
        for optimizer in self._optimizers:
            row = names.index(name_of(optimizer))
            sums[row] += sums.new_tensor([*self._squares(optimizer), *self._residuals(optimizer)])
            rate = max(float(group["lr"]) for group in optimizer.param_groups if group["params"])
            skipped = optimizer.skipped_steps() if isinstance(optimizer, BaseOptimizer) else 0
            largest[row] = largest[row].maximum(largest.new_tensor([rate, skipped]))
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        clipped = math.sqrt(sums[:, 0].sum())
        unclipped = norm / clipped if norm and clipped else 1.0
        metrics: Metrics = {}
        for name, of_one, (rate, skipped) in zip(names, sums.tolist(), largest.tolist(), strict=True):
            gradients, weights, momenta, updates, entries, residuals, matrices = of_one
            if rate < 0:  # no rank has it
                continue
            metrics[name] = {
                "learning_rate": rate,
                "grad_norm": unclipped * math.sqrt(gradients),
                "weight_norm": math.sqrt(weights),
                "momentum_norm": math.sqrt(momenta),
                "update_rms": math.sqrt(updates / entries) if entries else 0.0,
                "skipped": skipped,
            }
            if matrices:
                metrics[name]["residual"] = residuals / matrices
        layers = self._layers()
        if layers:
            metrics[LAYERS] = layers
        return metrics

    def _layers(self) -> dict[str, float]:
        """Norms of weights, and of what the step took from them over these, by kinds of layers."""
        kind_of = {p: kind_of_layer(getattr(p, NAME)) for p in self._shares if hasattr(p, NAME)}
        kinds = sorted(set(kind_of.values()))
        world = dist.group.WORLD
        if world is not None:  # a pipeline stage has not all
            kinds = sorted(set().union(*values_of(range(world.size()), kinds, world)))
        row_of = {kind: min(row, _MOST_KINDS) for row, kind in enumerate(kinds)}
        shown = [*kinds[:_MOST_KINDS], "others"]
        squares = torch.zeros(len(shown), 2, dtype=torch.float64, device=self._device)
        for p, kind in kind_of.items():
            entries_of_each = local(p).numel() / max(1, self._entries[p].numel())
            of_p = torch.stack([self._weights[p], self._moved[p] * entries_of_each])
            squares[row_of[kind]] += self._shares[p] * of_p
        if world is not None:
            dist.all_reduce(squares)
        layers = {}
        for kind, (weights, moved) in zip(shown, squares.tolist(), strict=True):
            if weights:
                layers[f"weight_norm of {kind}"] = math.sqrt(weights)
                layers[f"update_ratio of {kind}"] = math.sqrt(moved / weights)
        return layers

    def _squares(self, optimizer: Optimizer) -> list[float]:
        """Squares of gradients, weights, momenta and updates, and the number of entries of these."""
        owners = optimizer.ranks if isinstance(optimizer, DistributedMuon) else 1  # one of these has a momentum
        sums = torch.zeros(5, dtype=torch.float64, device=self._device)
        gradients, weights, momenta, updates, entries = sums
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            for p in group["params"]:
                share = self._shares[p]
                if p.grad is not None:
                    gradients += share * _square(p.grad)
                weights += share * self._weights[p]
                for key, x in optimizer.state.get(p, {}).items():
                    if key in _MOMENTA:
                        momenta += share * owners * _square(x)
                if lr:
                    updates += share * self._moved[p] / lr**2
                    entries += share * self._entries[p].numel()
        return sums.tolist()

    def _residuals(self, optimizer: Any) -> tuple[float, int]:
        """Sum and number of the residuals of a parameter's logical matrices."""
        if optimizer not in self._middle:
            return 0.0, 0
        index, parameter, before = self._middle[optimizer]
        group = optimizer.group_of(parameter)
        modifiers = optimizer.modifiers_of(group)
        method = modifiers.decay_method
        moved = update = before - local(parameter)
        if method != "l2" and not modifiers.cautious_weight_decay:
            update = moved - decay_power(float(group["lr"]), method) * float(group["weight_decay"]) * before
        engine = optimizer.prepare()
        found = list[float]()
        for matrix, x in zip(engine.matrices[index], engine.split([index], [update]), strict=True):
            if matrix.sharded:
                [[x]] = gather([x[None]], [matrix], engine.groups[matrix.group])()
            R = x @ x.mT if len(x) <= len(x.mT) else x.mT @ x
            # norm(s R - I)^2 / n, with the scale s that makes the trace n
            square = len(R) * _square(R) / R.trace().double().square() - 1
            found.append(square.clamp(min=0).sqrt().item())
        found = [x for x in found if math.isfinite(x)]
        return (sum(found), len(found)) if moved.any() else (0.0, 0)


def kind_of_layer(name: str) -> str:
    """What layers of a model have in common: the name of a parameter's module, without its number.

    Experts have a kind of their own; so do norms and biases, all together.
    """
    pattern, _ = split_name(name)
    words = [word for word in pattern.replace("*", "").split(".") if word]
    if words[-1] == "weight" and len(words) > 1:
        words.pop()
    *path, last = words
    if "norm" in last or "bias" in last:
        return "norms and biases"
    experts = next((word for word in path if word.endswith("experts")), None)
    return f"{experts}.{last}" if experts else last


def _copy(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def _square(x: Tensor) -> Tensor:
    """Squared norm of this rank's shard."""
    x = local(x)
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double().square()


def line(metrics: Metrics) -> str:
    """The figures of optimizers, for a log line."""
    parts = []
    for name, figures in metrics.items():
        if name == LAYERS:
            continue
        shown = [f"{figure.replace('_', ' ').replace('rms', 'RMS')} {x:.3g}" for figure, x in figures.items()]
        parts.append(f"{name}: {', '.join(shown)}")
    return " | ".join(parts)


def watch(
    optimizer: Optimizer | Sequence[Optimizer], callback: Callable[[int, Metrics], None], interval: int = 100
) -> None:
    """Call ``callback(step, metrics)`` after every ``interval``-th step.

    Other steps measure nothing and wait for no device. With ``torch.distributed`` all ranks step together, and each
    calls its own callback with the same figures, which docs/manifest.md lists.

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
    if not any(parameters_in(each.param_groups) for each in given):
        raise ValueError("there is nothing to watch: the optimizers have no parameters")
    steps = 0
    sample: Sample | None = None

    def before(*_: Any) -> None:
        nonlocal steps, sample
        steps += 1
        sample = _sample(given) if steps % interval == 0 else None

    def after(*_: Any) -> None:
        nonlocal sample
        if sample is not None:
            callback(steps, sample.metrics())
            sample = None

    given[0].register_step_pre_hook(before)
    given[-1].register_step_post_hook(after)


def _sample(optimizers: Sequence[Optimizer]) -> Sample:
    """Of ranks that all have each parameter, whole or a shard of it."""
    inner = list[Optimizer]()
    collection = None
    for outer in optimizers:
        if isinstance(outer, WithAdamW):
            inner += [part for part in (outer.matrices, outer.adamw) if part is not None]
        else:
            inner.append(outer)
    for optimizer in inner:
        if isinstance(optimizer, BaseOptimizer):
            collection = collection or optimizer.pg_collection
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    shares = {}
    for optimizer in inner:
        for p in parameters_in(optimizer.param_groups):
            shares[p] = math.prod(group.size() for group in sharing_groups(p, collection).values()) / ranks
    return Sample(inner, shares, local(next(iter(shares))).device)
