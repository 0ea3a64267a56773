"""Lion and Signum: updates are signs of a momentum."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.settings.records import DecayMethod
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step import foreach
from megatron_eopt.step.elementwise_optimizer import Batch, ElementwiseOptimizer
from megatron_eopt.step.parameters import TensorParallelGroups
from megatron_eopt.step.state import EXP_AVG, StateTensor


class Signs(ElementwiseOptimizer):
    """The step that Lion and Signum share."""

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """Those of the update and of the momentum."""
        beta1, beta2 = group["betas"]
        return beta1, beta2

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum."""
        return [StateTensor(EXP_AVG)]

    def update(self, batch: Batch) -> None:
        """One step of equal parameters."""
        group = batch.group
        lr = group["lr"]
        beta1, beta2 = self.betas(group)
        weight_decay = group["weight_decay"]
        method = group["weight_decay_method"]
        momenta = batch.state(EXP_AVG)
        gradients = batch.gradients(like=momenta)
        if weight_decay != 0 and method == "l2":
            gradients = foreach.with_decay(gradients, batch.weights, weight_decay)
        gradients = foreach.where_each(batch.ok, gradients, momenta)
        updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
        torch._foreach_sign_(updates)
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
        if weight_decay != 0 and method != "l2":
            foreach.scale(batch.weights, 1 - foreach.decay_power(lr, method) * weight_decay, batch.ok)
        updates = foreach.where_each(batch.ok, updates, 0.0)
        if isinstance(lr, Tensor):  # a number as alpha is not rounded to the dtype of the weights, a factor is
            torch._foreach_mul_(updates, lr)
            lr = 1.0
        torch._foreach_add_(batch.weights, updates, alpha=-lr)


class Lion(Signs):
    """Lion [1]: signs of interpolated momentum, decoupled weight decay.

    For a parameter ``p`` with gradient ``g`` and momentum ``m``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or by another ``weight_decay_method``: ``independent`` has no
       ``lr`` in it, ``palm`` its square, and ``l2`` adds ``weight_decay * p`` to ``g``;
    2. ``p -= lr * sign(beta1 m + (1 - beta1) g)``;
    3. ``m <- beta2 m + (1 - beta2) g``.

    Every entry moves by ``lr``, or not at all where the interpolation is zero, so ``lr`` is usually 3 to 10 times
    smaller than AdamW's and ``weight_decay`` as much larger. All is elementwise: parameters of any shape, shards and
    DTensors. Gradients are not written to. A step with one that is not finite is skipped: see
    :mod:`~megatron_eopt.step.nonfinite`.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, at least 0.
        betas: ``beta1`` of the update and ``beta2`` of the momentum, each in [0, 1).
        weight_decay: at least 0.
        weight_decay_method: ``decoupled``, ``independent``, ``palm`` or ``l2``.
        maximize: ascend instead of descend.
        pg_collection: the process groups of sharded parameters, to agree on gradients that are not finite.

    Raises:
        ValueError: for a setting out of its range.

    [1] Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        weight_decay_method: DecayMethod = "decoupled",
        maximize: bool = False,
        pg_collection: TensorParallelGroups | None = None,
    ) -> None:
        super().__init__(params, locals())


class Signum(Signs):
    """Signum [1]: signSGD with momentum and decoupled weight decay.

    For a parameter ``p`` with gradient ``g`` and momentum ``m``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or as ``weight_decay_method`` says;
    2. ``m <- beta m + (1 - beta) g``;
    3. ``p -= lr * sign(m)``.

    All else is as in :class:`~megatron_eopt.optimizers.lion.Lion`, which has two betas.

    Args:
        momentum: ``beta``, in [0, 1); 0 is signSGD.

    Raises:
        ValueError: for a setting out of its range.

    [1] Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, arXiv 1802.04434.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        weight_decay_method: DecayMethod = "decoupled",
        maximize: bool = False,
        pg_collection: TensorParallelGroups | None = None,
    ) -> None:
        super().__init__(params, locals())

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """One beta serves both."""
        return group["momentum"], group["momentum"]
