"""Muon's step, in multi-tensor operations that relatives share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.batches import Batch
from megatron_eopt.optimizers.foreach import MomentumRule, Tensors
from megatron_eopt.optimizers.modifiers import RADIUS, holds, measures
from megatron_eopt.optimizers.rounding import store
from megatron_eopt.optimizers.step_kernels import StepKernels
from megatron_eopt.optimizers.weight_step import decay_cautiously, move, on_spheres, resized
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program, Shards
from megatron_eopt.parallel.statistics import StatisticsRequest, norms_of
from megatron_eopt.settings.groups import MOMENTUM_STEPS

Scales = Sequence[float | Tensor]  # of logical matrices


@dataclass(frozen=True)
class Chunk:
    """The parameters that a program works on."""

    batches: list[Batch]
    indices: Sequence[int]  # of the parameters, ascending
    scales: list[float]  # what multiplies the orthogonal factor of each of their logical matrices
    watch: Callable[[Sequence[int], Tensors], None] | None = None  # is shown the updates of logical matrices
    kernels: StepKernels | None = None  # what does the elementwise work; None for torch


def muon(chunk: Chunk, engine: Engine) -> Program:
    """Muon's step of the parameters of a chunk [1].

    ``p`` is a parameter, ``g`` its gradient, ``m`` its momentum; without ``nesterov`` ``u`` is ``m``. ``O`` is the
    orthogonal factor of a whole logical matrix of ``u``, on whichever ranks it lies, and ``s`` its scale. What groups
    modify is in :mod:`~megatron_eopt.optimizers.modifiers`.

    [1] Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/
    """
    decay(chunk)  # p -= lr * weight_decay * p
    u = engine.split(chunk.indices, momentum(chunk))  # m += (1 - beta) (g - m);  u = (1 - beta) g + beta m
    factors = yield from engine.orthogonalize(chunk.indices, u)  # O of each whole logical matrix
    subtract(chunk, engine, factors, chunk.scales)  # p -= lr * s O


def decay(chunk: Chunk) -> None:
    """Apply weight decay; ``l2`` changes no parameter.

    Kernels do it when they subtract; cautious decay waits for the update.
    """
    for batch in chunk.batches if chunk.kernels is None else ():
        if batch.decays and batch.decay_method != "l2" and not batch.cautious:
            factor = 1 - foreach.decay_power(batch.lr, batch.decay_method) * batch.weight_decay
            foreach.scale(batch.weights, factor, batch.accepted)


def momentum(chunk: Chunk, rule: MomentumRule = foreach.average) -> Shards:
    """Update momenta; returns them after the look-ahead.

    ``m += (1 - beta) (g - m)``, or another rule. Without Nesterov's look-ahead the result may be the momenta
    themselves. L2 decay adds ``weight_decay * p`` to ``g``. Momenta in bf16 are averaged, and looked ahead from, in
    fp32. With kernels the result is what writes this rank's shards of logical matrices.
    """
    if chunk.kernels is not None:
        return partial(chunk.kernels.momentum, chunk.batches, heavy=rule is foreach.heavy_ball)
    updates = list[Tensor]()
    for batch in chunk.batches:
        momenta = batch.momenta
        gradients = batch.gradients
        if batch.rounded is not None:
            momenta = [x.float() for x in momenta]
            gradients = [x.float() for x in gradients]
        if batch.decays and batch.decay_method == "l2":
            gradients = foreach.with_decay(gradients, batch.weights, batch.weight_decay)
        u = rule(momenta, gradients, batch.beta, batch.nesterov, batch.accepted)
        if batch.rounded is not None:
            store(batch.momenta, momenta, batch.rounded, batch.settings[MOMENTUM_STEPS])
            u = [x.to(weight.dtype) for x, weight in zip(u, batch.weights, strict=True)]
        updates += u
    return updates


def kept_momentum(chunk: Chunk, engine: Engine) -> list[Tensor]:
    """Logical matrices of :func:`momentum`, for programs that read them."""
    shards = engine.split(chunk.indices, momentum(chunk))
    if not callable(shards):
        return shards
    pairs = zip(chunk.indices, (weight for batch in chunk.batches for weight in batch.weights), strict=True)
    updates = [weight.new_empty(shape) for i, weight in pairs for shape in engine.shapes(i)]
    shards(updates)
    return updates


def scaled(factors: list[Tensor], scales: Scales) -> list[Tensor]:
    """``s O`` of each logical matrix, in place."""
    pairs = list(zip(factors, scales, strict=True))
    on_device = [(x, scale) for x, scale in pairs if isinstance(scale, Tensor)]
    if on_device:
        foreach.scale_each(*map(list, zip(*on_device, strict=True)))
    on_host = [(x, scale) for x, scale in pairs if not isinstance(scale, Tensor)]
    for scale in dict.fromkeys(scale for _, scale in on_host):  # one for each shape
        if scale != 1:
            exact = torch.as_tensor(scale, dtype=torch.float64) if factors[0].device.type == "cpu" else scale
            torch._foreach_mul_([x for x, s in on_host if s == scale], exact)
    return factors


def subtract(chunk: Chunk, engine: Engine, factors: list[Tensor], scales: Scales) -> None:
    """``p -= lr * scale * factor``, as modifiers have it; may write to ``factors``."""
    remaining = iter(factors)
    of_batches = [(batch, list(islice(remaining, sum(counts_of(engine, batch))))) for batch in chunk.batches]
    if chunk.kernels is not None:
        _by_kernels(chunk, chunk.kernels, engine, of_batches, factors, scales)
        return
    updates = scaled(factors, scales)
    if chunk.watch is not None:
        chunk.watch(chunk.indices, updates)
    for batch, of_batch in of_batches:
        if batch.decays and batch.cautious:
            rate = foreach.decay_power(batch.lr, batch.decay_method) * batch.weight_decay
            decay_cautiously(batch.weights, _merged(batch, engine, of_batch), 1 - batch.column(rate))
    coefficients = iter(_coefficients(engine, [each for each in of_batches if measures(each[0].settings)]))
    for batch, of_batch in of_batches:
        if not measures(batch.settings):
            foreach.subtract(batch.weights, _merged(batch, engine, of_batch), batch.lr, batch.accepted)
            continue
        shards = engine.split(batch.indices, list(batch.weights))
        move(shards, of_batch, next(coefficients))
        for weight, x in zip(batch.weights, engine.merge(batch.indices, shards), strict=True):
            if weight is not x:
                weight.copy_(x)


def _by_kernels(
    chunk: Chunk,
    kernels: StepKernels,
    engine: Engine,
    of_batches: list[tuple[Batch, list[Tensor]]],
    factors: list[Tensor],
    scales: Scales,
) -> None:
    if chunk.watch is not None:
        several = (zip(counts_of(engine, batch), batch.weights, strict=True) for batch in chunk.batches)
        dtypes = [weight.dtype for of_batch in several for count, weight in of_batch for _ in range(count)]
        copies = [x.to(dtype, copy=True) for x, dtype in zip(factors, dtypes, strict=True)]
        chunk.watch(chunk.indices, scaled(copies, scales))
    if measures(of_batches[0][0].settings):  # all hold norms, else kernels do not serve
        kernels.rotate(chunk.batches, factors, torch.cat(_coefficients(engine, of_batches)).float())
    else:
        kernels.subtract(chunk.batches, factors, scales)


def counts_of(engine: Engine, batch: Batch) -> list[int]:
    """How many logical matrices each parameter of a batch has."""
    return [len(engine.matrices[i]) or 1 for i in batch.indices]  # without a layout one update


def _merged(batch: Batch, engine: Engine, updates: Tensors) -> list[Tensor]:
    pairs = zip(batch.weights, engine.merge(batch.indices, updates), strict=True)
    return [x if x.ndim == weight.ndim else x.view(weight.shape) for weight, x in pairs]


def _coefficients(engine: Engine, of_batches: Sequence[tuple[Batch, list[Tensor]]]) -> list[Tensor]:
    """Rows ``(moves, a, b)`` of each ``W <- (W - a U) b``, by one reduction."""
    if not of_batches:
        return []
    weights = list[StatisticsRequest]()
    updates = list[StatisticsRequest]()
    for batch, of_batch in of_batches:
        shards = engine.split(batch.indices, list(batch.weights))
        for W, x, u in zip(engine.flat(batch.indices), shards, of_batch, strict=True):
            weights.append(StatisticsRequest(matrix=W, x=x, squared_norm=True, inner=u))
            updates.append(StatisticsRequest(matrix=W, x=u, squared_norm=True))
    statistics = engine.statistics([*weights, *updates])
    done = 0
    coefficients = list[Tensor]()
    squares = norms_of(statistics).view(2, -1)
    inner = torch.stack([of_matrix["inner_product"] for of_matrix in statistics[: len(weights)]])
    for batch, of_batch in of_batches:
        at = slice(done, done := done + len(of_batch))
        counts = counts_of(engine, batch)
        if holds(batch.settings):
            radii = torch.stack([radius for of_one in batch.of_matrices(RADIUS) for radius in of_one])
            lengths = batch.masked(radii * batch.lr, counts)
            coefficients.append(on_spheres(squares[:, at], inner[at], radii, lengths))
        else:
            coefficients.append(resized(squares[:, at], inner[at], batch.column(batch.lr, counts), batch.settings))
    return coefficients


def chosen(batches: Sequence[Batch], parameters: Sequence[int] | None = None, cast: bool = True) -> list[Batch]:
    """Batches of some or all parameters; ``cast`` gradients for averaging."""
    taken = list(batches)
    wanted = None if parameters is None else set(parameters)
    if wanted is not None and len(wanted) < sum(len(batch.indices) for batch in batches):
        taken = [_subset(b, at) for b in batches if (at := [n for n, i in enumerate(b.indices) if i in wanted])]
    for number, batch in enumerate(taken if cast else ()):
        kept = zip(batch.momenta, batch.weights, strict=True)
        dtypes = [m.dtype if m.dtype == w.dtype else torch.promote_types(m.dtype, w.dtype) for m, w in kept]
        pairs = list(zip(batch.gradients, dtypes, strict=True))
        if any(g.dtype != dtype for g, dtype in pairs):
            taken[number] = replace(batch, gradients=[g.to(dtype) for g, dtype in pairs])
    return taken


def _subset(batch: Batch, at: Sequence[int]) -> Batch:
    lists = ("indices", "parameters", "weights", "momenta", "gradients", "further", "rounded")
    in_use = {name: of_all for name in lists if (of_all := getattr(batch, name)) is not None}
    changed: dict[str, Any] = {name: [of_all[n] for n in at] for name, of_all in in_use.items()}
    if batch.accepted is not None:
        flags = batch.accepted.unbind()
        changed["accepted"] = torch.stack([flags[n] for n in at])
    return replace(batch, **changed)


def with_gradients(chunk: Chunk, gradients: Tensors) -> Chunk:
    """Return the chunk with other gradients."""
    of_parameters = iter(gradients)
    batches = [replace(batch, gradients=list(islice(of_parameters, len(batch.indices)))) for batch in chunk.batches]
    return replace(chunk, batches=batches)
