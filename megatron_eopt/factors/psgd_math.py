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

from megatron_eopt.kernels.precision import fp32_products
from megatron_eopt.step.rounding import murmur_mix

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


def init_factors(x: Whitened, steps: Tensor, scale: float) -> None:
    """Make identities of factors that no fit has changed, of matrices that step."""
    first = steps & (x.bounds[:, 0] == 0)
    for factor in x.factors:
        diagonal = factor if factor.ndim == 2 else _diagonal(factor)
        diagonal.copy_(torch.where(first[:, None], scale, diagonal))  # all else is zero


def refreshed(x: Whitened, steps: Tensor, step: int, settings: Mapping[str, Any]) -> Whitened:
    """Factors after a step of their fit, where that is finite and ``steps`` says so.

    With ``Q`` of each side and ``P X = (Q_L^T Q_L) X (Q_R^T Q_R)``, ``G = P (M + noise)`` is to have rows and columns
    with a covariance of the identity: ``Q <- Q - rate / bound (G G^T - c I) Q``, ``c = entries / length``. It is turned
    towards a symmetric one by a step of the Procrustes problem.
    """
    momentum = x.momentum
    entries = momentum[0].numel()
    _, rows, cols = momentum.shape
    sizes = [entries, PROBES * rows, PROBES * rows, PROBES * cols, PROBES * cols]
    noise, *probes = normals(step, sum(sizes), momentum).split(sizes)
    noise = noise.view(rows, cols)
    noisy = torch.add(momentum, noise, alpha=settings["damping_noise_scale"])
    noisy.addcmul_(momentum.abs(), noise, value=1e-7)
    seen = preconditioned(x.factors, noisy)
    before = max(step - 1, 0)  # no step counts while the rate is 0, as a warm-up begins
    rate = settings["precond_lr"] / (1 + before / settings["precond_decay_steps"]) ** 0.5
    rate = max(rate, settings["min_precond_lr"])
    beta = settings["beta_lip"]
    factors = []
    bounds = []
    for side, factor in enumerate(x.factors):
        length = factor.shape[1]
        target = entries / length
        lines = seen if side == 0 else seen.mT
        dense = factor.ndim == 3
        if dense:
            covariance = lines @ lines.mT
            norm = largest_singular_value(covariance, probes[2 * side], _diagonal(covariance).amax(1))
        else:
            covariance = lines.square().sum(2)
            norm = covariance.amax(1)
        bound = torch.maximum(beta * x.bounds[:, side] + (1 - beta) * (norm + target), norm + target)
        share = broadcast_to(factor, rate / bound)
        if dense:
            left = covariance
            right = factor
            if length > lines.shape[2]:  # G (G^T Q) takes fewer operations than (G G^T) Q
                left = lines
                right = lines.mT @ factor
            factor = (factor * (1 + share * target)).baddbmm_(left * -share, right)
            procrustes_step(factor, probes[2 * side + 1])
        else:
            factor = factor * (1 - share * (covariance - target))
        factors.append(factor)
        bounds.append(bound)
    new_bounds = torch.stack(bounds, 1)
    taken = steps & balance(factors) & new_bounds.isfinite().all(1)
    factors = [torch.where(broadcast_to(y, taken), y, old) for y, old in zip(factors, x.factors, strict=True)]
    return replace(x, factors=factors, bounds=torch.where(taken[:, None], new_bounds, x.bounds))


def broadcast_to(x: Tensor, of_each: Tensor) -> Tensor:
    """A number of each matrix, to be spread over all of ``x``."""
    return of_each.view(-1, *[1] * (x.ndim - 1))


def preconditioned(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """``(Q_L^T Q_L) X (Q_R^T Q_R)``."""
    left, right = factors
    x = left.mT @ (left @ x) if left.ndim == 3 else left.square()[:, :, None] * x
    return (x @ right.mT) @ right if right.ndim == 3 else x * right.square()[:, None]


def balance(factors: Sequence[Tensor]) -> Tensor:
    """Let factors have the same largest entry, and the same product; whether those of each matrix are finite."""
    largest = torch.stack([torch.linalg.vector_norm(factor.flatten(1), torch.inf, dim=1) for factor in factors])
    changes = largest.prod(0) ** 0.5 / largest
    for factor, change in zip(factors, changes, strict=True):
        factor.mul_(broadcast_to(factor, change))
    return (largest.isfinite() & changes.isfinite()).all(0)


def procrustes_step(factor: Tensor, probes: Tensor) -> None:
    """One step towards ``min |U Q - I|``, over rotations ``U``.

    ``Q <- (I + a R + a^2 R^2 / 2) Q`` with ``R = Q^T - Q`` and the ``a`` that makes the trace largest, at most
    :data:`LARGEST_TURN` over its norm.
    """
    with fp32_products("highest"):
        skew = factor.mT - factor
        norm = largest_singular_value(skew, probes, skew.amax((1, 2)))
        once = skew @ factor
        twice = skew @ once
    most = LARGEST_TURN / norm.clamp(min=_EPS)
    slope = _diagonal(once).sum(1)
    curvature = _diagonal(twice).sum(1)
    best = torch.minimum((-slope / curvature).clamp(min=0), most)
    angle = torch.where(curvature < 0, best, most)[:, None, None]
    factor.addcmul_(once.addcmul_(twice, 0.5 * angle), angle)


def largest_singular_value(x: Tensor, probes: Tensor, scale: Tensor) -> Tensor:
    """A lower bound of the spectral norms of symmetric or skew matrices.

    Args:
        x: (n x length x length).
        probes: random entries of :data:`PROBES` rows, which are turned towards the largest row of ``x``.
        scale: of the entries of each, by which rows are divided, so that no product overflows.
    """
    scale = scale.clamp(min=_EPS)[:, None, None]
    row = x.gather(1, x.norm(dim=2).argmax(1)[:, None, None].expand(-1, 1, x.shape[2])) / scale
    probes = probes.view(PROBES, -1)
    rows = row + (row @ probes.mT).sign().mT * probes
    for _ in range(HALF_ITERATIONS):
        rows = (rows / scale) @ x
        rows = (rows / ((rows.norm(dim=2, keepdim=True) + _EPS) * scale)) @ x
    return scale[:, 0, 0] * rows.norm(dim=2).amax(1)


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=1, dim2=2)


def normals(step: int, count: int, like: Tensor) -> Tensor:
    """So many standard normal numbers, a hash of a step and their index."""
    numbers = torch.arange(count, dtype=torch.int32, device=like.device)
    start = (step * 0x9E3779B1 + 2**31) % 2**32 - 2**31  # odd, and far from its multiples
    bits = murmur_mix(murmur_mix(numbers) + start)
    radius = (-2 * _uniform(bits, like.dtype).log()).sqrt()
    return radius * (2 * pi * _uniform(murmur_mix(bits + 1), like.dtype)).cos()


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers between 0 and 1, without both."""
    return (((bits >> 8) & 0xFFFFFF).to(dtype) + 0.5) / 2**24
