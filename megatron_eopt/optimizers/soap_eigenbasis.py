"""Shampoo's factors of a matrix and their eigenvectors: what SOAP rotates a gradient by.

A factor is a symmetric matrix of a side of the gradient, (rows x rows) or (columns x columns); its basis has its
eigenvectors as columns. None stands for a side that has none, and is not rotated.
"""

from typing import Literal

import torch
from torch import Tensor

BasisMethod = Literal["qr", "eigh"]

# Of the largest eigenvalue: what is smaller is rounding of fp32, and KL would multiply gradients by its inverse.
_FLOOR = 1e-6


def to_basis(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``Q_L^T x Q_R``."""
    x = x if left is None else left.mT @ x
    return x if right is None else x @ right


def from_basis(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``Q_L x Q_R^T``, the inverse of :func:`to_basis`."""
    x = x if left is None else left @ x
    return x if right is None else x @ right.mT


def rayleigh(factor: Tensor, basis: Tensor) -> Tensor:
    """The diagonal of ``Q^T F Q``: eigenvalues as far as the basis fits the factor."""
    return (basis * (factor @ basis)).sum(0)


def whitened(gradient: Tensor, factor: Tensor, basis: Tensor) -> Tensor:
    """``W`` with ``W W^T = G F^-1 G^T``, from the basis and the eigenvalues that it gives.

    Eigenvalues are at least a millionth of the largest; a factor that is zero, as before the first gradient, counts as
    the identity.

    Args:
        gradient: ``G`` (rows x columns).
        factor: ``F`` (columns x columns).
        basis: its basis, orthogonal.
    """
    values = rayleigh(factor, basis)
    largest = values.max()
    scales = torch.where(largest > 0, values.clamp(min=_FLOOR * largest).rsqrt(), 1.0)
    return (gradient @ basis) * scales


def update_factor(factor: Tensor, root: Tensor, divisor: int, weight: Tensor, accepted: Tensor) -> None:
    """``F += weight (W W^T / divisor - F)`` in place; not where the product is not finite, which would stay for ever.

    Args:
        factor: ``F`` (rows x rows).
        root: ``W`` (rows x any).
        divisor: of the product.
        weight: of the product in the average, without dimensions.
        accepted: False leaves the factor as it is.
    """
    product = root @ root.mT / divisor
    factor.lerp_(torch.where(accepted & product.isfinite().all(), product, factor), weight.to(factor.dtype))


def eigenbasis(factor: Tensor) -> Tensor:
    """The eigenvectors of a factor, of the largest eigenvalue first."""
    return torch.linalg.eigh(factor).eigenvectors.flip(-1)


def refreshed(factor: Tensor, basis: Tensor, method: BasisMethod) -> tuple[Tensor, Tensor]:
    """A basis that fits a factor as it has become, and from which column each of its columns came.

    The columns are sorted by their eigenvalues first, the largest in front. Then ``qr`` makes one step of orthogonal
    iteration, ``QR(F Q)``, and ``eigh`` takes the eigenvectors themselves.
    """
    order = rayleigh(factor, basis).argsort(descending=True)
    if method == "eigh":
        return eigenbasis(factor), order
    return torch.linalg.qr(factor @ basis[:, order]).Q, order
