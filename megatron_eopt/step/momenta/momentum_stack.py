"""The elementwise half of a step: weights decay, momenta follow gradients, scaled factors are subtracted.

What groups modify is written out in :mod:`~megatron_eopt.settings.modifiers`.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.statistics import StatisticsRequest
from megatron_eopt.settings.groups import MOMENTUM_STEPS
from megatron_eopt.settings.modifiers import RADIUS
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step import foreach
from megatron_eopt.step.foreach import MomentumRule, Tensors
from megatron_eopt.step.rounding import store
from megatron_eopt.step.stacks import (
    GRADIENT,
    WEIGHT,
    Chunk,
    Request,
    Stack,
    Write,
    by_stack,
    joined,
    matrices_of,
    shards_of,
)
from megatron_eopt.step.state import MOMENTUM_BUFFER
from megatron_eopt.step.weight_step import (
    decay_cautiously,
    move,
    on_spheres,
    resized,
    squares_and_products,
    squares_of_shards,
)


class MomentumStack(Stack):
    """A stack whose momenta are orthogonalized.

    With ``kernels`` two launches do its elementwise work, and nothing is split into shards; without, torch does that of
    all stacks of a group together.

    Attributes:
        kernels: a :class:`~megatron_eopt.step.momenta.step_kernels.StepKernels`, or None.
        has_views: whether kernels read factors where they lie, which nothing may write to.
        scale: what multiplies the orthogonal factor of each matrix.
        rounded: whether momenta are in bf16, and rounded at random.
        beta: of the momentum in this step.
        nesterov: whether that looks ahead.
        decays: whether there is one; a tensor may be one, since no device is asked.
        compared: what has the norms of gradients, and of updates: shards, or norms of their parts. Of namo alone.
    """

    kernels: Any = None
    has_views: bool = False
    scale: float = 1.0
    rounded: bool = False
    beta: float
    nesterov: bool
    decays: bool
    compared: tuple[Tensors, Tensors] = ((), ())

    @property
    def gradients(self) -> list[Tensor]:
        """Shards of gradients, in the dtypes in which momenta are averaged."""
        gradients = []
        of_members = zip(self.shards(GRADIENT), self.shards(MOMENTUM_BUFFER), self.members, strict=True)
        for g, m, member in of_members:
            dtype = member.parameter.dtype
            if m.dtype != dtype:
                dtype = torch.promote_types(m.dtype, dtype)
            gradients.append(g if g.dtype == dtype else g.to(dtype))
        return gradients

    def if_ok(self, value: Scalar) -> Tensor:
        """A number in fp64, or 0 where the step is skipped."""
        if self.ok is None:
            return torch.as_tensor(value, dtype=torch.float64, device=self.wholes(WEIGHT)[0].device)
        return self.ok.double() * value  # without a copy from the host, for which a GPU would wait

    def momentum(self, rule: MomentumRule = foreach.average) -> Request:
        """``m += (1 - beta) (g - m)``, or another rule; shards of ``m`` after the look-ahead, or what writes them.

        Without a look-ahead these may be the momenta themselves. L2 decay adds ``weight_decay * p`` to ``g``. Momenta
        in bf16 are averaged, and looked ahead from, in fp32.
        """
        return Request(momenta, rule)

    def inner_products(self, a: list[Tensor] | Write, b: Tensors) -> Request:
        """``<A, B>`` (n,) of whole matrices; ``A`` is what :meth:`momentum` returned."""
        return Request(inner_products, (a, b))


class Update(NamedTuple):
    """What is subtracted from a stack of weights, before the learning rate: scaled factors."""

    factors: Tensors
    scale: float | Tensor  # of all; or of each, (n,) or of its rows (n x rows x 1) or columns (n x 1 x columns)
    divided: bool = False  # whether kernels divide factors by ``sqrt(v) + eps`` before


Updates = Mapping[MomentumStack, Update]


def decay(chunk: Chunk[MomentumStack]) -> None:
    """``p -= lr * weight_decay * p``.

    L2 decay is of the gradient; kernels decay when they subtract; cautious decay waits for the update.
    """
    for alike in chunk.groups:
        first = alike[0]
        waits = first.modifiers.decay_method == "l2" or first.modifiers.cautious_weight_decay
        if first.kernels is None and first.decays and not waits:
            foreach.scale(shards_of(alike, WEIGHT), 1 - first.decay, first.ok)


def momenta(stacks: Sequence[MomentumStack], rules: Sequence[MomentumRule]) -> Sequence[list[Tensor] | Write]:
    """See :meth:`MomentumStack.momentum`. Raises a ``ValueError`` for a rule that kernels do not have."""
    [rule, *others] = dict.fromkeys(rules)
    if others:
        raise ValueError("all groups take one rule of momenta")
    if stacks[0].kernels is None:
        return followed(stacks, [stack.gradients for stack in stacks], rule)
    if rule not in (foreach.average, foreach.heavy_ball):
        raise ValueError(f"kernels of steps have no rule {rule.__name__} of momenta: set step_kernels='torch'")

    def write(some: Sequence[MomentumStack], updates: Sequence[Tensors]) -> None:
        for stack, of_stack in zip(some, updates, strict=True):
            compares = stack.modifiers.moment2_method == "namo"
            norms = stack.kernels.momentum(stack, of_stack, rule is foreach.heavy_ball, measured=compares)
            if compares:
                stack.compared = norms

    return [_written(stack, write) if _writes_to_factors(stack) else write for stack in stacks]


def _writes_to_factors(stack: MomentumStack) -> bool:
    return stack.modifiers.moment2_method != "none" and not stack.has_views


def _written(stack: MomentumStack, write: Write) -> list[Tensor]:
    """What is written of a stack, as tensors of one memory."""
    shape = stack.chunk.engine.shard(stack.matrix).shape
    updates = list(stack.wholes(WEIGHT)[0].new_empty(len(stack.members), *shape).unbind())
    write([stack], [updates])
    return updates


def followed(
    stacks: Sequence[MomentumStack], gradients: Sequence[list[Tensor]], rule: MomentumRule = foreach.average
) -> list[list[Tensor]]:
    """Let momenta follow gradients, by torch; their shards after the look-ahead."""
    gradients_of = dict(zip(stacks, gradients, strict=True))
    updates: dict[MomentumStack, list[Tensor]] = {}
    for alike in stacks[0].chunk.groups:
        first = alike[0]
        kept = shards_of(alike, MOMENTUM_BUFFER)
        g = joined(gradients_of[stack] for stack in alike)
        m = kept
        if first.rounded:
            m = [x.float() for x in kept]
            g = [x.float() for x in g]
        if first.decays and first.modifiers.decay_method == "l2":
            g = foreach.with_decay(g, shards_of(alike, WEIGHT), first.weight_decay)
        u = rule(m, g, first.beta, first.nesterov, first.ok)
        if first.rounded:
            store(kept, m, first.group[MOMENTUM_STEPS])
            weights = joined(stack.wholes(WEIGHT) for stack in alike)
            u = [x.to(weight.dtype) for x, weight in zip(u, weights, strict=True)]
        updates.update(zip(alike, by_stack(alike, u), strict=True))
        if first.modifiers.moment2_method == "namo":
            for stack in alike:
                stack.compared = gradients_of[stack], list(updates[stack])
    return [updates[stack] for stack in stacks]


def inner_products(
    stacks: Sequence[MomentumStack], pairs: Sequence[tuple[list[Tensor] | Write, Tensors]]
) -> Sequence[Tensor]:
    """See :meth:`MomentumStack.inner_products`."""
    matrices = matrices_of(stacks)
    engine = stacks[0].chunk.engine
    if stacks[0].kernels is None:
        wanted = []
        for stack, (a, b) in zip(stacks, pairs, strict=True):
            assert isinstance(a, list)
            wanted += [StatisticsRequest(matrix=stack.matrix, x=x, inner=y) for x, y in zip(a, b, strict=True)]
        products = torch.stack([of_matrix["inner_product"] for of_matrix in engine.statistics(wanted)])
    else:
        norms = [stack.kernels.products_of_updates(stack, b) for stack, (_, b) in zip(stacks, pairs, strict=True)]
        positive, negative = squares_of_shards(engine, matrices, *map(joined, zip(*norms, strict=True)))
        products = (positive - negative).float()
    return products.split([len(stack.members) for stack in stacks])


def subtract(updates: Updates, chunk: Chunk[MomentumStack]) -> None:
    """``p -= lr * scale * factor``; may write to factors."""
    if chunk.copies:
        chunk.write_back()  # kernels write to the parameters themselves
    measured: list[tuple[list[MomentumStack], list[Tensor]]] = []
    for alike in chunk.groups:
        first = alike[0]
        if first.has_views:
            for stack in alike:
                stack.kernels.subtract(stack, *updates[stack])
            continue
        factors = scaled([updates[stack] for stack in alike])
        if first.decays and first.modifiers.cautious_weight_decay:
            weights = shards_of(alike, WEIGHT)
            decay_cautiously(weights, factors, 1 - first.if_ok(first.decay))
        if first.modifiers.measured:
            measured.append((alike, factors))
        else:
            weights = shards_of(alike, WEIGHT)
            foreach.subtract(weights, factors, first.group["lr"], first.ok)
    if measured:
        _rotate(measured, chunk.engine)


def scaled(updates: Iterable[Update]) -> list[Tensor]:
    """``s O`` of each logical matrix, in place."""
    factors = list[Tensor]()
    measured = list[Tensor]()
    on_device = list[Tensor]()
    by_number: dict[float, list[Tensor]] = {}  # one for each shape
    for update in updates:
        factors += update.factors
        if isinstance(update.scale, Tensor):
            measured += update.factors
            on_device += update.scale.unbind()
        elif update.scale != 1:
            by_number.setdefault(update.scale, []).extend(update.factors)
    if measured:
        foreach.scale_each(measured, on_device)
    for number, tensors in by_number.items():
        exact = torch.as_tensor(number, dtype=torch.float64) if tensors[0].device.type == "cpu" else number
        torch._foreach_mul_(tensors, exact)
    return factors


def _rotate(measured: Sequence[tuple[list[MomentumStack], list[Tensor]]], engine: Engine) -> None:
    """``W <- (W - a U) b``, by one reduction for all groups."""
    squares, inner = _measures(measured, engine)
    counts = [len(factors) for _, factors in measured]
    of_groups = zip(measured, squares.split(counts, 1), inner.split(counts), strict=True)
    for (alike, factors), norms, products in of_groups:
        first = alike[0]
        rate = first.if_ok(first.group["lr"])
        if first.modifiers.holds:
            radii = torch.stack(joined(stack.of_each(RADIUS) for stack in alike))
            coefficients = on_spheres(norms, products, radii, radii * rate)
        else:
            sizes = [prod(matrix.shape) for matrix in matrices_of(alike)]
            coefficients = resized(norms, products, rate, first.modifiers, sizes)
        if first.kernels is None:
            move(shards_of(alike, WEIGHT), factors, coefficients)
            continue
        coefficients = coefficients.float()
        of_stacks = by_stack(alike, factors), coefficients.split([len(stack.members) for stack in alike])
        for stack, some, numbers in zip(alike, *of_stacks, strict=True):
            stack.kernels.rotate(stack, some, numbers)


def _measures(measured: Sequence[tuple[list[MomentumStack], list[Tensor]]], engine: Engine) -> tuple[Tensor, Tensor]:
    """Squared norms (2, n) of weights and updates, and their inner products (n,)."""
    stacks = [stack for alike, _ in measured for stack in alike]
    factors = joined(of_group for _, of_group in measured)
    matrices = matrices_of(stacks)
    if stacks[0].kernels is None:
        weights = shards_of(stacks, WEIGHT)
        return squares_and_products(engine, matrices, weights, factors)
    norms = []
    for stack, some in zip(stacks, by_stack(stacks, factors), strict=True):
        norms.append(stack.kernels.products_of_weights(stack, some))
    *squares, positive, negative = squares_of_shards(engine, matrices, *map(joined, zip(*norms, strict=True)))
    return torch.stack(squares), positive - negative
