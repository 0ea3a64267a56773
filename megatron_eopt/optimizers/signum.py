"""Signum: every entry of the update is the sign of the momentum."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.group_settings import DecayMethod, Scalar
from megatron_eopt.optimizers.lion import Lion
from megatron_eopt.optimizers.parameters import TensorParallelGroups


class Signum(Lion):
    """Signum, signSGD with momentum [1], with decoupled weight decay: Lion with one beta.

    For a parameter ``p`` with gradient ``g`` and momentum ``m``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or as ``weight_decay_method`` says;
    2. ``m <- beta m + (1 - beta) g``;
    3. ``p -= lr * sign(m)``.

    Everything else is as in :class:`~megatron_eopt.optimizers.lion.Lion`: what is said there of rates, shards, DTensors
    and gradients that are left out, and the state.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, at least 0.
        momentum: ``beta``, in [0, 1); 0 is signSGD.
        weight_decay: at least 0.
        weight_decay_method: ``decoupled``, ``independent``, ``palm`` or ``l2``, as in Lion.
        maximize: ascend instead of descend.
        pg_collection: the process groups of sharded parameters, to agree on gradients that are not finite.

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
        self.pg_collection = pg_collection
        decay = {"weight_decay": weight_decay, "weight_decay_method": weight_decay_method}
        defaults = {"lr": lr, "momentum": momentum, **decay, "maximize": maximize}
        super(Lion, self).__init__(params, defaults)  # Lion's own would give every group betas beside its momentum

    def _check_group(self, group: dict[str, Any]) -> None:
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"{type(self).__name__}: momentum must lie in [0, 1), got {group['momentum']}")
        super()._check_group(_as_lions(group))

    def _update(self, parameters: Sequence[Tensor], accepted: Tensor, group: dict[str, Any]) -> None:
        super()._update(parameters, accepted, _as_lions(group))


def _as_lions(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "betas": (group["momentum"], group["momentum"])}
