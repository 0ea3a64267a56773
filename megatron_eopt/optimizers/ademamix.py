"""AdEMAMix: Adam with a second, slow momentum."""

from collections.abc import Mapping
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.settings.records import ADAM, Setting
from megatron_eopt.settings.values import AT_LEAST_0, BELOW_1, Scalar, count
from megatron_eopt.step import foreach
from megatron_eopt.step.elementwise_optimizer import Batch, ElementwiseOptimizer
from megatron_eopt.step.parameters import TensorParallelGroups
from megatron_eopt.step.state import EXP_AVG_SQ, STEPS, StateTensor

FAST = "exp_avg_fast"
SLOW = "exp_avg_slow"


class AdEMAMix(ElementwiseOptimizer):
    """AdamW with a second momentum that forgets slowly [1].

    In step ``t`` of a parameter ``p``, with gradient ``g``:

    1. ``m1 <- beta1 m1 + (1 - beta1) g``, ``v <- beta2 v + (1 - beta2) g^2``;
    2. ``m2 <- b m2 + (1 - b) g``, with ``b = beta3(t)``;
    3. ``p <- p - lr ((m1 / (1 - beta1^t) + alpha(t) m2) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)``.

    ``alpha(t) = alpha min(1, t / alpha_warmup)``. With ``s = min(1, t / beta3_warmup)``, the reciprocal of
    ``log beta3(t)`` goes evenly from that of ``log beta1`` to that of ``log beta3``: ``(1 - s) / log beta1 + s / log
    beta3``, so that the half-life grows evenly. The authors warm both up over the whole run.

    ``t`` counts the steps that the parameter took. State is kept in fp32 (fp64 for fp64 parameters): 12 bytes an entry.
    In bf16 ``m2`` would stand still, as a step moves it by a ten-thousandth. All is elementwise: parameters of any
    shape, shards and DTensors.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, at least 0.
        betas: ``beta1`` and ``beta2``, each in [0, 1).
        beta3: of the slow momentum, in [0, 1).
        alpha: weight of the slow momentum, at least 0; 0 makes AdamW's steps, and the paper has up to 8.
        eps: added to the root of ``v``, above 0.
        weight_decay: at least 0.
        alpha_warmup: steps in which ``alpha`` grows, at least 0.
        beta3_warmup: steps in which ``beta3`` grows from ``beta1``, at least 0.
        maximize: ascend instead of descend.
        pg_collection: the process groups of sharded parameters, to agree on gradients that are not finite.

    Raises:
        ValueError: for a setting out of its range.

    [1] Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older, arXiv 2409.03137.
    """

    own_settings = (
        *ADAM,
        Setting("beta3", "Decay rate of the slow momentum, in [0, 1).", BELOW_1),
        Setting("alpha", "Weight of the slow momentum in the update.", AT_LEAST_0),
        Setting("alpha_warmup", "Steps in which alpha grows; take those of the run.", count(0), metavar="STEPS"),
        Setting("beta3_warmup", "Steps in which beta3 grows; take those of the run.", count(0), metavar="STEPS"),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.9999,
        alpha: float = 2.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        alpha_warmup: int = 0,
        beta3_warmup: int = 0,
        maximize: bool = False,
        pg_collection: TensorParallelGroups | None = None,
    ) -> None:
        super().__init__(params, locals())

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Both momenta, the second moment, and the steps."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        moments = [StateTensor(key, dtype=wide, non_negative=key == EXP_AVG_SQ) for key in (FAST, SLOW, EXP_AVG_SQ)]
        return [*moments, StateTensor(STEPS, dims=(), dtype=torch.float64, non_negative=True)]

    def update(self, batch: Batch) -> None:
        """One step of equal parameters."""
        group = batch.group
        ok = batch.ok
        beta1, beta2 = group["betas"]
        m1 = batch.state(FAST)
        m2 = batch.state(SLOW)
        v = batch.state(EXP_AVG_SQ)
        g = batch.gradients(like=m1)
        t = counted(batch)
        alpha, beta3_less_1 = scheduled(t, group)

        foreach.follow_squares(v, g, beta2, ok)
        foreach.average(m1, g, beta1, False, ok)
        from_g = torch._foreach_sub(m2, foreach.where_each(ok, g, m2))
        torch._foreach_add_(m2, foreach.multiplied_each(from_g, beta3_less_1, ok))

        updates = foreach.multiplied_each(m1, 1 / (1 - beta1**t), ok)
        torch._foreach_add_(updates, foreach.multiplied_each(m2, alpha, ok))
        roots = foreach.multiplied_each(v, 1 / (1 - beta2**t), ok)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(updates, roots)
        if group["weight_decay"] != 0:
            torch._foreach_add_(updates, batch.weights, alpha=group["weight_decay"])
        foreach.subtract(batch.weights, updates, group["lr"], ok)


def counted(batch: Batch) -> Tensor:
    """The number of each parameter's step, from 1; counts it."""
    kept = batch.state(STEPS)
    steps = torch.stack(kept) + (1.0 if batch.ok is None else batch.ok.double())
    torch._foreach_copy_(kept, list(steps.unbind()))
    return steps.clamp(min=1)  # to divide by, where the first step is skipped


def scheduled(steps: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """``alpha`` and ``beta3 - 1`` in steps of these numbers."""
    alpha_share = (steps / max(1, group["alpha_warmup"])).clamp(max=1)
    beta3_share = (steps / max(1, group["beta3_warmup"])).clamp(max=1)
    beta1, _ = group["betas"]
    beta3 = group["beta3"]
    # a beta of 0 has the logarithm -inf, and the sum of two -0.0 is -0.0
    start = 1 / log(beta1) if beta1 > 0 else -0.0
    end = 1 / log(beta3) if beta3 > 0 else -0.0
    return alpha_share * group["alpha"], ((1 - beta3_share) * start + beta3_share * end).reciprocal().expm1()
