"""Dion2: Muon of the rows, or columns, whose momentum is largest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod, sqrt
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision
from megatron_eopt.orthogonalize.coefficients import CoefficientType
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.settings.iteration import iteration_of
from megatron_eopt.settings.records import GROUP_PRECISION, Setting
from megatron_eopt.settings.values import ABOVE_0_UP_TO_1, Scalar
from megatron_eopt.step.foreach import where
from megatron_eopt.step.parameters import DescribedMatrix, Matrices
from megatron_eopt.step.stacked_optimizer import StackedOptimizer
from megatron_eopt.step.stacks import GRADIENT, MatrixPlan, Rule, Stack, wide
from megatron_eopt.step.state import StateTensor

MOMENTUM_SUM = "momentum_sum"  # no average, so that no first moment of Adam's is taken for it


def selected_of(group: Mapping[str, Any], shape: Sequence[int]) -> int:
    """How many rows, or columns, of a matrix a step selects."""
    return ceil(group["fraction"] * min(shape))


class Dion2(StackedOptimizer):
    """Dion2 [1]: Muon of the rows, or columns, whose momentum is largest.

    Each logical matrix ``W`` (m x n) with gradient ``G`` has a momentum ``M``. In this order:

    1. ``M <- M + G``;
    2. ``S``: of the short side of ``M`` (its rows, if m <= n), the ``ceil(fraction * side)`` rows or columns with the
       largest sums of magnitudes; of equal ones the first;
    3. ``O``, the orthogonal factor of ``M[S]``, at that size, by Newton-Schulz iteration;
    4. error feedback: ``M[S] <- momentum * M[S]``; the others wait for a later step;
    5. weight decay of all: ``W <- (1 - lr weight_decay) W``;
    6. ``W[S] <- W[S] - lr sqrt(m / n) O``.

    A compute rank selects from whole matrices, so the update at TP=k is the update at TP=1; the authors' code selects
    from each shard. Momenta travel to it, and come back with updates; DTensors are gathered on each rank. ``M`` is in
    fp32 (fp64 for fp64 parameters). A step with a gradient that is not finite is skipped.

    Args:
        params: matrices, or groups of them; the attribute ``logical_matrices`` declares those that are several.
        lr: learning rate, at least 0.
        momentum: what selected rows keep of ``M``, in [0, 1).
        weight_decay: decoupled, at least 0.
        fraction: the part of the short side that a step selects, above 0 and at most 1.
        num_ns_steps: Newton-Schulz steps.
        coefficient_type: of these, as Muon's.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` or ``highest``: precision of their products.
        symmetric_products: the kernel of those that are symmetric, as in
            :class:`~megatron_eopt.settings.execution.Execution`.
        **settings: see :class:`~megatron_eopt.step.parameters.Matrices`.

    Raises:
        ValueError: for a setting out of its range, no matrix, a split that does not fit, or shards without a group.

    [1] Ahn et al., Dion2: A Simple Method to Shrink Matrix in Muon, arXiv 2512.16928.
    """

    own_settings = (
        GROUP_PRECISION,
        Setting("fraction", "The part of the short side of a matrix that a step selects.", ABOVE_0_UP_TO_1),
    )
    gathered = 1  # momenta
    scattered = 2  # updates and momenta

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        fraction: float = 0.25,
        *,
        num_ns_steps: int = 5,
        coefficient_type: CoefficientType = "quintic",
        fp32_matmul_prec: MatmulPrecision = "medium",
        symmetric_products: str | None = None,
        **settings: Unpack[Matrices],
    ) -> None:
        super().__init__(params, locals())

    def _iteration(self, group: Mapping[str, Any]) -> NewtonSchulz:
        return iteration_of(group, group["fp32_matmul_prec"], self.execution.symmetric_products)

    def _check_together(self, group: Mapping[str, Any]) -> None:
        self._iteration(group)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum."""
        return [StateTensor(MOMENTUM_SUM, dtype=wide(parameter))]

    def _plan(self, end: str, layout: Layout, longest: int) -> MatrixPlan:
        return MatrixPlan(end, layout, (False, False), cost=prod(layout.shape) * min(layout.shape))

    def _describe(self, name: str, plan: MatrixPlan, parameter: Tensor) -> DescribedMatrix:
        described = super()._describe(name, plan, parameter)
        scale = muon_scale_factor(*plan.layout.shape, "unit_rms_norm")
        selected = selected_of(self.group_of(parameter), plan.layout.shape)
        return replace(described, scale=scale, rms=scale * sqrt(selected / max(1, prod(plan.layout.shape))))

    def _entries(self, plan: MatrixPlan) -> int:
        """Of what comes back: an update and a momentum."""
        return 2 * plan.arriving

    def update(self, stack: Stack) -> Rule:
        """``O`` of what is selected, zero elsewhere; also ``M``, with error feedback."""
        M = stack.state(MOMENTUM_SUM)
        [M] = yield stack.gather(where(stack.ok, M + stack.state(GRADIENT), M))
        rows, cols = M.shape[1:]
        x = M if rows <= cols else M.mT
        order = x.abs().sum(2, dtype=torch.float64).argsort(dim=1, descending=True, stable=True)
        S = order[:, : selected_of(stack.group, (rows, cols)), None].expand(-1, -1, x.shape[2])
        selected = x.gather(1, S)
        O = self._iteration(stack.group)(selected) * muon_scale_factor(rows, cols, "unit_rms_norm")
        update = torch.zeros_like(x).scatter_(1, S, O)
        x.scatter_(1, S, where(stack.ok, selected * stack.group["momentum"], selected))
        update, M = yield stack.scatter(update if rows <= cols else update.mT, M)
        stack.keep(MOMENTUM_SUM, M)
        return update
