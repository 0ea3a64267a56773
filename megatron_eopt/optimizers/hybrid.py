"""Muon of plain torch: one optimizer that orthogonalizes matrices, and has AdamW for the rest inside."""

from math import inf
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.flattening import FlatteningMuon
from megatron_eopt.optimizers.parts import HybridOptimizer

MAX_ASPECT_RATIO = 10
"""Of the matrices that :class:`Muon` orthogonalizes."""


class Muon(HybridOptimizer):
    """Muon for matrices and AdamW for the rest, in one optimizer of plain torch.

    For a matrix ``W`` (m x n) with gradient ``g``, in this order:

    1. ``W <- (1 - lr weight_decay) W``;
    2. ``M <- momentum M + g``;
    3. ``W <- W - lr max(1, m/n)^0.5 O``, with ``O`` the orthogonal factor of ``M`` by Newton-Schulz iteration.

    ``O`` does not change where ``M`` is multiplied by a number, so what is kept is ``(1 - momentum) M``. Matrices that
    are DTensors (FSDP2, HSDP, tensor parallelism) are orthogonalized as the whole matrices that they are. More than two
    dimensions are read as a matrix: the first one times the rest. Of ``muon_params``, those of one dimension and
    matrices whose long side is above ten times the short one, unless they are declared to be several, are given to
    AdamW; the first rank logs how many.

    Args:
        muon_params: matrices, named ones or groups of them; embeddings and output layers better go below.
        adam_params: all other parameters, likewise.
        lr: of the matrices.
        momentum: in [0, 1).
        weight_decay: decoupled, of both; a group may have its own.
        adam_betas: of AdamW.
        adam_eps: of AdamW, above 0.
        ns_steps: Newton-Schulz steps with the quintic coefficients.
        adam_lr: of AdamW; None for ``lr``. Its ratio to ``lr`` stays under a scheduler that multiplies all rates.
        adam_fused: whether AdamW uses torch's fused kernel.
        **muon_settings: further arguments of :class:`~megatron_eopt.optimizers.muon.TensorParallelMuon`, such as
            ``tp_mode`` (``auto`` here), ``fp32_matmul_prec``, and under DDP ``data_parallel_group``.

    Raises:
        TypeError: for an argument that ``TensorParallelMuon`` does not know.
        ValueError: for a setting out of its range, or a DTensor of which a rank holds several separate parts.
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
        settings = {"nesterov": False, "scale_mode": "shape_scaling", "tp_mode": "auto", **own}
        adam = {
            "lr": lr if adam_lr is None else adam_lr,
            "betas": adam_betas,
            "eps": adam_eps,
            "weight_decay": weight_decay,
            "fused": adam_fused or None,  # False would also turn off what torch takes by itself
        }
        super().__init__(muon_params, adam_params, FlatteningMuon, settings, adam)

    def why_rest(self, parameter: Tensor) -> str | None:
        """Why a parameter is given to AdamW; None where it is orthogonalized."""
        if parameter.ndim < 2:
            return "of fewer than two dimensions"
        too_long = declared_split(parameter) is None and _aspect_ratio(parameter) > MAX_ASPECT_RATIO
        return f"of aspect ratio above {MAX_ASPECT_RATIO}" if too_long else None


def _aspect_ratio(parameter: Tensor) -> float:
    """Long side by short side of the matrix that a parameter is read as."""
    rows = parameter.shape[0]
    columns = parameter.numel() // rows if rows else 0
    return max(rows, columns) / min(rows, columns) if columns else inf
