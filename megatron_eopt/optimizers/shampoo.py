"""Shampoo and KL-Shampoo: momenta between inverse roots of two factors."""

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.factors.eigenbases import (
    BasisMethod,
    eigenbasis,
    eigenvalues,
    into_bases,
    out_of_bases,
    turned,
    whitened,
)
from megatron_eopt.factors.factored import Decay, FactoredOptimizer, HeldNorm, steps_taken
from megatron_eopt.factors.sides import Side, follow, gram
from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor
from megatron_eopt.settings.records import GROUP_PRECISION, Setting
from megatron_eopt.settings.values import BETWEEN_0_AND_1, Scalar, count
from megatron_eopt.step.foreach import copy_where
from megatron_eopt.step.parameters import Matrices
from megatron_eopt.step.stacked_optimizer import first_moment, refreshes
from megatron_eopt.step.stacks import Rule, Stack

Scale = Literal[ScaleMode, "none"]


class Preconditioning(FactoredOptimizer):
    """Momentum between inverse roots of two factors of each matrix.

    Logical matrices, compute ranks, DTensors, ``share_over_dp`` and ``weight_norm`` are as in
    :class:`~megatron_eopt.optimizers.soap.SOAP`. A side longer than ``max_dim`` has no factor, and a matrix without a
    factor is refused.

    Roots are made of eigenbases ``Q`` and of ``diag(Q^T F Q)`` for a factor ``F``, which are its eigenvalues where
    ``Q`` has its eigenvectors. The first bases have them. Every ``precondition_frequency`` steps ``basis_method``
    refreshes bases: ``qr`` sorts the columns by their eigenvalues and makes one step of orthogonal iteration,
    ``Q <- QR(F Q)``, as SOAP does; ``eigh`` takes the eigenvectors, some 10 n^3 operations a side of n that are bound
    by memory, and the step waits for a GPU, which is asked whether it found them.

    Args:
        params: matrices and declared stacks of matrices, or groups of them.
        lr: learning rate, at least 0.
        momentum: decay rate of the momentum, in [0, 1).
        shampoo_beta: of the factors, in [0, 1).
        damping: added to the factors, relative to them, above 0 and below 1.
        weight_decay: at least 0.
        precondition_frequency: steps between refreshes of the bases, at least 1.
        basis_method: ``qr`` or ``eigh``.
        scale_mode: ``spectral``, ``unit_rms_norm``, ``shape_scaling``, or ``none`` for 1.
        weight_norm: ``hold`` or ``none``.
        max_dim: the longest side that has a factor, at least 0.
        weight_decay_method: ``decoupled``; ``independent``, without ``lr`` in it; or ``palm``, with its square.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``.
        share_over_dp: whether data-parallel ranks share work and factors.
        symmetric_products: the kernel of ``g g^T`` and ``g^T g``.
        **settings: see :class:`~megatron_eopt.step.parameters.Matrices`.

    Raises:
        ValueError: for a setting out of its range, a vector, a matrix without a factor, a parameter of three or more
            dimensions that is not declared as a stack, or shards without a group.
    """

    gathered = 2  # gradients and momenta
    scattered = 1  # updates
    whitens: ClassVar[bool] = False  # whether gradients are whitened by the other side before a factor follows them
    own_settings = (
        GROUP_PRECISION,
        Setting("damping", "Added to the factors, relative to them.", BETWEEN_0_AND_1),
        Setting(
            "precondition_frequency",
            "Steps from one refresh of the bases to the next, counted from the first step.",
            count(1),
        ),
        Setting("basis_method", "How eigenbases are refreshed."),
        Setting("scale_mode", "How the size of an update follows from the shape."),
        Setting("weight_norm", "Whether every matrix keeps the norm that it starts with.", planned=True),
        Setting(
            "max_dim", "The longest side that has a factor; a matrix without one is refused.", count(0), planned=True
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 3e-3,
        momentum: float = 0.9,
        shampoo_beta: float = 0.95,
        damping: float = 1e-6,
        weight_decay: float = 0.01,
        precondition_frequency: int = 1,
        *,
        basis_method: BasisMethod = "qr",
        scale_mode: Scale = "spectral",
        weight_norm: HeldNorm = "none",
        max_dim: int = 10000,
        weight_decay_method: Decay = "decoupled",
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        share_over_dp: bool = False,
        symmetric_products: str | None = None,
        **settings: Unpack[Matrices],
    ) -> None:
        super().__init__(params, locals())

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        self._check_factors(group)

    def update(self, stack: Stack) -> Rule:
        """``U = s P_L M P_R``; also ``M``, ``L``, ``R``, ``Q_L`` and ``Q_R``."""
        gradient, update = yield stack.gather(*first_moment(stack, stack.group["momentum"]))
        if stack.own and any(stack.has_factor):  # not without entries
            left, right = self._sides(stack)
            begins = without_factors(left, right)
            with fp32_products(stack.group["fp32_matmul_prec"]):
                self._absorb(stack, gradient, left, right, begins)
                if stack.moves:
                    update = self._preconditioned(update, left, right, stack.group)
                    if self.whitens:
                        update = torch.where(begins, 0.0, update)
            self._keep_sides(stack, [left, right])
        if not stack.moves:
            return None
        [update] = yield stack.scatter(update)
        return update

    def _absorb(self, stack: Stack, gradient: Tensor, left: Side | None, right: Side | None, begins: Tensor) -> None:
        """Update factors with gradients, and make or turn bases."""
        group = self._settings(stack)
        beta = group["shampoo_beta"]
        weight = (1 - beta) / (1 - beta ** steps_taken(stack).clamp(min=1))
        weight = torch.where(begins, 1.0, weight)
        follows = gradient.flatten(1).any(1)[:, None, None]  # it is zero if not ok
        of_rows = gradient
        of_columns = gradient.mT
        if self.whitens and left is not None and right is not None:  # both before a factor changes
            size = gradient.square().mean((1, 2), keepdim=True).sqrt()
            scaled = gradient / torch.where(size > 0, size, 1.0).sqrt()
            of_rows = whitened(gradient, right, inverse_roots(right, 2, group["damping"]))
            of_columns = whitened(gradient.mT, left, inverse_roots(left, 2, group["damping"]))
            of_rows = torch.where(begins, scaled, of_rows)
            of_columns = torch.where(begins, scaled.mT, of_columns)
        for side, root, divisor in ((left, of_rows, gradient.shape[2]), (right, of_columns, gradient.shape[1])):
            if side is None:
                continue
            product = gram(root, group)
            if self.whitens:
                product = product / divisor
            follow(side.factor, product, weight, follows)
            if not stack.first and not refreshes(group):
                continue
            if stack.first or group["basis_method"] == "eigh":
                new = eigenbasis(side.factor)
            else:
                images = side.factor @ side.basis
                order = (side.basis * images).sum(1).argsort(descending=True)
                new = turned(side, images, order)
            copy_where(stack.ok, new, side.basis)

    def _preconditioned(
        self, momentum: Tensor, left: Side | None, right: Side | None, group: Mapping[str, Any]
    ) -> Tensor:
        """``s P_L M P_R``."""
        order = 2 if self.whitens or left is None or right is None else 4
        update = into_bases(momentum, left, right)
        if left is not None:
            update = update * inverse_roots(left, order, group["damping"])[:, :, None]
        if right is not None:
            update = update * inverse_roots(right, order, group["damping"])[:, None]
        return out_of_bases(update, left, right) * self._scale(momentum, group["scale_mode"])

    def _scale(self, momentum: Tensor, mode: Scale) -> float:
        """Factor of a stack of preconditioned momenta."""
        if mode == "none":
            return 1.0
        rows, cols = momentum.shape[1:]
        scale = muon_scale_factor(rows, cols, mode)
        return scale / (sqrt(rows) + sqrt(cols)) if self.whitens else scale


def without_factors(left: Side | None, right: Side | None) -> Tensor:
    """Which matrices (n x 1 x 1) no gradient has made factors of so far."""
    side = left or right
    assert side is not None, "a matrix without a factor is refused"
    return side.factor.diagonal(dim1=1, dim2=2).amax(-1)[:, None, None] == 0


def inverse_roots(side: Side, order: int, damping: float) -> Tensor:
    """``(lambda + damping |F|)^(-1/order)`` of eigenvalues in the bases (n, length); 1 where the damping vanishes."""
    added = damping * side.factor.abs().sum(-1).amax(-1, keepdim=True)
    values = eigenvalues(side).clamp(min=0) + added  # of an eigenvalue of 0 rounding may be left
    return torch.where(added > 0, values, 1.0) ** (-1 / order)


class Shampoo(Preconditioning):
    """Momentum between inverse fourth roots of Shampoo's factors [1].

    For a matrix ``p`` (m x n) with gradient ``g``:

    1. ``M <- momentum M + (1 - momentum) g``;
    2. ``L <- EMA(g g^T)``, ``R <- EMA(g^T g)`` by ``shampoo_beta``, corrected for their start; a gradient of zeros, as
       of an expert without tokens, leaves them as they are;
    3. ``P_L = (L + damping |L| I)^(-1/4)`` in the basis of ``L``, and ``P_R`` of ``R``, with ``|L|`` its largest row
       sum of absolute values, which bounds its eigenvalues;
    4. ``p <- (1 - lr weight_decay) p - lr s P_L M P_R``.

    With one gradient as ``M`` and in the factors alone the update is its orthogonal factor, and ``s`` is Muon's scale,
    by ``scale_mode``. Where one side has no factor, the root of the other is the square root.

    Emerging-optimizers 0.5 has the same with ``lambda^(1/4) / (lambda^(1/2) + eps^(1/2))`` for the damped roots of
    eigenvalues. Arguments and errors are those of :class:`Preconditioning`.

    [1] Gupta, Koren and Singer, Shampoo: Preconditioned Stochastic Tensor Optimization, arXiv 1802.09568; with
        averages in place of sums, Anil et al., arXiv 2002.09018.
    """


class KLShampoo(Preconditioning):
    """Momentum between inverse square roots of KL factors [1].

    As :class:`Shampoo`, with factors that minimize the Kullback-Leibler divergence of N(0, L x R) from the gradients'
    distribution, and their inverse square roots, of which the last also whiten::

        L <- EMA(g P_R^2 g^T / n)      R <- EMA(g^T P_L^2 g / m)      p <- (1 - lr weight_decay) p - lr s P_L M P_R

    The first nonzero gradient of a matrix makes the factors alone, and moves nothing: its small singular values would
    be as much too large. Before it ``P_L`` and ``P_R`` are the identity, and both products are divided by the root of
    the mean square of ``g``, so that a gradient a thousand times as large makes the same steps (emerging-optimizers'
    OKLS starts so; its KL-Shampoo begins at the identity, and has fourth roots unless ``p_root_inv=2``).

    The entries of ``P_L g P_R`` have a mean square near 1, so ``s`` is Muon's scale over ``sqrt(m) + sqrt(n)``, which
    is the spectral norm of such a matrix.

    Where one side has no factor, the other is of the gradients as they are. Arguments and errors are those of
    :class:`Preconditioning`.

    [1] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    """

    whitens = True

    def skips_first_update(self, group: Mapping[str, Any]) -> bool:
        """The inverse of a single gradient would be as large as its smallest singular value is small."""
        return True
