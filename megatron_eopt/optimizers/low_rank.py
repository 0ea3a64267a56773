"""Weights of low rank, ``W = A B^T``: the layouts of their factors, and one step of them, Spectron's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.spectral import low_rank_factors, power_iterations, rayleigh_quotients
from megatron_eopt.parallel.collectives import all_reduce, broadcast
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.records import Rectangle, whole


@dataclass(frozen=True, eq=False)
class Factor:
    """One factor, as this rank holds it: the rank is the second dimension.

    ``value``, ``momentum`` and ``u``, the singular vector that the last step found, are written to.
    """

    index: int  # among the factors that are orthogonalized together
    value: Tensor  # (rows x r), as are momentum and gradient; u is (rows,)
    momentum: Tensor
    u: Tensor
    gradient: Tensor
    label: str  # of the ranks that hold other rows; empty where this rank holds all


@dataclass(frozen=True, eq=False)
class Pair:
    """Two factors, whose step is of one size; whether they step, on their device; and the settings of their group."""

    factors: Sequence[Factor]
    accepted: Tensor
    group: Mapping[str, Any]


def spectron(pairs: Sequence[Pair], engine: Engine, power_steps: int, precision: MatmulPrecision) -> None:
    """One step of Spectron on pairs of factors; does not wait for a GPU.

    For factors ``A`` and ``B`` with gradients ``gA`` and ``gB``, in this order:

    1. weight decay of each factor: ``A -= lr * weight_decay * A``;
    2. momentum: ``mA += (1 - beta) (gA - mA)``;
    3. ``sA`` and ``sB``, the largest singular values, by power iteration;
    4. ``A -= lr / (sA + sB + 1) * orth(mA)``, and so ``B``; ``precision`` is that of the products of ``orth``.
    """
    for pair in pairs:
        # 1 - lr * weight_decay as one factor would be rounded alike in every step, and the errors would add up
        decay = pair.group["lr"] * pair.group["weight_decay"] * pair.accepted.double()
        for factor in pair.factors:
            gradient = torch.where(pair.accepted, factor.gradient.to(factor.momentum.dtype), factor.momentum)
            factor.value.sub_(factor.value * decay)
            factor.momentum.lerp_(gradient, 1 - pair.group["momentum_beta"])
    flags = [(factor, pair.accepted) for pair in pairs for factor in pair.factors]
    factors = [factor for factor, _ in flags]
    with fp32_products(precision):
        momenta, indices = [factor.momentum for factor in factors], [factor.index for factor in factors]
        directions = iter(engine.orthogonalize(momenta, indices))

    def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
        return engine.sums(tensors, [factor.label for factor in factors])

    values = [factor.value for factor in factors]
    us, vs = zip(*power_iterations(values, [factor.u for factor in factors], power_steps, summed), strict=True)
    for (factor, accepted), u in zip(flags, us, strict=True):
        factor.u.copy_(torch.where(accepted, u, factor.u))
    norms = iter(rayleigh_quotients(values, us, vs, summed))
    for pair in pairs:
        rate = pair.group["lr"] * pair.accepted.double() / (next(norms) + next(norms) + 1)
        for factor in pair.factors:
            factor.value.sub_(next(directions) * rate)


def project(
    rectangles: Iterable[Tensor], layouts: Sequence[Layout], ranks: Sequence[int], turns: Sequence[int]
) -> list[tuple[Tensor, Tensor, float]]:
    """Factors of low rank of matrices of which this rank holds shards; waits for the device.

    Matrices that are cut are put together on all ranks of their group, one at a time; the decomposition of each is made
    on one of them, which its turn says, and is sent to the others, so that all have the same to the bit.

    Args:
        rectangles: of the weights, in the dtype of the factors; made one at a time, if they are an iterator.
        layouts: of the weights.
        ranks: ``r`` of each.
        turns: of each a number, the same on the ranks that share it.

    Returns:
        This rank's rows of ``A`` and ``B``, and the relative error: NaN for a weight that is zero or not finite.
    """
    packed = []
    for rectangle, layout, r, turn in zip(rectangles, layouts, ranks, turns, strict=True):
        W, own = rectangle, layout.rectangle
        if layout.group is not None and layout.sharded:
            W = rectangle.new_zeros(layout.shape)
            W[own.top : own.bottom, own.left : own.right] = rectangle
            W = all_reduce(W, layout.group).wait()
        mine = layout.rank == turn % layout.ranks
        packed.append(_packed(W, r) if mine else W.new_empty(sum(layout.shape) * r + 1))
    found = []
    for both, layout, r, turn in zip(packed, layouts, ranks, turns, strict=True):
        if layout.group is not None:
            both = broadcast(both, turn % layout.ranks, layout.group).wait()
        A, B, error = both.split([layout.shape[0] * r, layout.shape[1] * r, 1])
        own = layout.rectangle
        found.append((A.view(-1, r)[own.top : own.bottom], B.view(-1, r)[own.left : own.right], float(error)))
    return found


def _packed(W: Tensor, r: int) -> Tensor:
    """``A``, ``B`` and the relative error, one behind the other."""
    if not W.isfinite().all():
        return W.new_full((sum(W.shape) * r + 1,), torch.nan)
    A, B, S = low_rank_factors(W, r)
    squares = S.double().square()
    error = (squares[r:].sum() / squares.sum()).sqrt().to(A.dtype)
    return torch.cat([A.reshape(-1), B.reshape(-1), error[None]])


def is_tall(layout: Layout) -> bool:
    """Whether the rank is the second dimension of a parameter that is a factor; squares count as tall."""
    return layout.shape[0] >= layout.shape[1]


def factor_layouts(matrices: Sequence[Layout], rank: int | None) -> tuple[Layout, ...]:
    """The layouts of the factors of logical matrices, ``A`` and ``B`` in turn; of one that is a factor for no rank."""
    if rank is not None:
        return tuple(_side(layout, dim, rank) for layout in matrices for dim in (0, 1))
    (own,) = matrices
    return (_side(own, 0 if is_tall(own) else 1, min(own.shape)),)


def _side(layout: Layout, dim: int, rank: int) -> Layout:
    """The layout of a factor whose rows are those of one dimension of a matrix."""
    shape = layout.shape[dim], rank
    rectangles = tuple(
        Rectangle(x.left, x.right, 0, rank) if dim else Rectangle(x.top, x.bottom, 0, rank) for x in layout.rectangles
    )
    if set(rectangles) == {whole(shape)}:  # each rank treats as its own what it has whole
        return on_one_rank(shape)
    return replace(layout, shape=shape, rectangles=rectangles)


def check_pairs(name: str, layouts: Sequence[Layout], names: Sequence[str]) -> None:
    """Refuse parameters that are not the factors of weights, two by two, by a ``ValueError`` that names the first."""
    if len(layouts) % 2:
        raise ValueError(f"{name}: a group of pairs has an even number of factors, got {len(layouts)}")
    for layout, called in zip(layouts, names, strict=True):
        if (1 if is_tall(layout) else 0) in layout.cut_dims:
            raise ValueError(
                f"{name}: {called}, a factor {layout.shape}, is cut along its rank: cut it along its long side "
                f"(under FSDP2 a shard_placement_fn says so), or keep it whole"
            )
    for (a, of_a), (b, of_b) in batched(zip(layouts, names, strict=True), 2):
        if min(a.shape) not in b.shape or min(b.shape) not in a.shape:
            raise ValueError(
                f"{name}: {of_a} and {of_b} are no factors of one weight: {a.shape} and {b.shape} have no rank in "
                f"common"
            )


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of what is kept of a parameter: fp32, or fp64 for an fp64 one."""
    return torch.promote_types(parameter.dtype, torch.float32)
