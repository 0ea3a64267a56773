"""SOAP's step of equal matrices: Shampoo's factors, their eigenvectors, and Adam seen in these.

A factor is a symmetric matrix of a side of the gradient, (rows x rows) or (columns x columns); its basis has its
eigenvectors as columns. None stands for a side that has none, and is not rotated. All is written for stacks of equal
matrices, so that many of them cost no more launches than one.
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
    """What is kept of the rows or of the columns of matrices: factors and bases, (n x length x length) each."""

    factor: Tensor
    basis: Tensor


@dataclass(frozen=True)
class Preconditioned:
    """Equal whole matrices (n x rows x cols), or any equal tensors that have no side, as a step sees them.

    The second moment and what sides have are changed in place.
    """

    gradient: Tensor  # in the dtype of the rest; zero where it is not accepted
    momentum: Tensor  # Adam's first moment, with this gradient in it
    squares: Tensor  # Adam's second moment, in the eigenbases
    steps: Tensor  # accepted so far, with this one: fp64, (n x 1 x 1), or as many dimensions as the tensors have
    accepted: Tensor  # where not, everything stays as it is; of the same shape
    sides: tuple[Side | None, Side | None] = (None, None)  # of the rows and of the columns


def update_of(matrices: Preconditioned, settings: Mapping[str, Any], first: bool) -> Tensor | None:
    """The updates of matrices, before the learning rate; None where the gradients make the bases alone.

    The ``first`` accepted gradient finds no bases.
    """
    factored = matrices.sides != (None, None)
    of_previous = factored and settings["basis_of"] == "previous"
    if factored and (first or not of_previous):
        _absorb(matrices, settings, first)
    if of_previous and first:
        return None
    update = _adam(matrices, (matrices.steps - int(of_previous)).clamp(min=1), settings, first)
    if of_previous:
        _absorb(matrices, settings, first)
    return update


def _absorb(matrices: Preconditioned, settings: Mapping[str, Any], first: bool) -> None:
    """Let gradients into the factors of matrices, and refresh the bases where it is time, or make them.

    A product that is not finite would stay in a factor for ever, and is left out. To refresh a basis, its columns are
    sorted by their eigenvalues first, the largest in front, and ``squares`` with them. Then ``qr`` makes one step of
    orthogonal iteration, ``QR(F Q)``, and ``eigh`` takes the eigenvectors themselves.
    """
    beta, gradient, accepted = settings["shampoo_beta"], matrices.gradient, matrices.accepted
    kl, squares = settings["use_kl_shampoo"], matrices.squares
    weight = torch.ones_like(matrices.steps) * (1 - beta)
    if settings["correct_bias"]:
        weight /= 1 - beta ** matrices.steps.clamp(min=1)
    # both before a factor changes
    roots = [gradient, gradient.mT]
    others = list(zip(roots, reversed(matrices.sides), strict=True))
    if kl and not first:
        roots = [x if other is None else _whitened(x, other) for x, other in others]
    elif kl and settings["basis_of"] == "current":
        # so that the bases turn slowly: the second moment is diagonal in the first ones, and useless in very other ones
        roots = [x if other is None else x * settings["eps"] ** -0.5 for x, other in others]
    # the bases were made in step 1, and the authors count from there
    refreshes = (settings[CLOCK] - 1) % settings["precondition_frequency"] == 0
    for dim, (side, root) in enumerate(zip(matrices.sides, roots, strict=True), 1):
        if side is None:
            continue
        factor, basis = side
        product = root @ root.mT / (gradient.shape[3 - dim] if kl else 1)
        finite = product.isfinite().flatten(1).all(1)[:, None, None]
        factor.lerp_(torch.where(accepted & finite, product, factor), weight.to(factor.dtype))
        if first:
            basis.copy_(_eigenbasis(factor))
        elif refreshes:
            order = _eigenvalues(side).argsort(descending=True)
            eigh = settings["basis_method"] == "eigh"
            new = _eigenbasis(factor) if eigh else torch.linalg.qr(factor @ _in_order(basis, order, 2)).Q
            squares.copy_(torch.where(accepted, _in_order(squares, order, dim), squares))
            basis.copy_(torch.where(accepted, new, basis))


def _adam(matrices: Preconditioned, moments: Tensor, settings: Mapping[str, Any], first: bool) -> Tensor:
    """Adam's updates in the bases of matrices, of the second moment that takes in the gradient where it is accepted."""
    beta1, beta2 = settings["betas"]
    gradient, squares = matrices.gradient, matrices.squares
    left, right = (None if side is None else side.basis for side in matrices.sides)
    seen = _rotated(gradient, None if left is None else left.mT, right)
    # an infinity would stay for ever
    new = seen.square().clamp(max=torch.finfo(squares.dtype).max)
    squares.lerp_(torch.where(matrices.accepted, new, squares), 1 - beta2)

    def correction(beta: float, steps: Tensor) -> Tensor | float:
        return (1 - beta**steps).to(squares.dtype) if settings["correct_bias"] else 1.0

    if first:  # rotated as the gradient is: entries that are rounding are divided by themselves, not by other rounding
        update = (1 - beta1) * seen
    else:
        update = _rotated(matrices.momentum, None if left is None else left.mT, right)
    if settings["nesterov"]:
        update = update * (beta1 / correction(beta1, moments + 1)) + seen * ((1 - beta1) / correction(beta1, moments))
    else:
        update = update / correction(beta1, moments)
    update = update / ((squares / correction(beta2, moments)).sqrt() + settings["eps"])
    return _rotated(update, left, None if right is None else right.mT)


def _rotated(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``left x right``."""
    x = x if left is None else left @ x
    return x if right is None else x @ right


def _eigenvalues(side: Side) -> Tensor:
    """The diagonals of ``Q^T F Q`` (n x length): eigenvalues as far as the bases fit the factors."""
    return (side.basis * (side.factor @ side.basis)).sum(-2)


def _in_order(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """The rows (dim 1) or the columns (dim 2) of matrices in an order for each of them (n x length)."""
    return x.gather(dim, order.unsqueeze(3 - dim).expand_as(x))


def _eigenbasis(factor: Tensor) -> Tensor:
    """The eigenvectors of factors, of the largest eigenvalue first."""
    return torch.linalg.eigh(factor).eigenvectors.flip(-1)


def _whitened(gradient: Tensor, side: Side) -> Tensor:
    """``W`` with ``W W^T = G F^-1 G^T``, from the basis and the eigenvalues that it gives.

    Eigenvalues are at least a millionth of the largest: what is smaller is rounding of fp32, and its inverse would
    multiply gradients. A factor that is zero, as before the first gradient, counts as the identity.
    """
    values = _eigenvalues(side)
    largest = values.amax(-1, keepdim=True)
    scales = torch.where(largest > 0, values.clamp(min=1e-6 * largest).rsqrt(), 1.0)
    return (gradient @ side.basis) * scales[:, None]
