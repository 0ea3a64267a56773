"""SOAP's step of stacks of equal matrices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_eopt.factors.eigenbases import (
    eigenbasis,
    eigenvalues,
    in_order,
    into_bases,
    out_of_bases,
    turned,
    whitened,
)
from megatron_eopt.factors.sides import Side, follow, gram
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from megatron_eopt.step.foreach import copy_where, where
from megatron_eopt.step.nonfinite import LARGEST_NORM, Flag
from megatron_eopt.step.stacked_optimizer import refreshes

SortBases = Literal["before", "after"]


@dataclass(frozen=True)
class Preconditioned:
    """Stacked whole matrices (n, rows, cols), updated in place."""

    gradient: Tensor  # in the dtype of the rest; zero if not ok
    momentum: Tensor  # Adam's first moment, with this gradient in it
    squares: Tensor  # Adam's second moment, in the eigenbases
    steps: Tensor  # so far, with this one: fp64, (n x 1 x 1), or as many dimensions as the tensors have
    ok: Flag = None
    left: Side | None = None  # factors and bases of the rows
    right: Side | None = None

    @property
    def factored(self) -> bool:
        """Whether a side has factors."""
        return self.left is not None or self.right is not None


def update_of(matrices: Preconditioned, settings: Mapping[str, Any], first: bool) -> Tensor | None:
    """Updates before the learning rate; None while making bases."""
    if not matrices.factored:
        return _adam(matrices, matrices.steps, settings, first)
    of_previous = settings["basis_of"] == "previous"
    if first or not of_previous:
        _absorb(matrices, settings, first)
    if of_previous and first:
        return None
    update = _adam(matrices, matrices.steps - int(of_previous), settings, first)
    if of_previous:
        _absorb(matrices, settings, first)
    if settings["orthogonalize"]:
        iteration = NewtonSchulz(
            steps=8, coefficient_type="polar_express", fp32_matmul_prec=settings["fp32_matmul_prec"]
        )
        rows, cols = update.shape[1:]
        update = iteration(update) * muon_scale_factor(rows, cols, settings["scale_mode"])
    return update


def _absorb(matrices: Preconditioned, settings: Mapping[str, Any], first: bool) -> None:
    """Update factors with gradients, and make or refresh bases."""
    beta = settings["shampoo_beta"]
    weight = torch.ones_like(matrices.steps) * (1 - beta)
    if settings["correct_bias"]:
        weight /= 1 - beta ** matrices.steps.clamp(min=1)
    left = matrices.left
    right = matrices.right
    # both before a factor changes
    of_rows = None if left is None else _product(matrices.gradient, right, settings, first)
    of_columns = None if right is None else _product(matrices.gradient.mT, left, settings, first)
    for dim, side, product in ((1, left, of_rows), (2, right, of_columns)):
        if side is None or product is None:
            continue
        follow(side.factor, product, weight, matrices.ok)
        if first:
            side.basis.copy_(eigenbasis(side.factor))
        elif refreshes(settings):
            _refresh(matrices, side, dim, settings)


def _product(gradient: Tensor, other: Side | None, settings: Mapping[str, Any], first: bool) -> Tensor:
    """What the factor of a gradient's rows follows; ``other`` is the side of its columns."""
    if not settings["use_kl_shampoo"]:
        return gram(gradient, settings)
    of_current = settings["basis_of"] == "current"
    cols = gradient.size(-1)
    if other is None or (first and not of_current):
        return gram(gradient, settings) / cols
    if of_current:
        return _product_of_current(gradient, other, settings["eps"], first)
    return gram(whitened(gradient, other, _inverse_roots(other)), settings) / cols


def _product_of_current(gradient: Tensor, other: Side, eps: float, first: bool) -> Tensor:
    """``G F^-1 G^T / n``, by the operations of emerging-optimizers in their order.

    Most of the first update in a basis of the same gradient is rounding, so that only equal rounding makes equal steps.
    ``eps``, the least eigenvalue, is all that there is of a factor before the first gradient. The first products are so
    large that bases turn slowly: the second moment is diagonal in the first ones, and useless in very other ones.
    """
    largest = LARGEST_NORM * eps**0.5  # so that no product overflows
    gradient = gradient.clamp(-largest, largest)
    inverse = eigenvalues(other).clamp(min=eps).reciprocal() * (1 / gradient.size(-1))
    columns = inverse[:, None]
    if first:
        return (gradient * columns) @ gradient.mT
    return gradient @ ((other.basis * columns) @ other.basis.mT) @ gradient.mT


def _refresh(matrices: Preconditioned, side: Side, dim: int, settings: Mapping[str, Any]) -> None:
    """Turn bases towards the eigenvectors of their factors.

    ``before`` that the columns of ``Q`` are sorted by their eigenvalues, the largest first, and ``squares`` with them;
    ``after`` it those of the new basis alone.
    """
    images = side.factor @ side.basis
    order = None
    if settings["sort_bases"] == "before":
        if settings["basis_of"] == "current":
            values = eigenvalues(side)  # rounded as in emerging-optimizers: that may decide their order
        else:
            values = (side.basis * images).sum(1)
        order = values.argsort(descending=True)
        sorted_squares = in_order(matrices.squares, order, dim)
        copy_where(matrices.ok, sorted_squares, matrices.squares)
    if settings["basis_method"] == "eigh":
        new = eigenbasis(side.factor)
    else:
        new = turned(side, images, order)
        if order is None:
            order = eigenvalues(Side(side.factor, new)).argsort(descending=True)
            new = in_order(new, order, 2)
    copy_where(matrices.ok, new, side.basis)


def _adam(matrices: Preconditioned, moments: Tensor, settings: Mapping[str, Any], first: bool) -> Tensor:
    """Adam's updates in the bases; ``moments`` are the steps that first and second moment count."""
    beta1, beta2 = settings["betas"]
    squares = matrices.squares
    moments = moments.clamp(min=1)

    def correction(beta: float, steps: Tensor) -> Tensor | float:
        return (1 - beta**steps).to(squares.dtype) if settings["correct_bias"] else 1.0

    seen = into_bases(matrices.gradient, matrices.left, matrices.right)
    # rotated as the gradient is: entries that are rounding are divided by themselves, not by other rounding
    update = (1 - beta1) * seen if first else into_bases(matrices.momentum, matrices.left, matrices.right)
    if settings["nesterov"]:
        update = update * (beta1 / correction(beta1, moments + 1)) + seen * ((1 - beta1) / correction(beta1, moments))
    else:
        update = update / correction(beta1, moments)
    squared = update if settings["orthogonalize"] and matrices.factored else seen
    new = squared.square().clamp(max=torch.finfo(squares.dtype).max)  # an infinity would stay for ever
    squares.lerp_(where(matrices.ok, new, squares), 1 - beta2)
    update = update / ((squares / correction(beta2, moments)).sqrt() + settings["eps"])
    return out_of_bases(update, matrices.left, matrices.right)


def _inverse_roots(side: Side) -> Tensor:
    """Of the eigenvalues (n, length), which are at least a millionth of the largest.

    What is smaller is rounding of fp32, and its inverse would multiply gradients. A factor that is zero, as before the
    first gradient, counts as the identity.
    """
    values = eigenvalues(side)
    largest = values.amax(-1, keepdim=True)
    least = (1e-6 * largest).clamp(min=torch.finfo(values.dtype).tiny)
    return torch.where(largest > 0, values.clamp(min=least).rsqrt(), 1.0)
