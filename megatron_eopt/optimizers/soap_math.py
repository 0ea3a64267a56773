"""SOAP's step of stacks of equal matrices.

A basis has the eigenvectors of a factor as columns. None stands for a side without, which is not rotated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.optimizers.factored import refreshes
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import muon_scale_factor

BasisMethod = Literal["qr", "eigh"]
SortBases = Literal["before", "after"]


class Side(NamedTuple):
    """Factors and bases of a side, (n, length, length)."""

    factor: Tensor
    basis: Tensor


@dataclass(frozen=True)
class Preconditioned:
    """Stacked whole matrices (n, rows, cols), updated in place."""

    gradient: Tensor  # in the dtype of the rest; zero where it is not accepted
    momentum: Tensor  # Adam's first moment, with this gradient in it
    squares: Tensor  # Adam's second moment, in the eigenbases
    steps: Tensor  # accepted so far, with this one: fp64, (n x 1 x 1), or as many dimensions as the tensors have
    accepted: Tensor  # where not, everything stays as it is; of the same shape
    gram: Callable[[Tensor], Tensor]  # ``X X^T`` of a stack
    sides: tuple[Side | None, Side | None] = (None, None)  # of the rows and of the columns


def update_of(matrices: Preconditioned, settings: Mapping[str, Any], first: bool) -> Tensor | None:
    """Updates before the learning rate; None while making bases."""
    factored = matrices.sides != (None, None)
    of_previous = factored and settings["basis_of"] == "previous"
    if factored and (first or not of_previous):
        _absorb(matrices, settings, first)
    if of_previous and first:
        return None
    update = _adam(matrices, (matrices.steps - int(of_previous)).clamp(min=1), settings, first)
    if of_previous:
        _absorb(matrices, settings, first)
    if factored and settings["orthogonalize"]:
        precision, (rows, cols) = settings["fp32_matmul_prec"], update.shape[1:]
        orthogonal = NewtonSchulz(steps=8, coefficient_type="polar_express", fp32_matmul_prec=precision)(update)
        update = orthogonal * muon_scale_factor(rows, cols, settings["scale_mode"])
    return update


def _absorb(matrices: Preconditioned, settings: Mapping[str, Any], first: bool) -> None:
    """Update factors with gradients, and make or refresh bases.

    A product that is not finite would stay in a factor for ever, and is left out. A refresh by ``qr`` makes one step of
    orthogonal iteration, ``QR(F Q)``, and ``eigh`` takes the eigenvectors themselves. ``before`` that the columns of
    ``Q`` are sorted by their eigenvalues, the largest first, and ``squares`` with them; ``after`` it those of the new
    basis alone.
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
    refreshed = refreshes(settings)
    for dim, (side, root) in enumerate(zip(matrices.sides, roots, strict=True), 1):
        if side is None:
            continue
        factor, basis = side
        product = matrices.gram(root) / (gradient.shape[3 - dim] if kl else 1)
        finite = product.isfinite().flatten(1).all(1)[:, None, None]
        factor.lerp_(torch.where(accepted & finite, product, factor), weight.to(factor.dtype))
        if first:
            basis.copy_(_eigenbasis(factor))
        elif refreshed:
            eigh, before = settings["basis_method"] == "eigh", settings["sort_bases"] == "before"
            if before:
                order = _eigenvalues(side).argsort(descending=True)
                squares.copy_(torch.where(accepted, _in_order(squares, order, dim), squares))
            columns = _in_order(basis, order, 2) if before else basis
            new = _eigenbasis(factor) if eigh else torch.linalg.qr(factor @ columns).Q
            if not (before or eigh):
                new = _in_order(new, _eigenvalues(Side(factor, new)).argsort(descending=True), 2)
            basis.copy_(torch.where(accepted, new, basis))


def _adam(matrices: Preconditioned, moments: Tensor, settings: Mapping[str, Any], first: bool) -> Tensor:
    beta1, beta2 = settings["betas"]
    gradient, squares = matrices.gradient, matrices.squares
    left, right = (None if side is None else side.basis for side in matrices.sides)
    seen = _rotated(gradient, None if left is None else left.mT, right)

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
    squared = update if settings["orthogonalize"] and matrices.sides != (None, None) else seen
    # an infinity would stay for ever
    new = squared.square().clamp(max=torch.finfo(squares.dtype).max)
    squares.lerp_(torch.where(matrices.accepted, new, squares), 1 - beta2)
    update = update / ((squares / correction(beta2, moments)).sqrt() + settings["eps"])
    return _rotated(update, left, None if right is None else right.mT)


def _rotated(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    x = x if left is None else left @ x
    return x if right is None else x @ right


def _eigenvalues(side: Side) -> Tensor:
    """Diagonals of ``Q^T F Q`` (n, length), near the eigenvalues."""
    return (side.basis * (side.factor @ side.basis)).sum(-2)


def _in_order(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Reorder rows (dim 1) or columns (dim 2)."""
    return x.gather(dim, order.unsqueeze(3 - dim).expand_as(x))


def _eigenbasis(factor: Tensor) -> Tensor:
    return torch.linalg.eigh(factor).eigenvectors.flip(-1)


def _whitened(gradient: Tensor, side: Side) -> Tensor:
    """A root of ``G F^-1 G^T`` by the basis's eigenvalues.

    They are at least a millionth of the largest: what is smaller is rounding of fp32, and its inverse would multiply
    gradients. A factor that is zero, as before the first gradient, counts as the identity.
    """
    values = _eigenvalues(side)
    largest = values.amax(-1, keepdim=True)
    scales = torch.where(largest > 0, values.clamp(min=1e-6 * largest).rsqrt(), 1.0)
    return (gradient @ side.basis) * scales[:, None]
