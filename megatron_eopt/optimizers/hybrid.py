"""Muon of plain torch: one optimizer that orthogonalizes matrices, and has AdamW for the rest inside."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers import bulk
from megatron_eopt.optimizers.batch import Batch
from megatron_eopt.optimizers.group_settings import STEPS, UpdateSettings
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.parts import HybridOptimizer, listed
from megatron_eopt.parallel.layout import Layout

NS_STEPS = "ns_steps"
"""Setting of a group of :class:`Muon`: its Newton-Schulz steps."""


class Muon(HybridOptimizer):
    """Muon for matrices and AdamW for the rest, in one optimizer of plain torch.

    For a matrix ``W`` (m x n) with gradient ``g``, in this order:

    1. ``M <- momentum M + g``, kept as ``momentum_buffer``;
    2. ``W <- (1 - lr weight_decay) W``;
    3. ``W <- W - lr max(1, m/n)^0.5 O``, with ``O`` the orthogonal factor of ``M`` by ``ns_steps`` steps of
       ``X <- a X + (b A + c A^2) X``, ``A = X X^T``, from ``M / |M|_F``; (a, b, c) = (3.4445, -4.7750, 2.0315) [1].

    Matrices that are DTensors (FSDP2, HSDP, tensor parallelism) are orthogonalized as the whole matrices that they are.
    More than two dimensions are read as a matrix: the first one times the rest; a declared stack stays one.

    ``param_groups`` are the matrices', each with its ``lr``, ``momentum``, ``weight_decay`` and ``ns_steps``: a value
    that is changed is in force in the next step. AdamW's rate follows by ratio, and both states are in one
    ``state_dict``: see :class:`~megatron_eopt.optimizers.parts.HybridOptimizer`.

    Args:
        muon_params: matrices, named ones or groups of them; embeddings and output layers better go below.
        adam_params: all other parameters, or groups of them; a group may have its own ``lr``, ``betas``, ``eps`` and
            ``weight_decay``, which is otherwise torch's 0.01.
        lr: of the matrices.
        momentum: in [0, 1).
        weight_decay: of the matrices, decoupled.
        adam_betas: of AdamW.
        adam_eps: of AdamW, above 0.
        ns_steps: Newton-Schulz steps, at least 1.
        adam_lr: of AdamW; None for ``lr``.
        adam_fused: whether AdamW uses torch's fused kernel; otherwise torch chooses.
        **muon_settings: further arguments of :class:`~megatron_eopt.optimizers.muon.TensorParallelMuon`, such as
            ``coefficient_type``, ``fp32_matmul_prec``, ``nesterov``, ``tp_mode`` (``auto`` here), and under DDP
            ``data_parallel_group``.

    Raises:
        TypeError: for an argument that ``TensorParallelMuon`` does not know.
        ValueError: for a setting out of its range, for one of ``muon_params`` with fewer than two dimensions, for no
            matrices at all, or for a DTensor of which a rank holds several separate parts.

    [1] K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
    """

    def __init__(
        self,
        muon_params: ParamsT,
        adam_params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        ns_steps: int = 5,
        adam_lr: float | None = None,
        *,
        adam_fused: bool = False,
        **muon_settings: Any,
    ) -> None:
        own = dict(**muon_settings, lr=lr, momentum=momentum, weight_decay=weight_decay, num_ns_steps=ns_steps)
        adam = {
            "lr": lr if adam_lr is None else adam_lr,
            "betas": adam_betas,
            "eps": adam_eps,
            "fused": adam_fused or None,  # False would also turn off what torch takes by itself
        }
        super().__init__(HeavyBallMuon(listed(muon_params), **{**_AS_IN_THE_ORIGINAL, **own}), adam_params, adam)


_AS_IN_THE_ORIGINAL: dict[str, Any] = {
    "nesterov": False,
    "scale_mode": "shape_scaling",
    "tp_mode": "auto",
    "coefficient_type": "simple",
    "fp32_matmul_prec": "highest",
}


class HeavyBallMuon(TensorParallelMuon):
    """The matrices of :class:`Muon`: Muon of a momentum that is no average, for any number of dimensions from two up.

    Raises:
        ValueError: at construction also for a DTensor that is cut such that a rank holds several parts of the matrix.
    """

    def _further_settings(self) -> dict[str, Any]:
        return {NS_STEPS: self.newton_schulz.steps}

    def update_settings(self, group: Mapping[str, Any]) -> UpdateSettings:
        """The iteration and the scale that the matrices of a group get.

        Raises:
            ValueError: if the group says what the optimizer would refuse, or its steps by another name.
        """
        if STEPS in group:
            raise ValueError(f"the Newton-Schulz steps of a group are {NS_STEPS!r} here, not {STEPS!r}")
        return super().update_settings(_with_steps(group))

    def _own_settings(self) -> list[dict[str, Any]]:
        groups = zip(super()._own_settings(), self.param_groups, strict=True)
        return [{**own, STEPS: group[NS_STEPS]} for own, group in groups]

    def _follow(
        self,
        batch: Batch,
        gradients: Sequence[Tensor],
        accepted: Tensor,
        average: Callable[..., list[Tensor]],
        nesterov: bool,
    ) -> list[Tensor]:
        assert average is bulk.average  # nobody overrides orthogonalize here, so the momenta are changed in place
        return bulk.heavy_ball(batch.momenta, gradients, batch.settings[self.momentum_key], nesterov, accepted)

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies, as the matrix that it is read as."""
        if _is_flattened(parameter) and not isinstance(parameter, DTensor):
            parameter = parameter.detach().flatten(1)
        return super().layout(parameter)

    def _orthogonalize(
        self, batches: Sequence[Batch], updates: list[Tensor], accepted: Sequence[Tensor]
    ) -> list[Tensor]:
        shapes = [update.shape for update in updates]
        parameters = [parameter for batch in batches for parameter in batch.parameters]
        updates[:] = [x.flatten(1) if _is_flattened(p) else x for p, x in zip(parameters, updates, strict=True)]
        factors = super()._orthogonalize(batches, updates, accepted)
        return [factor.view(shape) for factor, shape in zip(factors, shapes, strict=True)]

    def _check_parameter(self, parameter: Tensor, place: str) -> None:
        if _is_flattened(parameter):
            self.layout(parameter)  # refuses one that cannot be laid out
        else:
            super()._check_parameter(parameter, place)


def _with_steps(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, STEPS: group[NS_STEPS]} if NS_STEPS in group else dict(group)


def _is_flattened(parameter: Tensor) -> bool:
    return parameter.ndim > 2 and declared_split(parameter) is None
