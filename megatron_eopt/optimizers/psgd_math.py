"""PSGD's Kronecker factors, of stacks of whole matrices.

Random numbers are a hash of the step and of their place in a matrix: the same on every layout of ranks, in a resumed
run, and for all matrices of a shape, each of which is fitted by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers.rounding import mixed
from megatron_eopt.orthogonalize.precision import fp32_products

PROBES = 32  # rows that look for a spectral norm
HALF_ITERATIONS = 2  # their pairs of products
LARGEST_TURN = 0.125  # of a Procrustes step, as the second-order expansion of a rotation allows
_EPS = 1e-8


@dataclass(frozen=True)
class Whitened:
    """Stacked whole matrices (n x rows x cols) and what whitens them."""

    momentum: Tensor
    factors: list[Tensor]  # of rows and columns: (n x length x length), or diagonals (n x length)
    bounds: Tensor  # of the curvature of each factor's fit, (n x 2); 0 before the first


def started(x: Whitened, scale: float) -> Whitened:
    """Identities as factors that no fit has changed."""
    first = x.bounds[:, 0] == 0
    factors = []
    for factor in x.factors:
        unit = factor.new_ones(factor.shape[1])
        if factor.ndim == 3:
            unit = unit.diag()
        factors.append(torch.where(over(factor, first), scale * unit, factor))
    return replace(x, factors=factors)


def where(flags: Tensor, new: Whitened, old: Whitened) -> Whitened:
    """Factors and bounds of ``new`` where flags say so, else of ``old``."""
    factors = [torch.where(over(x, flags), x, y) for x, y in zip(new.factors, old.factors, strict=True)]
    return replace(old, factors=factors, bounds=torch.where(over(old.bounds, flags), new.bounds, old.bounds))


def refreshed(x: Whitened, step: int, settings: Mapping[str, Any]) -> Whitened:
    """Factors after a step of their fit, where that is finite.

    With ``Q`` of each side and ``P X = (Q_L^T Q_L) X (Q_R^T Q_R)``, ``G = P (M + noise)`` is to have rows and columns
    with a covariance of the identity: ``Q <- Q - rate / bound (G G^T - c I) Q``, ``c = entries / length``. It is turned
    towards a symmetric one by a step of the Procrustes problem.
    """
    momentum = x.momentum
    entries = momentum[0].numel()
    _, rows, cols = momentum.shape
    sizes = [entries, PROBES * rows, PROBES * rows, PROBES * cols, PROBES * cols]
    noise, *probes = normals(step, sum(sizes), momentum).split(sizes)
    damping = settings["damping_noise_scale"] + 1e-7 * momentum.abs()
    seen = preconditioned(x.factors, momentum + damping * noise.view(momentum.shape[1:]))
    rate = settings["precond_lr"] / (1 + (step - 1) / settings["precond_decay_steps"]) ** 0.5
    rate = max(rate, settings["min_precond_lr"])
    beta = settings["beta_lip"]
    factors = []
    bounds = []
    for side, factor in enumerate(x.factors):
        target = entries / factor.shape[1]
        dense = factor.ndim == 3
        if dense:
            covariance = seen @ seen.mT if side == 0 else seen.mT @ seen
            norm = largest_singular_value(covariance, probes[2 * side], covariance.diagonal(dim1=1, dim2=2).amax(1))
        else:
            covariance = seen.square().sum(2 - side)
            norm = covariance.amax(1)
        bound = torch.maximum(beta * x.bounds[:, side] + (1 - beta) * (norm + target), norm + target)
        share = over(factor, rate / bound)
        if dense:
            factor = turned(factor - share * (covariance @ factor - target * factor), probes[2 * side + 1])
        else:
            factor = factor * (1 - share * (covariance - target))
        factors.append(factor)
        bounds.append(bound)
    new = replace(x, factors=balanced(factors), bounds=torch.stack(bounds, 1))
    finite = torch.stack([y.isfinite().flatten(1).all(1) for y in (*new.factors, new.bounds)]).all(0)
    return where(finite, new, x)


def over(x: Tensor, of_each: Tensor) -> Tensor:
    """A number of each matrix, to be spread over all of ``x``."""
    return of_each.view(-1, *[1] * (x.ndim - 1))


def preconditioned(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """``(Q_L^T Q_L) X (Q_R^T Q_R)``."""
    left, right = factors
    x = left.mT @ (left @ x) if left.ndim == 3 else left.square()[:, :, None] * x
    return (x @ right.mT) @ right if right.ndim == 3 else x * right.square()[:, None]


def balanced(factors: Sequence[Tensor]) -> list[Tensor]:
    """Factors with the same largest entry, and the same product."""
    largest = torch.stack([factor.abs().flatten(1).amax(1) for factor in factors])
    mean = largest.prod(0) ** 0.5
    return [factor * over(factor, mean / most) for factor, most in zip(factors, largest, strict=True)]


def turned(factor: Tensor, probes: Tensor) -> Tensor:
    """One step towards ``min |U Q - I|``, over rotations ``U``.

    ``Q <- (I + a R + a^2 R^2 / 2) Q`` with ``R = Q^T - Q``, divided by its norm, and the ``a`` that makes the trace
    largest.
    """
    with fp32_products("highest"):
        turn = factor.mT - factor
        norm = largest_singular_value(turn, probes, turn.abs().flatten(1).amax(1))
        turn = turn / norm.clamp(min=_EPS)[:, None, None]
        once = turn @ factor
        twice = turn @ once
    slope = once.diagonal(dim1=1, dim2=2).sum(1)
    curvature = twice.diagonal(dim1=1, dim2=2).sum(1)
    angle = torch.where(curvature < 0, (-slope / curvature).clamp(0, LARGEST_TURN), LARGEST_TURN)[:, None, None]
    return factor + angle * (once + 0.5 * angle * twice)


def largest_singular_value(x: Tensor, probes: Tensor, scale: Tensor) -> Tensor:
    """A lower bound of the spectral norms of symmetric or skew matrices.

    Args:
        x: (n x length x length).
        probes: random entries of :data:`PROBES` rows, which are turned towards the largest row of ``x``.
        scale: of the entries of each, so that no product overflows.
    """
    scale = scale.clamp(min=_EPS)
    x = x / scale[:, None, None]
    row = x.gather(1, x.norm(dim=2).argmax(1)[:, None, None].expand(-1, 1, x.shape[2]))
    probes = probes.view(PROBES, -1)
    rows = row + (row @ probes.mT).sign().mT * probes
    for _ in range(HALF_ITERATIONS):
        rows = rows @ x
        rows = rows / (rows.norm(dim=2, keepdim=True) + _EPS)
        rows = rows @ x
    return scale * rows.norm(dim=2).amax(1)


def normals(step: int, count: int, like: Tensor) -> Tensor:
    """So many standard normal numbers, a hash of a step and their index."""
    numbers = torch.arange(count, dtype=torch.int32, device=like.device)
    start = (step * 0x9E3779B1 + 2**31) % 2**32 - 2**31  # odd, and far from its multiples
    bits = mixed(mixed(numbers) + start)
    radius = (-2 * _uniform(bits, like.dtype).log()).sqrt()
    return radius * (2 * pi * _uniform(mixed(bits + 1), like.dtype)).cos()


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers between 0 and 1, without both."""
    return (((bits >> 8) & 0xFFFFFF).to(dtype) + 0.5) / 2**24
