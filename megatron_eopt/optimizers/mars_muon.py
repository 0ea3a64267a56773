"""MARS-Muon: Muon of variance-reduced gradients."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.orthogonalized import refuse_blockwise
from megatron_eopt.optimizers.tensor_parallel_muon import Modifiers, TensorParallelMuon, Transport
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.scheduler import Program, Shards
from megatron_eopt.settings.records import DecayMethod, Setting
from megatron_eopt.settings.values import AT_LEAST_0
from megatron_eopt.step import foreach
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.foreach import Tensors
from megatron_eopt.step.state import HAS_PREVIOUS, PREVIOUS_GRADIENT, StateTensor
from megatron_eopt.step.step import Batch, Step

LARGEST_NORM = 1.0  # of a corrected gradient; the paper has no other


class MuonSettings(Transport, Modifiers, total=False):
    """What is as in Muon."""


class MarsMuon(TensorParallelMuon):
    """Muon with MARS's variance reduction [1], in its approximate form.

    For each parameter ``p`` with gradient ``g``, the gradient ``g_prev`` of its last step, momentum ``m``, and logical
    matrices of scale ``s``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``;
    2. the correction: ``c = g + gamma * beta / (1 - beta) * (g - g_prev)``, or ``c = g`` up to the first
       step with a rate above 0;
    3. the clipping: ``c / ||c||_F`` takes the place of ``c``, for each whole logical matrix whose norm is above 1;
    4. its momentum: ``m += (1 - beta) (c - m)``, and ``u = m``, or ``u = (1 - beta) c + beta m`` with ``nesterov``;
    5. Muon's update: ``p -= lr * s O``, with ``O`` the orthogonal factor of each whole logical matrix of ``u``;
    6. ``g`` is kept as ``g_prev``.

    The correction lets the momentum lag less behind the gradient. ``gamma = 1`` would make it the last gradient itself,
    so ``gamma`` is small. (The exact form takes ``g_prev`` with the batch of ``g``, by a second backward pass in each
    step.)

    Norms are those of the global logical matrices, from one all-reduce of a step for each group of ranks, so the update
    at TP=k is the update at TP=1. ``g_prev`` is as the optimizer was given it, after Megatron's ``--clip-grad``, and
    has the shape and dtype of ``p``. A step with a gradient that is not finite is skipped.
    L2 decay is added to the clipped ``c``, so that ``g_prev`` is a gradient of the loss alone. Without kernels a step
    needs memory for one further copy of all gradients.

    Args:
        params: matrices, or groups of them, which may have their own ``gamma`` beside what Muon's may have.
        momentum: ``beta``, of the exponential moving average, in [0, 1).
        nesterov: whether to look ahead, as Muon does and the paper does not.
        use_decoupled_weight_decay: decay the parameter (as AdamW does), or add to ``c``.
        gamma: strength of the correction, at least 0; 0 leaves Muon of clipped gradients.
        **settings: these, and what is not named here, as in
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Raises:
        ValueError: as by Muon; for ``gamma`` out of its range, and with ``blockwise``.

    [1] Yuan et al., MARS: Unleashing the Power of Variance Reduction for Training Large Models, arXiv 2411.10438.
    """

    own_settings = (
        Setting("gamma", "Strength of the correction, at least 0; 0 leaves Muon of clipped gradients.", AT_LEAST_0),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        *,
        gamma: float = 0.025,
        scale_mode: ScaleMode = "spectral",
        extra_scale_factor: float = 1.0,
        weight_decay_method: DecayMethod | None = None,
        **settings: Unpack[MuonSettings],
    ) -> None:
        BaseOptimizer.__init__(self, params, locals())

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        refuse_blockwise(self, "norms")

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum, the previous gradient, and whether there is one."""
        has_previous = StateTensor(HAS_PREVIOUS, (), dtype=torch.float32, non_negative=True)
        return [*super().state_tensors(parameter), StateTensor(PREVIOUS_GRADIENT), has_previous]

    @staticmethod
    def of_step(step: Step) -> Program:
        """MARS-Muon's step of some parameters."""
        step.decay()
        O = yield from step.orthogonalize(momentum(step))
        step.subtract(O, step.scales)
        for batch in step.batches:
            if step.kernels is None:  # which keep gradients when they average them
                keep(batch)
            mark(batch)


def momentum(step: Step) -> Shards:
    """:meth:`~megatron_eopt.step.step.Step.momentum` of corrected and clipped gradients."""
    strengths = [batch.group["gamma"] * batch.beta / (1 - batch.beta) for batch in step.batches]
    if step.kernels is not None:
        return by_kernels(step, strengths)
    c = list[Tensor]()
    for batch, strength in zip(step.batches, strengths, strict=True):
        c += corrected(batch.gradients, batch.states(PREVIOUS_GRADIENT), batch.states(HAS_PREVIOUS), strength)
    return step.with_gradients(clipped(step, c)).momentum()


def by_kernels(step: Step, strengths: Sequence[float]) -> Shards:
    """What writes :func:`momentum`, in two passes over gradients: their norms decide on the second."""

    def written(updates: Tensors) -> None:
        weights = list[Tensor]()
        for batch, strength in zip(step.batches, strengths, strict=True):
            of_parameters = torch.where(torch.stack(batch.states(HAS_PREVIOUS)) > 0, 1 + strength, 1.0)
            pairs = zip(of_parameters.unbind(), step.counts(batch), strict=True)
            weights.append(torch.stack([weight for weight, count in pairs for _ in range(count)]))
        joined = torch.cat(weights).float()
        corrections = torch.stack([joined, torch.ones_like(joined)], 1)
        norms = step.norms(step.kernels.corrected(step.batches, updates, corrections))
        corrections[:, 1] = factors(norms)
        step.kernels.momentum(step.batches, updates, corrections=corrections)

    return written


def corrected(gradients: Tensors, previous: Tensors, has_previous: Tensors, strength: float) -> list[Tensor]:
    """``c = g + strength (g - g_prev)``; ``g`` without ``g_prev``."""
    start = list(gradients)
    for equal in foreach.alike(gradients, previous):
        has = torch.stack([has_previous[i] for i in equal]) > 0
        g = foreach.stacked(gradients, equal)
        chosen = torch.where(has.view(-1, *[1] * (g.ndim - 1)), foreach.stacked(previous, equal), g)
        for i, x in zip(equal, chosen.unbind(), strict=True):
            start[i] = x
    torch._foreach_lerp_(start, list(gradients), 1 + strength)
    return start


def clipped(step: Step, gradients: list[Tensor]) -> list[Tensor]:
    """``c / max(1, ||c||_F)`` of each logical matrix."""
    shards = step.split(gradients)
    foreach.scale_each(shards, factors(step.norms(shards)).unbind())
    return step.merge(shards)


def factors(norms: Tensor) -> Tensor:
    """What clips matrices of these norms."""
    return LARGEST_NORM / norms.clamp(min=LARGEST_NORM)


def keep(batch: Batch) -> None:
    """``g`` becomes ``g_prev``."""
    previous = batch.states(PREVIOUS_GRADIENT)
    torch._foreach_copy_(previous, foreach.where_each(batch.ok, batch.gradients, previous))


def mark(batch: Batch) -> None:
    """There is a ``g_prev`` after a step with a rate above 0."""
    has_previous = batch.states(HAS_PREVIOUS)
    flags = torch.stack(has_previous)
    moved = batch.if_ok(batch.lr != 0)
    torch._foreach_copy_(has_previous, torch.maximum(flags, moved).unbind())
