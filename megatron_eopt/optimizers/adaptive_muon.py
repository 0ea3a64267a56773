"""Muon whose orthogonal factors are normalized by a second moment, for parameters that may be sharded."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import second_moment
from megatron_eopt.optimizers.foreach import Batch
from megatron_eopt.optimizers.group_settings import DecayMethod, check_flag, decay_method
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.parameters import TensorParallelGroups, local, names_of_last
from megatron_eopt.optimizers.second_moment import Factor, Moment2Method, tall
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates
from megatron_eopt.parallel.records import TpMode

MOMENT2_BUFFER = "moment2_buffer"


class TensorParallelAdaptiveMuon(TensorParallelMuon):
    """Muon with a second moment of what it orthogonalizes: AdaMuon, NorMuon or NAMO.

    ``O`` is the orthogonal factor of each whole logical matrix (m x n), ``G`` its gradient, ``g'`` its momentum after
    the look-ahead:

    - ``adamuon``: ``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)``; with ``align_rms`` rescaled to the norm of ``O``.
    - ``normuon``: ``v <- EMA(mean(O^2))`` over the short dimension, ``U = O rsqrt(max(v, eps))``, rescaled to the norm
      of ``O``.
    - ``namo``: ``v <- EMA(||G||^2)``, ``U = O ||g'|| / (sqrt(v) + eps)``.

    The scale of Muon multiplies ``U``. Means and norms are those of the global matrix, in at most one all-reduce of a
    step for each group of ranks, so the update at TP=k is the update at TP=1. A gradient that is not finite leaves the
    second moment as it is, and a zero factor gives a zero update. See :mod:`~megatron_eopt.optimizers.second_moment`.

    Args:
        params: as in :class:`TensorParallelMuon`, and so are those that are not named here.
        moment2_method: ``adamuon``, ``normuon`` or ``namo``.
        beta2: of the second moment, in [0, 1); a group may have its own.
        eps: above 0; a group may have its own. For normuon it bounds mean squares, which are near ``1 / max(m, n)``.
        align_rms: whether the update of adamuon has Muon's size, as published with ``0.2 sqrt(m n)``, which is Muon's
            with ``spectral`` and 0.2. Without, the first update is larger by ``sqrt(max(m, n) / (1 - beta2))``.

    Raises:
        ValueError: also for an unknown method, ``beta2`` or ``eps`` out of its range, namo with L2 decay, for normuon
            and namo with ``blockwise`` shards, and for normuon with DTensors that are cut along rows and columns, or
            whose logical matrices are cut as no placement says.
        TypeError: for a subclass with an ``orthogonalize`` of its own.
    """

    scales_factors = False  # the second moment is of the factor alone, and the scale comes after it

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
        moment2_method: Moment2Method = "adamuon",
        beta2: float = 0.95,
        eps: float = 1e-8,
        align_rms: bool = True,
        cuda_graphs: bool = False,
        data_parallel_group: ProcessGroup | None = None,
        plan_rates: Rates | Literal["measure"] = DEFAULT_RATES,
        symmetric_products: str | None = None,
        weight_decay_method: DecayMethod | None = None,
    ) -> None:
        check_flag(type(self).__name__, "align_rms", align_rms)
        check_choice("moment2_method", moment2_method, get_args(Moment2Method))
        if type(self).orthogonalize is not TensorParallelMuon.orthogonalize:
            raise TypeError(
                f"{type(self).__name__} has an orthogonalize of its own, which maps one parameter to its update; the "
                f"second moment needs the orthogonal factors of all matrices together, before they are scaled: "
                f"override orthogonalize of TensorParallelMuon, or update here"
            )
        self.moment2_method = moment2_method
        self.align_rms = align_rms
        self.keeps_directions = moment2_method == "namo"
        self._second_rates = {"beta2": beta2, "eps": eps}
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
            coefficient_type,
            num_ns_steps,
            scale_mode,
            extra_scale_factor,
            pg_collection,
            tp_mode,
            cuda_graphs,
            data_parallel_group,
            plan_rates,
            symmetric_products,
            weight_decay_method,
        )

    def _further_settings(self) -> dict[str, Any]:
        return self._second_rates

    def _check_settings(self, group: dict[str, Any]) -> None:
        super()._check_settings(group)
        name, weight_decay = type(self).__name__, group["weight_decay"]
        decays = isinstance(weight_decay, Tensor) or weight_decay != 0
        if self.moment2_method == "namo" and decays and decay_method(name, group) == "l2":
            raise ValueError(
                f"{name}: namo compares the norms of gradient and momentum, which L2 decay would add to: take "
                f"use_decoupled_weight_decay=True, or weight_decay=0 instead of {weight_decay}"
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        name, method = type(self).__name__, self.moment2_method
        if not 0 <= group["beta2"] < 1:
            raise ValueError(f"{name}: beta2 must lie in [0, 1), got {group['beta2']}")
        if not 0 < group["eps"] < inf:
            raise ValueError(
                f"{name}: eps must be a finite number above 0, since {method} divides by it, got {group['eps']}"
            )
        names = names_of_last(self.param_groups)
        for parameter, called in zip(group["params"], names, strict=True):
            if method != "adamuon":
                self._refuse_blockwise(parameter, f"statistics of {method}", ", or adamuon")
            if method == "normuon" and len(self.layout(parameter).cut_dims) > 1:
                raise ValueError(
                    f"{name}: the statistics of normuon, one for each row or column, need one of them whole, but "
                    f"{called}, a matrix {self.layout(parameter).shape}, is cut along both: shard one dimension of it "
                    f"alone, or take adamuon or namo"
                )
            self._check_placements(parameter, called)

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it."""
        return super().settings() | {"moment2_method": self.moment2_method, "align_rms": self.align_rms}

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> float:
        """RMS of the entries of the first update of a matrix of full rank, before the learning rate.

        Args:
            rows: of the logical matrix.
            cols: of the logical matrix.
            group: the one it is in; None for one without settings of its own.
        """
        settings = self.update_settings(group or {})
        rates = {**self.defaults, **(group or {})}
        return second_moment.predicted_first_rms(
            settings.predicted_rms(rows, cols),
            settings.scale(rows, cols),
            self.moment2_method,
            self.align_rms,
            rates["momentum"],
            rates[self.nesterov_key],
            rates["beta2"],
        )

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum, and the second moment: of the parameter, or one for each of its logical matrices."""
        tensors = super().state_tensors(parameter)
        keys = self._moment_keys(parameter)
        if self.moment2_method == "adamuon":
            return [*tensors, StateTensor(keys[0], dtype=torch.float32)]
        if self.moment2_method == "namo":
            return [*tensors, *(StateTensor(key, (), part, torch.float32) for part, key in enumerate(keys))]
        shapes = [layout.shape for layout in self.matrix_layouts(parameter)]
        return [
            *tensors,
            *(
                StateTensor(key, ("rows" if tall(shape) else "columns",), part, torch.float32)
                for part, (key, shape) in enumerate(zip(keys, shapes, strict=True))
            ),
        ]

    def _moment_keys(self, parameter: Tensor) -> list[str]:
        return [
            MOMENT2_BUFFER + end for end in ([""] if self.moment2_method == "adamuon" else self.key_ends(parameter))
        ]

    def _further_state(self, parameter: Tensor) -> list[Tensor]:
        state = self._state_of(parameter)
        return [local(state[key]) for key in self._moment_keys(parameter)]

    def update(self, batches: Sequence[Batch], factors: list[Tensor], directions: Sequence[Tensor]) -> Sequence[Tensor]:
        """``U`` of each logical matrix, times its scale."""
        engine, indices = self.engine, [i for batch in batches for i in batch.indices]
        described = self._described_factors(batches, factors)
        if self.moment2_method == "adamuon":
            directed = second_moment.adamuon(engine, indices, described, self.align_rms)
        elif self.moment2_method == "normuon":
            directed = second_moment.normuon(engine, described)
        else:
            gradients = engine.split_all(indices, [gradient for batch in batches for gradient in batch.gradients])
            norms = second_moment.squared_norms(engine, engine.flat(indices), gradients, directions)
            directed = second_moment.namo(described, norms)
        return [
            (x * (ratio * scale)).to(factor.dtype)
            for factor, (x, ratio), scale in zip(factors, directed, engine.scales(indices), strict=True)
        ]

    def _described_factors(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> list[Factor]:
        """The orthogonal factors, with what their second moments need."""
        described, of_matrices = [], iter(factors)
        for batch in batches:
            beta2, eps = batch.settings["beta2"], batch.settings["eps"]
            for n, (index, moments) in enumerate(zip(batch.indices, batch.further, strict=True)):
                flag, matrices = torch.as_tensor(batch.flag(n), device=moments[0].device), self.engine.matrices[index]
                each = moments if len(moments) == len(matrices) else moments * len(matrices)
                pairs = zip(matrices, each, strict=True)
                described += [Factor(m, next(of_matrices), moment, flag, beta2, eps) for m, moment in pairs]
        return described
