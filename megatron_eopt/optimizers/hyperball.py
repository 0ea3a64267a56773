"""Muon on a hyperball: matrices keep their initial norm."""

from typing import Literal, Unpack

from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon, Transport
from megatron_eopt.settings.modifiers import INSTEAD_OF_DECAY
from megatron_eopt.settings.records import Moment2Method
from megatron_eopt.step.base import BaseOptimizer


class MuonHyperball(TensorParallelMuon):
    """Muon whose matrices move on spheres, without weight decay [1].

    It is :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon` with ``weight_norm="hold"`` in all
    groups, by a name of its own.

    Each logical matrix ``W`` has a radius ``R``, its Frobenius norm before the first step. With ``O`` the orthogonal
    factor of its momentum, as in :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`, and
    ``normalize(X) = X / ||X||_F``::

        W <- R normalize(W - lr R normalize(O))

    A step turns the matrix by an angle of about ``lr``, whatever its size and shape. Norms are those of the global
    matrix, from one all-reduce of a step for each group of ranks. ``R`` is saved state in fp64, and only
    :meth:`scale_rows` changes it, so rounding of a bf16 parameter does not add up; but steps smaller than that rounding
    need fp32, as Megatron keeps it.

    A matrix stays as it is, bit for bit, where ``lr`` or the update is zero, where the step would end in the center,
    and where its gradient is missing.

    Args:
        params: matrices, or groups of them with their own ``lr``, ``momentum``, ``num_ns_steps`` or
            ``coefficient_type``; they have their initial values by the first step.
        lr: learning rate, at least 0: the length of a step relative to the norm of its matrix.
        weight_decay: 0, since the norm is kept anyway; here for those who fill it from a config.
        weight_norm: ``hold``.
        moment2_method: a second moment, as in Muon: ``normuon`` makes it NorMuon on a hyperball. So are ``beta2``
            and ``eps``.
        **settings: these, ``momentum`` and ``nesterov`` are those of
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Raises:
        ValueError: as by Muon; for a weight decay, for scale settings, and with ``blockwise``. In the first
            step, before anything is changed, for a matrix whose norm is zero or not finite.

    [1] Wen et al., Fantastic Pretraining Optimizers and Where to Find Them 2.1: Hyperball Optimization (2025).
    """

    decays_weights = False
    size_rule = "lr times the norm of the matrix"
    measures = True
    instead_of_decay = INSTEAD_OF_DECAY

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        weight_norm: Literal["hold"] = "hold",
        moment2_method: Moment2Method = "none",
        beta2: float = 0.95,
        eps: float = 1e-8,
        **settings: Unpack[Transport],
    ) -> None:
        BaseOptimizer.__init__(self, params, locals())
