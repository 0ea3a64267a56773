"""Eigenbases of the factors of stacked matrices, and how they follow their factors.

A basis has the eigenvectors of a factor as columns. None stands for a side without, which is not rotated.
"""

from typing import Literal

from torch import Tensor

from megatron_eopt.factors.sides import Side
from megatron_eopt.orthogonalize.bases import eigenvectors, orthonormal_columns
from megatron_eopt.step.nonfinite import LARGEST_NORM

BasisMethod = Literal["qr", "eigh"]


def into_bases(x: Tensor, left: Side | None, right: Side | None) -> Tensor:
    """``Q_L^T X Q_R``."""
    if left is not None:
        x = left.basis.mT @ x
    if right is not None:
        x = x @ right.basis
    return x


def out_of_bases(x: Tensor, left: Side | None, right: Side | None) -> Tensor:
    """``Q_L X Q_R^T``."""
    if left is not None:
        x = left.basis @ x
    if right is not None:
        x = x @ right.basis.mT
    return x


def eigenvalues(side: Side) -> Tensor:
    """Diagonals of ``Q^T F Q`` (n, length), near the eigenvalues."""
    return (side.basis.mT @ side.factor * side.basis.mT).sum(-1)


def whitened(gradient: Tensor, side: Side, roots: Tensor) -> Tensor:
    """A root of ``G F^-1 G^T``, from inverse roots of the eigenvalues of ``F`` (n, length).

    After tiny gradients it may be so large that a product overflows, whatever the bound on gradients: here it has the
    same bound.
    """
    return ((gradient @ side.basis) * roots[:, None]).clamp_(-LARGEST_NORM, LARGEST_NORM)


def eigenbasis(factor: Tensor) -> Tensor:
    """The eigenvectors, the one of the largest eigenvalue first."""
    return eigenvectors(factor)[1]


def turned(side: Side, images: Tensor, order: Tensor | None) -> Tensor:
    """Bases nearer the eigenvectors, by one step of orthogonal iteration.

    Args:
        side: stacked factors ``F`` and their bases ``Q``.
        images: ``F Q``, of which a QR decomposition is made.
        order: of the columns before; None for that in which they are.
    """
    columns = side.basis
    if order is not None:
        columns = in_order(columns, order, 2)
        images = in_order(images, order, 2)
    return orthonormal_columns(images, near=columns)[0]


def in_order(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Reorder rows (dim 1) or columns (dim 2)."""
    return x.gather(dim, order.unsqueeze(3 - dim).expand_as(x))
