"""Scion for hidden matrices."""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon, Transport
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import ABOVE_0, Scalar, is_readable
from megatron_eopt.step.base import BaseOptimizer


class Scion(TensorParallelMuon):
    """Scion [1] for hidden matrices: steps in a spectral-norm ball.

    For each logical matrix ``W`` (rows x cols, outputs x inputs) with gradient ``g``, in this order:

    1. ``d <- momentum d + (1 - momentum) g``; the paper's ``alpha`` is ``1 - momentum``;
    2. ``U V^T``, the orthogonal factor of ``d``, makes the update ``O = radius * sqrt(rows / cols) * U V^T``;
    3. constrained: ``W <- (1 - lr) W - lr O``; unconstrained: ``W <- W - lr O``.

    ``-O`` is the paper's ``lmo(d)`` for the ball ``sqrt(cols / rows) ||W||_2 <= radius``, its norm of hidden matrices.
    (For inputs that are no activations, such as images, it has ``max(1, sqrt(rows / cols))``.) Constrained steps are
    those of Frank-Wolfe, in place of weight decay: a matrix that starts in the ball stays in it, but for the errors of
    Newton-Schulz, and one outside comes nearer by the factor ``1 - lr`` in each step. Since bf16 parameters lose a
    factor nearer to 1 than ``2^-9``, keep these in fp32, as Megatron does.

    The paper's norms of other parameters are elementwise: give embeddings, output layers and vectors to
    :class:`~megatron_eopt.optimizers.lion.Signum` in a group with an ``lr`` of its own, or to AdamW.

    Args:
        params: matrices, or groups of them with their own ``lr``, ``momentum``, ``radius``, ``num_ns_steps`` or
            ``coefficient_type``.
        lr: learning rate, at least 0; in [0, 1] where constrained.
        momentum: of the exponential moving average, in [0, 1).
        radius: ``rho``, above 0, also as ``spectral_radius``; the paper has 50 for its GPT, with rates near ``2^-12``.
        constrained: whether the ball bounds the matrices (the paper's Scion), or the steps alone (its unconstrained
            Scion).
        weight_decay: 0; here for those who fill it from a config.
        weight_norm: ``brake``, see :mod:`~megatron_eopt.settings.modifiers`, or ``none``.
        **settings: see :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Raises:
        ValueError: as by Muon; for ``lr`` or ``radius`` out of its range, a weight decay, and scale settings.

    [1] Pethick et al., Training Deep Learning Models with Norm-Constrained LMOs, arXiv 2502.07529.
    """

    own_settings = (
        Setting("radius", "Radius of the ball of every matrix.", ABOVE_0, planned=True),
        Setting("constrained", "Bound the steps alone, not the matrices.", whole=True),
    )
    decays_weights = False
    size_rule = "radius * sqrt(rows / cols)"
    instead_of_decay = "constrained=True bounds matrices by their radius"
    constrained: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.9,
        *,
        radius: float = 50.0,
        constrained: bool = True,
        weight_decay: float = 0.0,
        weight_norm: Literal["none", "brake"] = "none",
        brake_outward: float = 0.5,
        brake_inward: float = 1.0,
        **settings: Unpack[Transport],
    ) -> None:
        BaseOptimizer.__init__(self, params, locals())

    def _scale(self, group: Mapping[str, Any], rows: int, cols: int) -> float:
        radius: float = group["radius"]
        return radius * muon_scale_factor(rows, cols, "unit_rms_norm")

    def _check_together(self, group: Mapping[str, Any]) -> None:
        for rate in (group["lr"], group.get("max_lr") or 0):  # the latter is a scheduler's, of Megatron's groups
            if self.constrained and is_readable(rate) and rate > 1:
                raise ValueError(
                    f"{type(self).__name__}: lr must lie in [0, 1], since a constrained step goes that part of the way "
                    f"to the boundary, got {rate}"
                )
        super()._check_together(group)

    def _rates_of(self, group: Mapping[str, Any]) -> tuple[float, Scalar]:
        # (1 - lr) W, which is what a constrained step leaves of the matrix
        return super()._rates_of(group)[0], 1.0 if self.constrained else 0.0
