"""PolarGrad: orthogonal factors of the momentum, times its nuclear norm."""

from types import MappingProxyType
from typing import Unpack

from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon, Transport
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.settings.of_class import with_settings
from megatron_eopt.settings.records import DecayMethod
from megatron_eopt.step.step import Step


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
        **settings: these, and what is not named here, as in
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Raises:
        ValueError: as by Muon; for scale settings, and with ``blockwise``.

    [1] Lau, Long and Su, PolarGrad: A Class of Matrix-Gradient Optimizers from a Unifying Preconditioning Perspective,
    arXiv 2505.21799.
    """

    size_rule = "the nuclear norm of the momentum"
    measures = True
    only = MappingProxyType(
        {
            "weight_norm": ("none", "brake"),
            "relative_update": ("none",),
            "moment2_method": ("none",),
        }
    )

    @with_settings(Transport, TensorParallelMuon)
    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.01,
        *,
        weight_decay_method: DecayMethod | None = None,
        **settings: Unpack[Transport],
    ) -> None:
        self._begin(params, locals())

    @property
    def keeps_momenta(self) -> bool:
        """They size the update."""
        return True

    @staticmethod
    def of_step(step: Step) -> Program:
        """PolarGrad's step of some parameters."""
        step.decay()
        M = step.momentum()
        U = yield from step.orthogonalize(M if callable(M) else list(M))
        step.subtract(U, step.inner_products(M, U))
