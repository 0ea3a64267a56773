"""PolarGrad: orthogonal factors of the momentum, times its nuclear norm."""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon, Transport
from megatron_eopt.settings.records import DecayMethod
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.momenta.momentum_stack import MomentumStack, Update
from megatron_eopt.step.stacks import Rule


class PolarGrad(TensorParallelMuon):
    """PolarGrad [1]: Muon's updates, sized by their momentum's nuclear norm.

    For each logical matrix ``W`` with gradient ``g``, in this order:

    1. weight decay: ``W -= lr * weight_decay * W``;
    2. ``M <- momentum M + (1 - momentum) g``;
    3. the polar decomposition ``M = U H``: ``U`` by Newton-Schulz, and ``tr(H) = <M, U>``, the nuclear norm of ``M``;
    4. ``W -= lr * <M, U> * U``: steepest descent in the spectral norm.

    So steps become smaller with the gradients, and a loss times 2 is an ``lr`` times 2. ``<M, U>`` is that of whole
    matrices, from one all-reduce of a step for each group of ranks. Where Newton-Schulz leaves singular values ``s`` in
    place of 1, it weighs those of ``M`` by ``s``; ``coefficient_type="polar_express"`` with 8 steps leaves 1.

    Args:
        params: matrices, or groups of them with their own ``lr``, ``momentum``, ``weight_decay``, ``num_ns_steps`` or
            ``coefficient_type``.
        nesterov: whether ``(1 - momentum) g + momentum M`` takes the place of ``M`` in 3 and 4, as in Muon.
        cautious_weight_decay: see :mod:`~megatron_eopt.settings.modifiers`, as for ``weight_norm``, ``brake`` or
            ``none``.
        **settings: these, and what is not named here, as in
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Raises:
        ValueError: as by Muon; for scale settings, and with ``blockwise``.

    [1] Lau, Long and Su, PolarGrad: A Class of Matrix-Gradient Optimizers from a Unifying Preconditioning Perspective,
    arXiv 2505.21799.
    """

    size_rule = "the nuclear norm of the momentum"
    measures = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.01,
        *,
        use_decoupled_weight_decay: bool = True,
        weight_decay_method: DecayMethod | None = None,
        cautious_weight_decay: bool = False,
        weight_norm: Literal["none", "brake"] = "none",
        brake_outward: float = 0.5,
        brake_inward: float = 1.0,
        max_update_rms: float = 0.0,
        **settings: Unpack[Transport],
    ) -> None:
        BaseOptimizer.__init__(self, params, locals())

    @property
    def keeps_momenta(self) -> bool:
        """They size the update."""
        return True

    def _check_together(self, group: Mapping[str, Any]) -> None:
        super()._check_together(group)
        for name in self._overridden("orthogonalize", "scaled_orthogonalize_fn"):
            raise ValueError(
                f"{type(self).__name__} has an {name} of its own, whose updates have a size, and it would size them "
                "again: set orthogonalize_fn, or take TensorParallelMuon"
            )

    def update(self, stack: MomentumStack) -> Rule:
        """PolarGrad's update of equal matrices."""
        M = yield stack.momentum()
        U = yield stack.orthogonalize(M if callable(M) else list(M))
        return Update(U, (yield stack.inner_products(M, U)))
