"""Dion: orthonormal updates of low rank, with error feedback."""

from collections.abc import Sequence
from functools import partial
from math import ceil, sqrt
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import fp32_products
from megatron_eopt.orthogonalize.bases import orthonormal_columns
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from megatron_eopt.orthogonalize.spectral import start_basis
from megatron_eopt.parallel.exchange_cost import Side
from megatron_eopt.parallel.rectangles import Rectangle
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import ABOVE_0_UP_TO_1, Scalar
from megatron_eopt.step.foreach import where
from megatron_eopt.step.parameters import DescribedMatrix, Matrices, names_of_last
from megatron_eopt.step.stacked_optimizer import StackedOptimizer
from megatron_eopt.step.stacks import GRADIENT, Chunk, MatrixPlan, Rule, Stack, wide
from megatron_eopt.step.state import MOMENTUM_BUFFER, StateTensor, check_placements

BASIS = "Q"
NOISE = 100  # times the precision of the dtype: a column of P this much below the largest is rounding


def orthonormal(x: Tensor, stack: Stack, shard: Rectangle) -> Tensor:
    """This rank's rows of the Q of QR decompositions, whose R have positive diagonals.

    Columns are zero where all but rounding is in the span of those before them, and everywhere if not ok.
    """
    rows = slice(shard.top, shard.bottom)
    if 0 in x.shape:
        return x[:, rows]
    Q, diagonal = orthonormal_columns(x)
    lengths = diagonal[:, None].abs()
    significant = lengths > NOISE * torch.finfo(x.dtype).eps * lengths.amax(-1, keepdim=True)
    return torch.where(where(stack.ok, significant, False), Q[:, rows] * diagonal[:, None].sign(), 0.0)


def rank_of(fraction: float, rows: int, cols: int) -> int:
    """The rank of updates: part of the short side, rounded up."""
    return ceil(fraction * min(rows, cols))


class Dion(StackedOptimizer):
    """Dion [1]: orthonormal updates of low rank, with error feedback.

    A logical matrix ``W`` (m x n) with gradient ``G`` has a momentum ``M`` and a basis ``Q`` (n x r), with
    ``r = ceil(rank_fraction min(m, n))``. In this order:

    1. weight decay: ``W <- (1 - lr weight_decay) W``;
    2. ``B = M + G``;
    3. one power iteration: ``P = orth(B Q)``, the orthonormal factor of a QR decomposition, and ``R = B^T P``, so that
       ``P R^T`` is near the closest matrix of rank r;
    4. error feedback: ``M <- B - (1 - momentum) P R^T``, which keeps what the update leaves out;
    5. ``Q <- R`` with columns of norm 1;
    6. ``W <- W - lr sqrt(m / n) P Q^T``.

    ``Q`` begins with normal numbers that are the same on any number of ranks. Where a column of ``B Q`` is rounding
    alone, as in the first steps if gradients have a smaller rank than r, it is left out of ``P``, and that column of
    ``Q`` stays: the formulas would divide rounding by its norm. ``M`` and ``Q`` are kept, and all is computed, in fp32
    (fp64 for fp64 parameters).

    The update at TP=k is the update at TP=1, since QR is of the whole ``B Q``; no rank has a whole matrix. Of a cut
    matrix, ``B Q`` and ``R`` are summed over its ranks: ``(m + n) r`` numbers in two all-reduces, for many matrices at
    once. ``M`` is cut as ``W``, and ``Q`` as its columns. Each rank of a matrix computes its QR, some ``4 m r^2``
    operations; the products, ``6 m n r``, are divided by the ranks.

    A group may have its own ``lr``, ``momentum``, ``weight_decay`` and ``rank_fraction``, which is fixed when the state
    is created. A step with a gradient that is not finite is skipped: see
    :mod:`~megatron_eopt.step.nonfinite`.

    Args:
        params: matrices, or groups of them; the attribute ``logical_matrices`` declares those that are several.
        lr: learning rate, at least 0.
        momentum: ``mu`` of the paper, in [0, 1).
        weight_decay: decoupled, at least 0.
        rank_fraction: rank of updates as a part of the short side, in (0, 1]. The paper has 1, 1/2, 1/4 and less.
        **settings: see :class:`~megatron_eopt.step.parameters.Matrices`.

    Raises:
        ValueError: for a setting out of its range, a parameter that is no matrix, a split that does not fit, or shards
            without a group; in a step for another ``rank_fraction`` than that of the state.

    [1] Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv 2504.05295.
    """

    own_settings = (
        Setting(
            "rank_fraction",
            "Rank of updates, as a part of the short side of a matrix, in (0, 1].",
            ABOVE_0_UP_TO_1,
            planned=True,
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        rank_fraction: float = 0.25,
        **settings: Unpack[Matrices],
    ) -> None:
        super().__init__(params, locals())

    def _side_sums(self, plan: MatrixPlan, parameter: Tensor) -> list[Side]:
        rank = rank_of(self._fraction(parameter), *plan.layout.shape)
        return [Side(dim, rank, wide(parameter).itemsize) for dim in (0, 1)]

    def _describe(self, name: str, plan: MatrixPlan, parameter: Tensor) -> DescribedMatrix:
        rows, cols = plan.layout.shape
        rms = sqrt(rank_of(self._fraction(parameter), rows, cols)) / cols
        scheme = "low rank" if plan.layout.sharded else "local"
        return DescribedMatrix(name, (rows, cols), scheme, muon_scale_factor(rows, cols, "unit_rms_norm"), rms)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum and each matrix's basis."""
        dtype = wide(parameter)
        fraction = self._fraction(parameter)
        bases = []
        for i, (end, x) in enumerate(zip(self.key_ends(parameter), self.matrix_layouts(parameter), strict=True)):
            rank = rank_of(fraction, *x.shape)
            bases.append(StateTensor(BASIS + end, ("columns", rank), i, dtype, start=partial(start_basis, rank=rank)))
        return [StateTensor(MOMENTUM_BUFFER, dtype=dtype), *bases]

    def _fraction(self, parameter: Tensor) -> float:
        fraction: float = self.group_of(parameter)["rank_fraction"]
        return fraction

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for p, called in zip(group["params"], names_of_last(self.param_groups), strict=True):
            check_placements(f"{type(self).__name__}: {called}", p, self.state_tensors(p), self.matrix_layouts)

    @fp32_products("highest")
    def _run(self, chunks: Sequence[Sequence[Chunk[Stack]]]) -> None:
        super()._run(chunks)

    def update(self, stack: Stack) -> Rule:
        """``sqrt(m / n) P Q^T``, in the memory of ``B``; also ``M`` and ``Q``. No rank needs whole matrices."""
        shard = self.engine.shard(stack.matrix)
        B = stack.state(MOMENTUM_BUFFER)
        B = where(stack.ok, B + stack.state(GRADIENT), B)  # B = M + G
        Q = stack.owned(BASIS)
        P = orthonormal((yield stack.side_sums(B @ Q, 0)), stack, shard)  # P = orth(B Q)
        R = yield stack.side_sums(B.mT @ P, 1)  # R = B^T P
        columns = R[:, shard.left : shard.right]
        B.baddbmm_(P, columns.mT, alpha=stack.group["momentum"] - 1)  # M = B - (1 - mu) P R^T
        stack.keep(MOMENTUM_BUFFER, B)
        norms = torch.linalg.vector_norm(R, dim=1, keepdim=True, dtype=torch.float64).to(R.dtype)
        Q = torch.where(norms > 0, columns / norms, Q)  # a column that is left out of P keeps its direction
        stack.keep_owned(BASIS, Q)
        return B.baddbmm_(P, Q.mT, beta=0, alpha=muon_scale_factor(*stack.matrix.shape, "unit_rms_norm"))
