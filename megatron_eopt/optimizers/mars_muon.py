"""MARS-Muon: Muon of variance-reduced gradients."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.orthogonalized import refuse_blockwise
from megatron_eopt.optimizers.tensor_parallel_muon import Modifiers, TensorParallelMuon, Transport
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.settings.records import DecayMethod, Setting
from megatron_eopt.settings.values import AT_LEAST_0
from megatron_eopt.step import foreach
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.foreach import Tensors
from megatron_eopt.step.momenta.momentum_stack import MomentumStack, Update, followed
from megatron_eopt.step.stacks import Request, Rule, Write, by_stack, joined, matrices_of, shards_of
from megatron_eopt.step.state import HAS_PREVIOUS, PREVIOUS_GRADIENT, StateTensor
from megatron_eopt.step.weight_step import squares_of_shards

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

    def update(self, stack: MomentumStack) -> Rule:
        """MARS-Muon's update of equal matrices."""
        u = yield Request(variance_reduced, None)
        O = yield stack.orthogonalize(u)
        return Update(O, stack.scale)


def variance_reduced(stacks: Sequence[MomentumStack], asked: Sequence[None]) -> Sequence[list[Tensor] | Write]:
    """Momenta of corrected and clipped gradients; gradients become the previous ones."""
    if stacks[0].kernels is not None:
        return [write_corrected for _ in asked]
    c = list[Tensor]()
    for alike in stacks[0].chunk.groups:
        first = alike[0]
        gradients = joined(stack.gradients for stack in alike)
        previous = shards_of(alike, PREVIOUS_GRADIENT)
        has_previous = joined(stack.wholes(HAS_PREVIOUS) for stack in alike)
        c += corrected(gradients, previous, has_previous, strength(first))
        torch._foreach_copy_(previous, foreach.where_each(first.ok, gradients, previous))
    [squares] = squares_of_shards(stacks[0].chunk.engine, matrices_of(stacks), c)
    foreach.scale_each(c, factors(squares.sqrt()).unbind())
    mark(stacks)
    return followed(stacks, by_stack(stacks, c))


def write_corrected(stacks: Sequence[MomentumStack], updates: Sequence[Tensors]) -> None:
    """What :func:`variance_reduced` makes, in two passes over gradients: their norms decide on the second."""
    weights = list[Tensor]()
    for alike in stacks[0].chunk.groups:
        has_previous = torch.stack(joined(stack.wholes(HAS_PREVIOUS) for stack in alike)) > 0
        weights.append(1 + has_previous.double() * strength(alike[0]))
    of_all = torch.cat(weights).float()
    corrections = torch.stack([of_all, torch.ones_like(of_all)], 1)
    of_stacks = corrections.split([len(stack.members) for stack in stacks])
    norms = list[Tensor]()
    for stack, x, some in zip(stacks, updates, of_stacks, strict=True):
        norms += stack.kernels.corrected(stack, x, some)
    [squares] = squares_of_shards(stacks[0].chunk.engine, matrices_of(stacks), norms)
    corrections[:, 1] = factors(squares.sqrt())
    for stack, x, some in zip(stacks, updates, of_stacks, strict=True):
        stack.kernels.momentum(stack, x, corrections=some)
    mark(stacks)


def strength(stack: MomentumStack) -> float:
    """How much of the change of gradients is added to them."""
    gamma: float = stack.group["gamma"]
    return gamma * stack.beta / (1 - stack.beta)


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


def factors(norms: Tensor) -> Tensor:
    """What clips matrices of these norms."""
    return LARGEST_NORM / norms.clamp(min=LARGEST_NORM)


def mark(stacks: Sequence[MomentumStack]) -> None:
    """There is a ``g_prev`` after a step with a rate above 0."""
    for alike in stacks[0].chunk.groups:
        has_previous = joined(stack.wholes(HAS_PREVIOUS) for stack in alike)
        moved = alike[0].if_ok(alike[0].group["lr"] != 0)
        torch._foreach_copy_(has_previous, torch.maximum(torch.stack(has_previous), moved).unbind())
