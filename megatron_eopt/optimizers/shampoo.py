"""Shampoo and KL-Shampoo: momenta between inverse roots of two factors."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.factored import (
    Decay,
    FactoredOptimizer,
    WeightNorm,
    Working,
    apply,
    first_moment,
    gram_of,
    kept_sides,
    refreshes,
    steps_taken,
    write_sides,
)
from megatron_eopt.optimizers.factored_chunks import Chunk, EqualMatrices, split
from megatron_eopt.optimizers.group_settings import Scalar, check_rates
from megatron_eopt.optimizers.inverse_roots import RootMethod, inverse_root
from megatron_eopt.optimizers.parameters import TensorParallelGroups
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor
from megatron_eopt.parallel.engine import Engine

Scale = Literal[ScaleMode, "none"]

LEAST_DAMPING = 1e-7  # with which the products of "cans" stay finite in fp32


def shampoo(chunk: Chunk, engine: Engine, kl: bool) -> Working:
    """The step of a chunk, equal matrices as stacks.

    Each matrix ``p`` has a gradient ``g``, a momentum ``M``, factors ``L`` and ``R``, and their inverse roots ``P_L``
    and ``P_R``. Cut ones are whole between the exchanges, on their compute rank.
    """
    matrices = split(chunk, engine)
    spread = [equal.spread for equal in matrices]
    stacks = [first_moment(equal, equal.settings["momentum"]) for equal in matrices]  # g;  M <- EMA(g)
    stacks = yield from engine.gather_whole(stacks, spread)
    for i, equal in enumerate(matrices):
        stacks[i] = preconditioned(equal, kl, *stacks[i])  # U = s P_L M P_R;  L, R, P_L, P_R
    stacks = yield from engine.scatter_back(stacks, spread)
    apply(matrices, stacks, engine)  # p <- (1 - lr weight_decay) p - lr U


class Preconditioning(FactoredOptimizer):
    """Momentum between inverse roots of two factors of each matrix.

    Logical matrices, compute ranks, DTensors, ``share_over_dp`` and ``weight_norm`` are as in
    :class:`~megatron_eopt.optimizers.soap.SOAP`. A side longer than ``max_dim`` has no factor, and a matrix without a
    factor is refused. ``root_method`` says how roots are made: ``eigh`` by eigenvectors, some 10 n^3 operations a side
    of n that are bound by memory, and the step waits for a GPU, which is asked whether it found them; ``cans`` by 11
    coupled steps of three products, 19 for fourth roots, which a GPU is fast in. Both are of the same matrix, and about
    as exact: see :mod:`~megatron_eopt.optimizers.inverse_roots`.

    Args:
        params: matrices and declared stacks of matrices, or groups of them.
        lr: learning rate, at least 0.
        momentum: decay rate of the momentum, in [0, 1).
        shampoo_beta: of the factors, in [0, 1).
        damping: added to the factors, relative to them, above 0 and below 1; at least 1e-7 for ``cans``.
        weight_decay: at least 0.
        precondition_frequency: steps between new roots, at least 1.
        root_method: ``eigh`` or ``cans``.
        scale_mode: ``spectral``, ``unit_rms_norm``, ``shape_scaling``, or ``none`` for 1.
        weight_norm: ``hold`` or ``none``.
        max_dim: the longest side that has a factor, at least 1.
        weight_decay_method: ``decoupled``; ``independent``, without ``lr`` in it; or ``palm``, with its square.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``.
        split_qkv: precondition the parts of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group.
        pg_collection: process groups, as those of SOAP.
        share_over_dp: whether data-parallel ranks share work and factors.
        symmetric_products: the kernel of ``g g^T`` and ``g^T g``.

    Raises:
        ValueError: for a setting out of its range, a vector, a matrix without a factor, a parameter of three or more
            dimensions that is not declared as a stack, or shards without a group.
    """

    side_keys = (("L", "P_L"), ("R", "P_R"))
    choices = (*FactoredOptimizer.choices, ("root_method", RootMethod), ("scale_mode", Scale))

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
        root_method: RootMethod = "eigh",
        scale_mode: Scale = "spectral",
        weight_norm: WeightNorm = "none",
        max_dim: int = 10000,
        weight_decay_method: Decay = "decoupled",
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        pg_collection: TensorParallelGroups | None = None,
        share_over_dp: bool = False,
        symmetric_products: str | None = None,
    ) -> None:
        fused = split_qkv, is_qkv_fn, qkv_split_shapes
        self._set(symmetric_products, fused, pg_collection=pg_collection, share_over_dp=share_over_dp)
        update = {"lr": lr, "momentum": momentum, "scale_mode": scale_mode, "weight_norm": weight_norm}
        decay = {"weight_decay": weight_decay, "weight_decay_method": weight_decay_method}
        factors = {"shampoo_beta": shampoo_beta, "max_dim": max_dim, "precondition_frequency": precondition_frequency}
        roots = {"damping": damping, "root_method": root_method}
        further = {"maximize": maximize, "fp32_matmul_prec": fp32_matmul_prec}
        super().__init__(params, {**update, **decay, **factors, **roots, **further})

    def _check_ranges(self, group: Mapping[str, Any]) -> None:
        name, cans = type(self).__name__, group["root_method"] == "cans"
        check_rates(name, group, "momentum", "shampoo_beta")
        least = LEAST_DAMPING if cans else 0
        if not least <= group["damping"] < 1 or not group["damping"]:
            within = f"at least {least:g}, which the products of root_method 'cans' need," if cans else "above 0"
            raise ValueError(f"{name}: damping must be {within} and below 1, got {group['damping']}")
        super()._check_ranges(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        self._check_factors(group, group["params"], "")


class Shampoo(Preconditioning):
    """Momentum between inverse fourth roots of Shampoo's factors [1].

    For a matrix ``p`` (m x n) with gradient ``g``:

    1. ``M <- momentum M + (1 - momentum) g``;
    2. ``L <- EMA(g g^T)``, ``R <- EMA(g^T g)`` by ``shampoo_beta``, corrected for their start;
    3. every ``precondition_frequency`` steps, the first among them, ``P_L = (L + damping |L| I)^(-1/4)``, and ``P_R``
       of ``R``, with ``|L|`` its largest row sum of absolute values, which bounds its eigenvalues;
    4. ``p <- (1 - lr weight_decay) p - lr s P_L M P_R``.

    With factors of one gradient alone the update is its orthogonal factor, and ``s`` is Muon's scale, by
    ``scale_mode``. Where one side has no factor, the root of the other is the square root.

    Emerging-optimizers 0.5 has the same with ``lambda^(1/4) / (lambda^(1/2) + eps^(1/2))`` for the damped roots of
    eigenvalues. Arguments and errors are those of :class:`Preconditioning`.

    [1] Gupta, Koren and Singer, Shampoo: Preconditioned Stochastic Tensor Optimization, arXiv 1802.09568; with
        averages in place of sums, Anil et al., arXiv 2002.09018.
    """

    def program(self, chunk: Chunk) -> Working:
        """One chunk's step."""
        return shampoo(chunk, self.engine, kl=False)


class KLShampoo(Preconditioning):
    """Momentum between inverse square roots of KL factors [1].

    As :class:`Shampoo`, with factors that minimize the Kullback-Leibler divergence of N(0, L x R) from the gradients'
    distribution, and their inverse square roots, of which the last also whiten::

        L <- EMA(g P_R^2 g^T / n)      R <- EMA(g^T P_L^2 g / m)      p <- (1 - lr weight_decay) p - lr s P_L M P_R

    The first nonzero gradient makes the factors alone, and moves nothing: its small singular values would be as much
    too large. Before it ``P_L`` and ``P_R`` are the identity, and both products are divided by the root of the mean
    square of ``g``, so that a gradient a thousand times as large makes the same steps (emerging-optimizers' OKLS starts
    so; its KL-Shampoo begins at the identity, and has fourth roots unless ``p_root_inv=2``).

    The entries of ``P_L g P_R`` have a mean square near 1, so ``s`` is Muon's scale over ``sqrt(m) + sqrt(n)``, which
    is the spectral norm of such a matrix.

    Where one side has no factor, the other is of the gradients as they are. Arguments and errors are those of
    :class:`Preconditioning`.

    [1] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    """

    def rests(self, group: Mapping[str, Any]) -> bool:
        """The inverse of a single gradient would be as large as its smallest singular value is small."""
        return True

    def program(self, chunk: Chunk) -> Working:
        """One chunk's step."""
        return shampoo(chunk, self.engine, kl=True)


def preconditioned(equal: EqualMatrices, kl: bool, gradient: Tensor, momentum: Tensor) -> list[Tensor]:
    """Update factors and roots; returns updates, or nothing while factors are made."""
    settings, update = equal.settings, momentum
    if equal.members[equal.own]:
        kept, sides = kept_sides(equal)
        accepted, (rows, cols) = equal.accepted[equal.own], gradient.shape[1:]
        weight = (1 - settings["shampoo_beta"]) / (1 - settings["shampoo_beta"] ** steps_taken(equal).clamp(min=1))
        order: Literal[2, 4] = 4 if all(sides) and not kl else 2
        with fp32_products(settings["fp32_matmul_prec"]):
            roots = _whitened(gradient, sides, equal.first) if kl else [gradient, gradient.mT]
            for side, root, divisor in zip(sides, roots, (cols, rows), strict=True):
                if side:
                    product = gram_of(settings)(root) / (divisor if kl else 1)
                    finite = product.isfinite().flatten(1).all(1)[:, None, None]
                    # what is not finite would stay for ever
                    side[0].lerp_(torch.where(accepted & finite, product, side[0]), weight.to(product.dtype))
                    if equal.first or refreshes(settings):
                        new = inverse_root(side[0], order, float(settings["damping"]), settings["root_method"])
                        side[1].copy_(torch.where(accepted, new, side[1]))
            left, right = sides
            update = left[1] @ update if left else update
            update = update @ right[1] if right else update
        update = update * scale_of(rows, cols, settings["scale_mode"], kl)
        write_sides(kept, sides)
    return [update] if equal.moves else []


def _whitened(gradient: Tensor, sides: Sequence[Sequence[Tensor]], first: bool) -> list[Tensor]:
    """Roots of ``g R^-1 g^T`` and ``g^T L^-1 g``; in the first step of the gradient over the root of its size."""
    (left, right), both = sides, all(sides)
    if first:
        size = gradient.square().mean((1, 2), keepdim=True).sqrt() if both else torch.ones_like(gradient[:, :1, :1])
        alone = gradient / torch.where(size > 0, size, 1.0).sqrt()
        return [alone, alone.mT]
    return [gradient @ right[1] if both else gradient, gradient.mT @ left[1] if both else gradient.mT]


def scale_of(rows: int, cols: int, mode: Scale, kl: bool) -> float:
    """Factor of the preconditioned momentum of a (rows x cols) matrix."""
    if mode == "none" or 0 in (rows, cols):
        return 1.0
    return muon_scale_factor(rows, cols, mode) / (math.sqrt(rows) + math.sqrt(cols) if kl else 1)
