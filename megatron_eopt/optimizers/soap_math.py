"""SOAP's step of one matrix: Shampoo's factors, their eigenvectors, and Adam seen in these.

A factor is a symmetric matrix of a side of the gradient, (rows x rows) or (columns x columns); its basis has its
eigenvectors as columns. None stands for a side that has none, and is not rotated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

BasisMethod = Literal["qr", "eigh"]

CLOCK = "clock"
"""Setting of a group: steps of the optimizer so far, by which bases are refreshed."""


@dataclass(frozen=True)
class Side:
    """What is kept of the rows or of the columns of a matrix: its factor and its basis, (length x length) each."""

    factor: Tensor
    basis: Tensor


@dataclass(frozen=True)
class Preconditioned:
    """A whole matrix, or any tensor that has no side, as a step sees it.

    Attributes:
        gradient: in the dtype of the rest.
        momentum: Adam's first moment, and
        squares: his second one, in the bases. Both are changed in place, and so is what sides have.
        sides: of the rows and of the columns; None for one without a factor.
    """

    gradient: Tensor
    momentum: Tensor
    squares: Tensor
    sides: tuple[Side | None, Side | None] = (None, None)

    @property
    def factored(self) -> bool:
        """Whether it has a factor."""
        return self.sides != (None, None)

    @property
    def bases(self) -> tuple[Tensor | None, Tensor | None]:
        """Of the rows and of the columns."""
        left, right = (None if side is None else side.basis for side in self.sides)
        return left, right


def update_of(
    matrix: Preconditioned, steps: Tensor, accepted: Tensor, settings: Mapping[str, Any], first: bool
) -> Tensor | None:
    """The update of a matrix, before the learning rate; None where the gradient makes the bases alone.

    Args:
        matrix: whose gradient is zero where it is not accepted.
        steps: gradients that were accepted, this one included; without dimensions.
        accepted: False leaves all that is kept as it is.
        settings: of the group.
        first: whether there are no bases so far; only with an accepted gradient.
    """
    of_previous = matrix.factored and settings["basis_of"] == "previous"
    if matrix.factored and (first or not of_previous):
        _absorb(matrix, steps, accepted, settings, first)
    if of_previous and first:
        return None
    update = _adam(matrix, (steps - int(of_previous)).clamp(min=1), accepted, settings)
    if of_previous:
        _absorb(matrix, steps, accepted, settings, first)
    return update


def _absorb(matrix: Preconditioned, steps: Tensor, accepted: Tensor, settings: Mapping[str, Any], first: bool) -> None:
    """Let a gradient into the factors of a matrix, and refresh the bases where it is time, or make them."""
    beta, gradient = settings["shampoo_beta"], matrix.gradient
    weight = torch.ones_like(steps) * (1 - beta)
    if settings["correct_bias"]:
        weight /= 1 - beta ** steps.clamp(min=1)
    # both before a factor changes
    roots = [gradient, gradient.mT]
    if settings["use_kl_shampoo"] and not first:
        roots = [
            x if other is None else whitened(x, other.factor, other.basis)
            for x, other in zip(roots, reversed(matrix.sides), strict=True)
        ]
    # the bases were made in step 1, and the authors count from there
    refreshes = (settings[CLOCK] - 1) % settings["precondition_frequency"] == 0
    for dim, (side, root) in enumerate(zip(matrix.sides, roots, strict=True)):
        if side is None:
            continue
        divisor = gradient.shape[1 - dim] if settings["use_kl_shampoo"] else 1
        update_factor(side.factor, root, divisor, weight, accepted)
        if first:
            side.basis.copy_(eigenbasis(side.factor))
        elif refreshes:
            new, order = refreshed(side.factor, side.basis, settings["basis_method"])
            squares = matrix.squares
            squares.copy_(torch.where(accepted, squares.index_select(dim, order), squares))
            side.basis.copy_(torch.where(accepted, new, side.basis))


def _adam(matrix: Preconditioned, moments: Tensor, accepted: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Adam's update in the bases of a matrix, of the moments that take in its gradient where it is accepted."""
    beta1, beta2 = settings["betas"]
    gradient, momentum, squares = matrix.gradient, matrix.momentum, matrix.squares
    momentum.lerp_(torch.where(accepted, gradient, momentum), 1 - beta1)
    seen = to_basis(gradient, *matrix.bases)
    # an infinity would stay for ever
    new = seen.square().clamp(max=torch.finfo(squares.dtype).max)
    squares.lerp_(torch.where(accepted, new, squares), 1 - beta2)
    correct = settings["correct_bias"]
    corrections = [1 - beta**moments if correct else 1.0 for beta in (beta1, beta2)]
    update = to_basis(momentum, *matrix.bases)
    if settings["nesterov"]:
        ahead = 1 - beta1 ** (moments + 1) if correct else 1.0
        update = update * (beta1 / ahead) + seen * ((1 - beta1) / corrections[0])
    else:
        update = update / corrections[0]
    update = update / ((squares / corrections[1]).sqrt() + settings["eps"])
    return from_basis(update, *matrix.bases)


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
