"""Muon's step, in multi-tensor operations that relatives share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.foreach import Mask, MomentumRule, Tensors
from megatron_eopt.optimizers.group_settings import MOMENTUM_STEPS, DecayMethod, Scalar
from megatron_eopt.optimizers.rounding import Numbered, in_fp32, store
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program


@dataclass(frozen=True)
class Batch:
    """One group's parameters and state in a step."""

    indices: list[int]  # of the parameters, among all of the optimizer
    parameters: list[Tensor]  # in the order of the group
    weights: list[Tensor]  # this rank's part of each of them
    momenta: list[Tensor]  # of each momentum
    gradients: list[Tensor]  # of each gradient; chosen() has them in the dtype of averages
    further: list[list[Tensor]]  # of what else is kept of each parameter and changed in a step
    settings: dict[str, Any]  # of the group
    lr: Scalar
    beta: float  # of the momentum in this step
    nesterov: bool
    weight_decay: Scalar
    decays: bool  # whether there is a weight decay; a tensor may be one, since no device is asked
    decay_method: DecayMethod
    accepted: Mask = None
    rounded: list[Numbered] | None = None  # the entries of momenta in bf16 or 8 bits: random bits follow from them
    scales: list[Tensor] | None = None  # of momenta in 8 bits

    @property
    def changed(self) -> list[list[Tensor]]:
        """Weights, momenta and each kind of further state, which steps change."""
        scales = [] if self.scales is None else [self.scales]
        return [self.weights, self.momenta, *scales, *map(list, zip(*self.further, strict=True))]

    def flag(self, index: int) -> Tensor | bool:
        """Whether one of the parameters steps."""
        return True if self.accepted is None else self.accepted[index]


@dataclass(frozen=True)
class Chunk:
    """The parameters that a program works on."""

    batches: list[Batch]
    indices: Sequence[int]  # of the parameters, ascending
    scales: list[float]  # what multiplies the orthogonal factor of each of their logical matrices
    watch: Callable[[Sequence[int], Tensors], None] | None = None  # is shown the updates of logical matrices


def muon(chunk: Chunk, engine: Engine) -> Program:
    """Muon's step of the parameters of a chunk [1].

    ``p`` is a parameter, ``g`` its gradient, ``m`` its momentum; without ``nesterov`` ``u`` is ``m``. ``O`` is the
    orthogonal factor of a whole logical matrix of ``u``, on whichever ranks it lies, and ``s`` its scale.

    [1] Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/
    """
    decay(chunk)  # p -= lr * weight_decay * p
    u = engine.split(chunk.indices, momentum(chunk))  # m += (1 - beta) (g - m);  u = (1 - beta) g + beta m
    factors = yield from engine.orthogonalize(chunk.indices, u)  # O of each whole logical matrix
    subtract(chunk, engine, scaled(factors, chunk.scales))  # p -= lr * s O


def decay(chunk: Chunk) -> None:
    """Apply weight decay; ``l2`` changes no parameter."""
    for batch in chunk.batches:
        if batch.decays and batch.decay_method != "l2":
            factor = 1 - foreach.decay_power(batch.lr, batch.decay_method) * batch.weight_decay
            foreach.scale(batch.weights, factor, batch.accepted)


def momentum(chunk: Chunk, rule: MomentumRule = foreach.average) -> list[Tensor]:
    """Update momenta; returns them after the look-ahead.

    ``m += (1 - beta) (g - m)``, or another rule. Without Nesterov's look-ahead the result may be the momenta
    themselves. L2 decay adds ``weight_decay * p`` to ``g``. Momenta in bf16 or 8 bits are averaged, and looked ahead
    from, in fp32.
    """
    updates = list[Tensor]()
    for batch in chunk.batches:
        momenta, gradients = batch.momenta, batch.gradients
        if batch.rounded is not None:
            momenta, gradients = in_fp32(momenta, batch.scales, batch.rounded), [x.float() for x in gradients]
        if batch.decays and batch.decay_method == "l2":
            gradients = foreach.with_decay(gradients, batch.weights, batch.weight_decay)
        u = rule(momenta, gradients, batch.beta, batch.nesterov, batch.accepted)
        if batch.rounded is not None:
            step = batch.settings[MOMENTUM_STEPS]
            store(batch.momenta, momenta, batch.rounded, step, batch.scales, batch.accepted)
            u = [x.to(weight.dtype) for x, weight in zip(u, batch.weights, strict=True)]
        updates += u
    return updates


def scaled(factors: list[Tensor], scales: Sequence[float]) -> list[Tensor]:
    """``s O`` of each logical matrix, in place."""
    for scale in dict.fromkeys(scales):  # one for each shape
        if scale != 1:
            foreach.scale([x for x, s in zip(factors, scales, strict=True) if s == scale], scale)
    return factors


def subtract(chunk: Chunk, engine: Engine, updates: Sequence[Tensor]) -> None:
    """``p -= lr * update``, from updates of logical matrices."""
    if chunk.watch is not None:
        chunk.watch(chunk.indices, updates)
    merged = iter(engine.merge(chunk.indices, updates))
    for batch in chunk.batches:
        pairs = zip(batch.weights, merged, strict=False)
        of_batch = [x if x.ndim == weight.ndim else x.view(weight.shape) for weight, x in pairs]
        foreach.subtract(batch.weights, of_batch, batch.lr, batch.accepted)


def chosen(batches: Sequence[Batch], parameters: Sequence[int] | None = None) -> list[Batch]:
    """Batches of some or all parameters, gradients cast for averaging."""
    taken, wanted = list(batches), None if parameters is None else set(parameters)
    if wanted is not None and len(wanted) < sum(len(batch.indices) for batch in batches):
        taken = [_subset(b, at) for b in batches if (at := [n for n, i in enumerate(b.indices) if i in wanted])]
    for number, batch in enumerate(taken):
        kept = zip(batch.momenta, batch.weights, strict=True)
        dtypes = [m.dtype if m.dtype == w.dtype else torch.promote_types(m.dtype, w.dtype) for m, w in kept]
        pairs = list(zip(batch.gradients, dtypes, strict=True))
        if any(g.dtype != dtype for g, dtype in pairs):
            taken[number] = replace(batch, gradients=[g.to(dtype) for g, dtype in pairs])
    return taken


def _subset(batch: Batch, at: Sequence[int]) -> Batch:
    lists = ("indices", "parameters", "weights", "momenta", "gradients", "further", "rounded", "scales")
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
