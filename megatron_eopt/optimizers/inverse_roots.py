"""Inverse roots of symmetric positive matrices, by eigenvectors or by products alone."""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

RootMethod = Literal["eigh", "cans"]

ENOUGH = 1e-9  # distance from 1 at which a schedule ends


def inverse_root(factor: Tensor, order: Literal[2, 4], damping: float, method: RootMethod) -> Tensor:
    """``(F + damping c I)^(-1/order)`` of a stack (n, length, length).

    ``c`` is the largest row sum of absolute values of ``F``, which bounds its eigenvalues. ``eigh`` takes the
    eigenvectors; ``cans`` iterates products, with the cubic polynomials that are best on the eigenvalues that are left
    [1]. A factor that is zero counts as the identity.

    [1] Grishina et al., Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type Polynomials,
        arXiv 2506.10935, of degree 3, and coupled: ``Z Y`` goes to the identity, ``Z`` to the inverse square root.
    """
    bound = factor.abs().sum(-1).amax(-1)[:, None, None]
    nothing = bound == 0
    scaled = factor / torch.where(nothing, 1.0, bound * (1 + damping))
    scaled.diagonal(dim1=1, dim2=2).add_(damping / (1 + damping))
    if method == "eigh":
        values, vectors = torch.linalg.eigh(scaled)
        # rounding may leave the smallest below what was added
        root = (vectors * values.clamp(min=damping / (1 + damping))[:, None] ** (-1 / order)) @ vectors.mT
    else:
        inverse, root = _coupled(scaled, damping**0.5)
        if order == 4:
            root = _coupled(inverse, damping**0.25)[1]
        root = (root + root.mT) / 2
    root = root * (bound * (1 + damping)) ** (-1 / order)
    return torch.where(nothing, torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device), root)


def _coupled(scaled: Tensor, lower: float) -> tuple[Tensor, Tensor]:
    """Square root and inverse square root of eigenvalues in [lower^2, 1]."""
    y = scaled
    z = None
    for a, b in cubics(lower):
        step = b * (y if z is None else z @ y)
        step.diagonal(dim1=1, dim2=2).add_(a)
        y = y @ step
        z = step if z is None else step @ z
    assert z is not None
    return y, z


@cache
def cubics(lower: float) -> tuple[tuple[float, float], ...]:
    """Odd cubics ``a x + b x^3`` that bring [lower, 1] to 1, each the best of its degree.

    On [l, u] that is ``2 / d (s x - x^3)`` with ``s = l^2 + l u + u^2`` and ``d = 2 (s / 3)^1.5 + l u (l + u)``: it has
    the same distance from 1 at both ends and between them.
    """
    polynomials = list[tuple[float, float]]()
    low = lower
    high = 1.0
    while high - low > ENOUGH:
        s = low**2 + low * high + high**2
        most = 2 * (s / 3) ** 1.5
        ends = low * high * (low + high)
        polynomials.append((2 * s / (most + ends), -2 / (most + ends)))
        distance = (most - ends) / (most + ends)
        low = 1 - distance
        high = 1 + distance
    return tuple(polynomials)
