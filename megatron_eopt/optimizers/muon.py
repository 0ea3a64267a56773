"""Muon for parameters that may be sharded over a tensor-parallel group."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import check_split_shapes
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.orthogonalize.coefficients import Coefficients, composite_range, set_length
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor, validate_scale_mode
from megatron_eopt.parallel.layout import Layout, is_expert, is_sharded, layout_of
from megatron_eopt.parallel.schemes import NewtonSchulz, TpMode, orthogonalize, validate_tp_mode

logger = logging.getLogger(__name__)


class TensorParallelGroups(Protocol):
    """What is read of Megatron's ProcessGroupCollection."""

    tp: ProcessGroup
    expt_tp: ProcessGroup


class TensorParallelMuon(OrthogonalizedOptimizer):
    """Muon: the update is the orthogonal factor of the momentum, scaled by the shape of the matrix.

    The momentum is orthogonalized by Newton-Schulz iteration as a matrix of the model, wherever it lies: with every
    ``tp_mode`` but ``blockwise`` the update at TP=k is the update at TP=1, scale factor and QKV split included. Query
    groups of fused projections are interleaved, ``(groups, q + k + v, hidden)``, as Megatron stores them.

    Args:
        params: matrices, or groups of them; see :func:`megatron_eopt.parallel.layout.layout_of` for the attributes
            that say how they are sharded.
        lr: learning rate.
        momentum: of the exponential moving average, in [0, 1).
        nesterov: whether to look ahead.
        weight_decay: weight decay.
        use_decoupled_weight_decay: decay the parameter (as AdamW does), or add to the gradient.
        split_qkv: orthogonalize and scale the parts of fused projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute
            ``qkv_split_shapes`` of a parameter wins.
        fp32_matmul_prec: ``low``, ``medium`` (bf16), ``high`` (TF32) or ``highest`` (fp32).
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: ``spectral``, ``unit_rms_norm`` or ``shape_scaling``.
        extra_scale_factor: multiplies the update; 0.2 with ``spectral`` gives updates the size of AdamW's.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.
        tp_mode: ``duplicated`` or ``distributed``, both exact, or ``blockwise``: each shard by itself.

    Raises:
        ValueError: at construction, for a setting out of its range, an unknown name, a schedule that the coefficient
            set cannot serve, a parameter that is no matrix, a split that does not fit, or shards without a group.
    """

    momentum_key = "momentum"
    split_lengths = (3, 4)

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
    ) -> None:
        validate_tp_mode(tp_mode)
        validate_scale_mode(scale_mode)
        self.newton_schulz = NewtonSchulz(
            steps=num_ns_steps, coefficient_type=coefficient_type, fp32_matmul_prec=fp32_matmul_prec
        )
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.pg_collection = pg_collection
        self.tp_mode = tp_mode
        self._note_short_schedule()
        super().__init__(
            params,
            lr,
            momentum,
            nesterov,
            weight_decay,
            use_decoupled_weight_decay,
            split_qkv,
            is_qkv_fn,
            qkv_split_shapes,
            fp32_matmul_prec,
            orthogonalize_fn=lambda matrix: self.newton_schulz(matrix, Layout((matrix.size(0), matrix.size(1)))),
            scale_factor_fn=self._scale,
        )

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """The update of one parameter, before the learning rate; sharded as the parameter is."""
        layout = self.layout(p)
        split_shapes = self.split_shapes(p)
        return orthogonalize(
            grad, layout, self.scheme(layout, split_shapes), self.newton_schulz, self._scale, split_shapes
        )

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies."""
        groups = self.pg_collection
        return layout_of(parameter, getattr(groups, "tp", None), getattr(groups, "expt_tp", None))

    def split_shapes(self, parameter: Tensor) -> tuple[int, ...] | None:
        """Rows of each logical matrix in one query group of a fused parameter; None for any other."""
        if not self._is_split(parameter):
            return None
        own = getattr(parameter, "qkv_split_shapes", None)
        return self.qkv_split_shapes if own is None else tuple(own)

    def scheme(self, layout: Layout, split_shapes: Sequence[int] | None) -> TpMode:
        """How a parameter is orthogonalized: as ``tp_mode`` says, with one exception.

        With more ranks than query groups a shard ends inside a group and holds no whole row range of Q, K or V, so
        such a parameter is gathered under ``distributed`` too.
        """
        if self.tp_mode == "distributed" and _cut_inside_group(layout, split_shapes):
            return "duplicated"
        return self.tp_mode

    def _scale(self, rows: int, cols: int) -> float:
        return self.extra_scale_factor * muon_scale_factor(rows, cols, self.scale_mode)

    def _check_split(self, qkv_split_shapes: Sequence[int] | None) -> tuple[int, ...] | None:
        # None is allowed here: each parameter may bring its own, which _check_qkv looks at.
        return None if qkv_split_shapes is None and self.is_qkv_fn else super()._check_split(qkv_split_shapes)

    def _check_qkv(self, parameter: Tensor) -> None:
        shapes = check_split_shapes(self.split_shapes(parameter), self.split_lengths)
        layout = self.layout(parameter)
        if layout.shape[0] % sum(shapes):
            raise ValueError(
                f"a fused projection of {layout.shape[0]} rows is not a whole number of query groups {list(shapes)}, "
                f"which have {sum(shapes)} rows"
            )
        if self.tp_mode == "blockwise" and _cut_inside_group(layout, shapes):
            raise ValueError(
                f"tp_mode blockwise cannot split a fused projection of {layout.shape[0]} rows over {layout.ranks} "
                f"ranks, whose shards end inside a query group of {sum(shapes)} rows: take duplicated or distributed, "
                f"or turn split_qkv off"
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if self.tp_mode == "blockwise" or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for parameter in group["params"]:
            name = "expt_tp" if is_expert(parameter) else "tp"
            if is_sharded(parameter) and getattr(self.pg_collection, name, None) is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is marked as sharded, but no process group "
                    f"completes it: pass a pg_collection that has {name!r}, or tp_mode='blockwise' for the "
                    f"approximation that treats each shard as a matrix"
                )

    def _note_short_schedule(self) -> None:
        settings = self.newton_schulz
        first_rank = not dist.is_initialized() or dist.get_rank() == 0
        if first_rank and settings.steps < set_length(settings.coefficient_type):
            low, high = composite_range(settings.schedule)
            logger.warning(
                "%s Newton-Schulz steps of %s are fewer than were fitted together: singular values in [0.01, 1] "
                "become %.2f to %.2f instead of 1",
                settings.steps,
                settings.coefficient_type,
                low,
                high,
            )


def _cut_inside_group(layout: Layout, split_shapes: Sequence[int] | None) -> bool:
    return split_shapes is not None and layout.dim == 0 and layout.shard_shape[0] % sum(split_shapes) != 0
