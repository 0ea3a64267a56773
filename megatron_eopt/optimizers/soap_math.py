"""SOAP's step of one matrix: Shampoo's factors, their eigenvectors, and Adam seen in these.

A factor is a symmetric matrix of a side of the gradient, (rows x rows) or (columns x columns); its basis has its
eigenvectors as columns. None stands for a side that has none, and is not rotated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

BasisMethod = Literal["qr", "eigh"]

CLOCK = "clock"
"""Setting of a group: steps of the optimizer so far, by which bases are refreshed."""


class Side(NamedTuple):
    """What is kept of the rows or of the columns of a matrix: its factor and its basis, (length x length) each."""

    factor: Tensor
    basis: Tensor


@dataclass(frozen=True)
class Preconditioned:
    """A whole matrix, or any tensor that has no side, as a step sees it.

    Adam's first moment, his second one in the bases, and what sides have are changed in place.
    """

    gradient: Tensor  # in the dtype of the rest
    momentum: Tensor
    squares: Tensor
    sides: tuple[Side | None, Side | None] = (None, None)  # of the rows and of the columns

    @property
    def factored(self) -> bool:
        """Whether it has a factor."""
        return self.sides != (None, None)


def update_of(
    matrix: Preconditioned, steps: Tensor, accepted: Tensor, settings: Mapping[str, Any], first: bool
) -> Tensor | None:
    """The update of a matrix, before the learning rate; None where the gradient makes the bases alone.

    The gradient is zero where it is not ``accepted``, and all that is kept stays as it is. ``steps`` counts those that
    were accepted, with this one; the ``first`` finds no bases.
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
    """Let a gradient into the factors of a matrix, and refresh the bases where it is time, or make them.

    A product that is not finite would stay in a factor for ever, and is left out. To refresh a basis, its columns are
    sorted by their eigenvalues first, the largest in front, and ``squares`` with them. Then ``qr`` makes one step of
    orthogonal iteration, ``QR(F Q)``, and ``eigh`` takes the eigenvectors themselves.
    """
    beta, gradient, kl = settings["shampoo_beta"], matrix.gradient, settings["use_kl_shampoo"]
    weight = torch.ones_like(steps) * (1 - beta)
    if settings["correct_bias"]:
        weight /= 1 - beta ** steps.clamp(min=1)
    # both before a factor changes
    roots = [gradient, gradient.mT]
    if kl and not first:
        others = zip(roots, reversed(matrix.sides), strict=True)
        roots = [x if other is None else _whitened(x, other) for x, other in others]
    # the bases were made in step 1, and the authors count from there
    refreshes = (settings[CLOCK] - 1) % settings["precondition_frequency"] == 0
    for dim, (side, root) in enumerate(zip(matrix.sides, roots, strict=True)):
        if side is None:
            continue
        factor, basis = side
        product = root @ root.mT / (gradient.shape[1 - dim] if kl else 1)
        taken = torch.where(accepted & product.isfinite().all(), product, factor)
        factor.lerp_(taken, weight.to(factor.dtype))
        if first:
            basis.copy_(_eigenbasis(factor))
        elif refreshes:
            order, squares = _eigenvalues(side).argsort(descending=True), matrix.squares
            eigh = settings["basis_method"] == "eigh"
            new = _eigenbasis(factor) if eigh else torch.linalg.qr(factor @ basis[:, order]).Q
            squares.copy_(torch.where(accepted, squares.index_select(dim, order), squares))
            basis.copy_(torch.where(accepted, new, basis))


def _adam(matrix: Preconditioned, moments: Tensor, accepted: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Adam's update in the bases of a matrix, of the moments that take in its gradient where it is accepted."""
    beta1, beta2 = settings["betas"]
    gradient, momentum, squares = matrix.gradient, matrix.momentum, matrix.squares
    left, right = (None if side is None else side.basis for side in matrix.sides)
    momentum.lerp_(torch.where(accepted, gradient, momentum), 1 - beta1)
    seen = _rotated(gradient, None if left is None else left.mT, right)
    # an infinity would stay for ever
    new = seen.square().clamp(max=torch.finfo(squares.dtype).max)
    squares.lerp_(torch.where(accepted, new, squares), 1 - beta2)
    correct = settings["correct_bias"]
    corrections = [1 - beta**moments if correct else 1.0 for beta in (beta1, beta2)]
    update = _rotated(momentum, None if left is None else left.mT, right)
    if settings["nesterov"]:
        ahead = 1 - beta1 ** (moments + 1) if correct else 1.0
        update = update * (beta1 / ahead) + seen * ((1 - beta1) / corrections[0])
    else:
        update = update / corrections[0]
    update = update / ((squares / corrections[1]).sqrt() + settings["eps"])
    return _rotated(update, left, None if right is None else right.mT)


def _rotated(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``left x right``."""
    x = x if left is None else left @ x
    return x if right is None else x @ right


def _eigenvalues(side: Side) -> Tensor:
    """The diagonal of ``Q^T F Q``: eigenvalues as far as the basis fits the factor."""
    return (side.basis * (side.factor @ side.basis)).sum(0)


def _eigenbasis(factor: Tensor) -> Tensor:
    """The eigenvectors of a factor, of the largest eigenvalue first."""
    return torch.linalg.eigh(factor).eigenvectors.flip(-1)


def _whitened(gradient: Tensor, side: Side) -> Tensor:
    """``W`` with ``W W^T = G F^-1 G^T``, from the basis and the eigenvalues that it gives.

    Eigenvalues are at least a millionth of the largest: what is smaller is rounding of fp32, and its inverse would
    multiply gradients. A factor that is zero, as before the first gradient, counts as the identity.
    """
    values = _eigenvalues(side)
    largest = values.max()
    scales = torch.where(largest > 0, values.clamp(min=1e-6 * largest).rsqrt(), 1.0)
    return (gradient @ side.basis) * scales
