"""Muon with a second moment in fp32: AdaMuon, NorMuon, NAMO."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision
from megatron_eopt.optimizers.tensor_parallel_muon import Modifiers, TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.settings.execution import Execution
from megatron_eopt.settings.records import DecayMethod
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import TensorParallelGroups, local


class TensorParallelAdaptiveMuon(TensorParallelMuon):
    """Muon with a second moment: AdaMuon, NorMuon or NAMO.

    It is :class:`TensorParallelMuon` with a ``moment2_method`` in every group, by a name of its own. The formulas are
    those of :mod:`~megatron_eopt.transforms.second_moment`. normuon has a second moment for each column of a wide
    matrix, as emerging-optimizers; its paper (arXiv 2510.05491) has one for each row, whatever the shape.

    The scale of Muon multiplies ``U``. Means and norms are those of the global matrix, in at most one all-reduce of a
    step for each group of ranks, so the update at TP=k is the update at TP=1. A zero factor
    gives a zero update.

    Args:
        params: as in :class:`TensorParallelMuon`, and so are those that are not named here.
        moment2_method: ``adamuon``, ``normuon`` or ``namo``.
        beta2: of the second moment, in [0, 1); a group may have its own.
        eps: above 0; a group may have its own. For normuon it bounds mean squares, which are near ``1 / max(m, n)``.
        align_rms: whether the update of adamuon has Muon's size, as published with ``0.2 sqrt(m n)``, which is Muon's
            with ``spectral`` and 0.2. Without, the first update is larger by ``sqrt(max(m, n) / (1 - beta2))``.

    Raises:
        ValueError: also for an unknown method, ``beta2`` or ``eps`` out of its range, namo with L2 decay, for normuon
            and namo with ``blockwise``, and for normuon with DTensors that are cut along rows and columns, or
            whose logical matrices are cut as no placement says.
        TypeError: for a subclass with an ``orthogonalize`` of its own.
    """

    scales_factors_of_users = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        fp32_matmul_prec: MatmulPrecision = "medium",
        coefficient_type: str | Sequence[Coefficients] = "quintic",
        num_ns_steps: int = 5,
        scale_mode: ScaleMode = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: TensorParallelGroups | None = None,
        tp_mode: TpMode = "duplicated",
        moment2_method: Literal["adamuon", "normuon", "namo"] = "adamuon",
        beta2: float = 0.95,
        eps: float = 1e-8,
        align_rms: bool = True,
        weight_decay_method: DecayMethod | None = None,
        execution: Execution = Execution(),
        **settings: Unpack[Modifiers],
    ) -> None:
        BaseOptimizer.__init__(self, params, locals())

    def _check_second_moment(self, group: Mapping[str, Any]) -> None:
        for key in ("orthogonalize", "scaled_orthogonalize_fn"):
            if self._overridden(key):
                raise TypeError(
                    f"{type(self).__name__} has an {key} of its own, which makes scaled updates; the second moment "
                    f"needs the orthogonal factors of all matrices together, before they are scaled: set "
                    f"orthogonalize_fn, override update, or take TensorParallelMuon"
                )

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """One parameter's orthogonal factor, without the scale."""
        engine, index, _ = self._engine_for(p, grad, group_settings)
        [factor] = engine.merge([index], self._factors(engine, index, engine.split([index], [local(grad)])))
        return factor
