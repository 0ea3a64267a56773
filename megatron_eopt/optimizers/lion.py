"""Lion: every entry of the update is the sign of an interpolated momentum."""

from collections.abc import Sequence
from itertools import batched
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.group_settings import DecayMethod, Scalar, check_betas, check_rates
from megatron_eopt.optimizers.parameters import TensorParallelGroups, local
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.orthogonalize.choices import check_choice

EXP_AVG = "exp_avg"
"""Name of the momentum: the one that Megatron-Core gives it where it creates the state itself."""


class Lion(BaseOptimizer):
    """Lion [1]: the sign of an interpolated momentum, with decoupled weight decay.

    For a parameter ``p`` with gradient ``g`` and momentum ``m``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or by another ``weight_decay_method``: ``independent`` has no
       ``lr`` in it, ``palm`` its square, and ``l2`` adds ``weight_decay * p`` to ``g``;
    2. ``p -= lr * sign(beta1 m + (1 - beta1) g)``;
    3. ``m <- beta2 m + (1 - beta2) g``.

    Every entry moves by ``lr``, or not at all where the interpolation is zero, so ``lr`` is usually 3 to 10 times
    smaller than AdamW's and ``weight_decay`` as much larger. All of it is elementwise: parameters of any shape, and
    shards and DTensors as they lie. Gradients are never written to, and a parameter without one is left as it is, and
    so is one whose gradient is not finite: see :mod:`~megatron_eopt.optimizers.nonfinite`.

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
        self.pg_collection = pg_collection
        decay = {"weight_decay": weight_decay, "weight_decay_method": weight_decay_method}
        super().__init__(params, {"lr": lr, "betas": betas, **decay, "maximize": maximize})

    def _check_group(self, group: dict[str, Any]) -> None:
        check_rates(type(self).__name__, group)
        check_betas(type(self).__name__, group["betas"])
        check_choice(
            f"weight_decay_method of {type(self).__name__}", group["weight_decay_method"], get_args(DecayMethod)
        )

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum."""
        return [StateTensor(EXP_AVG)]

    def _take(self, accepted: Tensor) -> None:
        flags = iter(accepted.unbind())
        # on a CPU one tensor stays in the cache from operation to operation
        at_once = 1 if accepted.device.type == "cpu" else bulk.AT_ONCE
        for group in self.param_groups:
            of_group = [(p, next(flags)) for p in group["params"]]
            for some in batched([(p, flag) for p, flag in of_group if p.grad is not None], at_once):
                self._update([p for p, _ in some], torch.stack([flag for _, flag in some]), group)

    def _update(self, parameters: Sequence[Tensor], accepted: Tensor, group: dict[str, Any]) -> None:
        momenta = [local(self._state_of(p)[EXP_AVG]) for p in parameters]
        gradients = [
            local(p.grad).to(m.dtype)  # type: ignore[arg-type]  # those without a gradient are not among them
            for p, m in zip(parameters, momenta, strict=True)
        ]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        _lion(
            [local(p) for p in parameters],
            momenta,
            gradients,
            accepted,
            lr=group["lr"],
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            method=group["weight_decay_method"],
        )


def _lion(
    parameters: list[Tensor],
    momenta: list[Tensor],
    gradients: list[Tensor],
    accepted: Tensor,
    *,
    lr: Scalar,
    betas: tuple[float, float],
    weight_decay: float,
    method: DecayMethod,
) -> None:
    """One step of parameters and momenta, those not accepted excepted; does not wait for a GPU."""
    beta1, beta2 = betas
    if weight_decay != 0 and method == "l2":
        gradients = bulk.with_decay(gradients, parameters, weight_decay)
    gradients = bulk.replace_rejected(gradients, momenta, accepted)
    updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
    torch._foreach_sign_(updates)
    torch._foreach_lerp_(momenta, gradients, 1 - beta2)
    # a CPU has the answer at once, and then mostly nothing is to do
    if accepted.device.type != "cpu" or not accepted.all():
        torch._foreach_mul_(updates, accepted.unbind())
    if weight_decay != 0 and method != "l2":
        bulk.decay(parameters, lr, weight_decay, accepted, method)
    if isinstance(lr, Tensor):  # a number as alpha is not rounded to the dtype of the parameter, a factor would be
        torch._foreach_mul_(updates, lr)
        lr = 1.0
    torch._foreach_add_(parameters, updates, alpha=-lr)
