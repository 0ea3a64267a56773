"""SinkGD: gradients whose rows, and whose columns, have one norm."""

from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.parallel.exchange_cost import Side
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import Scalar, count
from megatron_eopt.step.parameters import DescribedMatrix, Matrices
from megatron_eopt.step.stacked_optimizer import StackedOptimizer
from megatron_eopt.step.stacks import MatrixPlan, Rule, Stack
from megatron_eopt.step.state import StateTensor


class SinkGD(StackedOptimizer):
    """SinkGD [1]: gradients whose rows, and whose columns, have one norm.

    Each logical matrix ``W`` (m x n) with gradient ``G`` has no state. In this order:

    1. ``X = G``; ``iterations`` times, rows of ``X`` get the l2 norm ``sqrt(n)``, then columns ``sqrt(m)``; zeros stay;
    2. ``W <- (1 - lr weight_decay) W - lr X``; the paper has no weight decay.

    Norms are summed over ranks in fp64: no rank has a whole matrix, and the update at TP=k is the update at TP=1. ``X``
    is in fp32 (fp64 for fp64 parameters). Else as :class:`~megatron_eopt.optimizers.dion.Dion`, with its errors.
    [1] Scetbon et al., Gradient Multi-Normalization for Stateless and Scalable LLM Training, arXiv 2502.06742.
    """

    own_settings = (Setting("iterations", "How often rows and columns are normalized.", count(1), planned=True),)

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 0.01,
        weight_decay: float = 0.01,
        iterations: int = 5,
        **settings: Unpack[Matrices],
    ) -> None:
        super().__init__(params, locals())

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Describe none."""
        return []

    def _side_sums(self, plan: MatrixPlan, parameter: Tensor) -> list[Side]:
        return [Side(dim, 1, torch.float64.itemsize) for dim in (0, 1)] * self.group_of(parameter)["iterations"]

    def _describe(self, name: str, plan: MatrixPlan, parameter: Tensor) -> DescribedMatrix:
        return DescribedMatrix(name, plan.layout.shape, "norms" if plan.layout.sharded else "local", 1.0, 1.0)

    def update(self, stack: Stack) -> Rule:
        """``X``; no rank needs whole matrices."""
        shard = self.engine.shard(stack.matrix)
        X = stack.gradient
        for dim in (0, 1) * stack.group["iterations"]:  # rows, then columns, as rows of the transpose
            squares = X.norm(dim=2, keepdim=True, dtype=torch.float64).square()
            squares = yield stack.side_sums(squares, dim)
            own = squares.narrow(1, (shard.top, shard.left)[dim], X.shape[1])
            rms = (own / stack.matrix.shape[1 - dim]).sqrt().to(X.dtype)
            X = (X / rms.clamp(min=torch.finfo(X.dtype).tiny)).mT  # zeros stay
        return X
