"""Muon with a second moment in fp32: AdaMuon, NorMuon, NAMO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.foreach import Tensors
from megatron_eopt.optimizers.group_settings import DecayMethod, decay_method, warn
from megatron_eopt.optimizers.muon import Chunk, decay, kept_momentum, subtract
from megatron_eopt.optimizers.muon_arguments import Execution, refuse_blockwise, spelled_out
from megatron_eopt.optimizers.parameters import TensorParallelGroups, local, names_of_last
from megatron_eopt.optimizers.state import Dim, StateTensor, check_placements
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix, Shape, TpMode
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.parallel.statistics import Statistics, StatisticsRequest, norms_of, squared_norms

MOMENT2_BUFFER = "moment2_buffer"

Moment2Method = Literal["adamuon", "normuon", "namo"]


@dataclass(frozen=True)
class Moment:
    """A second moment, kept where ``accepted`` is False."""

    v: Tensor
    accepted: Tensor | bool
    beta2: float
    eps: float


def average(moments: Sequence[Moment], values: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    """``v += (1 - beta2) (value - v)``, overwriting ``values``."""
    vs, flags = [m.v for m in moments], [m.accepted for m in moments if isinstance(m.accepted, Tensor)]
    torch._foreach_clamp_max_(values, torch.finfo(torch.float32).max)  # an infinity would stay in v for ever
    new = foreach.masked(values, vs, torch.stack(flags) if flags else None)
    torch._foreach_lerp_(vs, new, [1 - m.beta2 for m in moments])
    return vs


def adamuon(factors: Tensors, moments: Sequence[Moment]) -> list[Tensor]:
    """``U = O / (sqrt(v) + eps)``, ``v <- EMA(O^2)``."""
    directions = [torch.empty_like(factor, dtype=torch.float32) for factor in factors]
    torch._foreach_copy_(directions, list(factors))
    for some in foreach.alike(directions):
        wide, of_some = [directions[i] for i in some], [moments[i] for i in some]
        roots = torch._foreach_sqrt(average(of_some, torch._foreach_mul(wide, wide)))
        torch._foreach_add_(roots, [moment.eps for moment in of_some])
        torch._foreach_div_(wide, roots)
    return directions


def normuon(engine: Engine, matrices: Sequence[Matrix], factors: Tensors, moments: Sequence[Moment]) -> list[Tensor]:
    """``rsqrt(max(v, eps))`` of rows or columns, keeping ``||O||``; one reduction."""
    steps: dict[int, Tensor] = {}
    measured = [(m, x, _tall(m.shape)) for m, x in zip(matrices, factors, strict=True)]
    means = [StatisticsRequest(matrix=m, x=x, row_squares=tall, column_squares=not tall) for m, x, tall in measured]
    # a short dimension that is cut needs its means reduced; one that is whole, the norms of O and U
    crossing = [i for i, matrix in enumerate(matrices) if _means_cross(matrix)]
    here = [i for i, matrix in enumerate(matrices) if not _means_cross(matrix)]

    def follow(some: list[int], statistics: Sequence[Statistics]) -> list[Tensor]:
        """Norms of rows or columns of ``O`` and ``U``, unscaled."""
        of_some = [moments[i] for i in some]
        along = [squares for of_matrix in statistics for squares in of_matrix.values()]
        new = torch._foreach_clamp_min(average(of_some, along), [moment.eps for moment in of_some])
        torch._foreach_rsqrt_(new)
        steps.update(zip(some, new, strict=True))
        roots = torch._foreach_sqrt(along)
        return [*roots, *torch._foreach_mul(roots, new)]

    def align(some: list[int], squares: Tensor) -> None:
        foreach.scale_each([steps[i] for i in some], _alignment(*squares.chunk(2)).unbind())

    lengths = follow(here, engine.statistics([means[i] for i in here])) if here else []  # exchanges nothing
    pairs = zip([matrices[i] for i in here] * 2, lengths, strict=True)
    norms = [StatisticsRequest(matrix=W, x=x, squared_norm=True) for W, x in pairs]
    reduced = engine.statistics([*norms, *(means[i] for i in crossing)])
    if here:
        align(here, norms_of(reduced[: len(norms)]))
    if crossing:
        align(crossing, squared_norms(follow(crossing, reduced[len(norms) :])))
    return [steps[i][:, None] if _tall(matrix.shape) else steps[i][None] for i, matrix in enumerate(matrices)]


def namo(moments: Sequence[Moment], squared_gradients: Tensor, squared_updates: Tensor) -> list[Tensor]:
    """``||g'|| / (sqrt(v) + eps)`` of each matrix, from squared norms."""
    roots = torch._foreach_sqrt(average(moments, squared_gradients.float().unbind()))
    torch._foreach_add_(roots, [moment.eps for moment in moments])
    return list((squared_updates.sqrt() / torch.stack(roots)).unbind())


def _tall(shape: Shape) -> bool:
    return shape[0] >= shape[1]  # normuon keeps statistics of rows then, else of columns


def _means_cross(matrix: Matrix) -> bool:
    short = int(_tall(matrix.shape))
    return any(r.shape[1 - short] and r.shape[short] != matrix.shape[short] for r in matrix.rectangles)


def _squared_norms(engine: Engine, matrices: Sequence[Matrix], *shards: Tensors) -> tuple[Tensor, ...]:
    several = [zip(matrices, xs, strict=True) for xs in shards]
    wanted = [StatisticsRequest(matrix=matrix, x=x, squared_norm=True) for pairs in several for matrix, x in pairs]
    return norms_of(engine.statistics(wanted)).chunk(len(shards))


def _alignment(factor: Tensor, update: Tensor) -> Tensor:
    return torch.where(update > 0, factor / update, 0.0).sqrt()


class TensorParallelAdaptiveMuon(TensorParallelMuon):
    """Muon with a second moment: AdaMuon, NorMuon or NAMO.

    ``O`` is the orthogonal factor of each whole logical matrix (m x n), ``G`` its gradient, ``g'`` its momentum after
    the look-ahead:

    - ``adamuon``: ``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)``; with ``align_rms`` rescaled to the norm of ``O``.
    - ``normuon``: ``v <- EMA(mean(O^2))`` over the short dimension, ``U = O rsqrt(max(v, eps))``, rescaled to the norm
      of ``O``.
    - ``namo``: ``v <- EMA(||G||^2)``, ``U = O ||g'|| / (sqrt(v) + eps)``.

    The scale of Muon multiplies ``U``. Means and norms are those of the global matrix, in at most one all-reduce of a
    step for each group of ranks, so the update at TP=k is the update at TP=1. A gradient that is not finite leaves the
    second moment as it is, and a zero factor gives a zero update.

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

    @spelled_out(Execution, TensorParallelMuon)
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
        weight_decay_method: DecayMethod | None = None,
        **execution: Unpack[Execution],
    ) -> None:
        check_choice("moment2_method", moment2_method, get_args(Moment2Method))
        if not align_rms and moment2_method != "adamuon":
            warn(f"{type(self).__name__}: align_rms=False has no effect with {moment2_method}, it is adamuon's")
        self.moment2_method = moment2_method
        self.align_rms = align_rms
        self.traits = replace(self.traits, keeps_momenta=moment2_method == "namo")
        self._further = {"beta2": beta2, "eps": eps}
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
            weight_decay_method=weight_decay_method,
            **execution,
        )

    def _check_settings(self, group: dict[str, Any]) -> None:
        super()._check_settings(group)
        name, weight_decay = type(self).__name__, group["weight_decay"]
        decays = isinstance(weight_decay, Tensor) or weight_decay != 0
        if self.moment2_method == "namo" and decays and decay_method(name, group) == "l2":
            raise ValueError(
                f"{name}: namo compares the norms of gradient and momentum, which L2 decay would add to: take "
                f"use_decoupled_weight_decay=True, or weight_decay=0 instead of {weight_decay}"
            )

    def _check_ranges(self, group: Mapping[str, Any]) -> None:
        super()._check_ranges(group)
        name, method, beta2, eps = type(self).__name__, self.moment2_method, group["beta2"], group["eps"]
        if not 0 <= beta2 < 1:
            raise ValueError(f"{name}: beta2 must lie in [0, 1), got {beta2}")
        if not 0 < eps < inf:
            raise ValueError(f"{name}: eps must be a finite number above 0, since {method} divides by it, got {eps}")

    def _check_group(self, group: dict[str, Any]) -> None:
        name, method = type(self).__name__, self.moment2_method
        for method_name in ("orthogonalize", "scaled_orthogonalize_fn"):
            if self._of_user(method_name):
                raise TypeError(
                    f"{name} has an {method_name} of its own, which makes scaled updates; the second moment needs the "
                    f"orthogonal factors of all matrices together, before they are scaled: set orthogonalize_fn, "
                    f"override program, or take TensorParallelMuon"
                )
        super()._check_group(group)
        names = names_of_last(self.param_groups)
        for parameter, called in zip(group["params"], names, strict=True):
            if method != "adamuon":
                refuse_blockwise(self, parameter, f"statistics of {method}", ", or adamuon")
            if method == "normuon" and len(self.layout(parameter).cut_dims) > 1:
                raise ValueError(
                    f"{name}: the statistics of normuon, one for each row or column, need one of them whole, but "
                    f"{called}, a matrix {self.layout(parameter).shape}, is cut along both: shard one dimension of it "
                    f"alone, or take adamuon or namo"
                )
            check_placements(f"{name}: {called}", parameter, self.state_tensors(parameter), self.matrix_layouts)

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint describes."""
        return super().settings() | {"moment2_method": self.moment2_method, "align_rms": self.align_rms}

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> float | None:
        """RMS of a matrix's first update, before the learning rate.

        The first second moment is ``1 - beta2`` times its first value, so entries of AdaMuon without ``align_rms`` are
        ``+-scale / sqrt(1 - beta2)``. NAMO's first ``g'`` is ``(1 - b) G``, times ``1 + b`` with Nesterov's look-ahead.
        """
        settings, rates = self.update_settings(group or {}), {**self.defaults, **(group or {})}
        muon, root = super().predicted_rms(rows, cols, group), sqrt(1 - rates["beta2"])
        if muon is None:
            return None
        if self.moment2_method == "namo":
            momentum = rates[self.traits.momentum_key]
            return muon * (1 - momentum) * (1 + momentum if rates[self.traits.nesterov_key] else 1) / root
        aligned = self.moment2_method == "normuon" or self.align_rms
        return muon if aligned else settings.scale(rows, cols) / root

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum and second moments."""
        tensors = super().state_tensors(parameter)
        if self.moment2_method == "adamuon":
            return [*tensors, StateTensor(MOMENT2_BUFFER, dtype=torch.float32)]
        ends, layouts = self.key_ends(parameter), self.matrix_layouts(parameter)
        for part, (end, layout) in enumerate(zip(ends, layouts, strict=True)):
            along: tuple[Dim, ...] = ("rows" if _tall(layout.shape) else "columns",)
            dims = along if self.moment2_method == "normuon" else ()
            tensors.append(StateTensor(MOMENT2_BUFFER + end, dims, part, torch.float32))
        return tensors

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """One parameter's orthogonal factor, without the scale."""
        engine, index, _ = self._engine_for(p, grad, group_settings)
        [factor] = engine.merge([index], self._factors(engine, index, engine.split([index], [local(grad)])))
        return factor

    def program(self, chunk: Chunk, engine: Engine) -> Program:
        """One chunk's step."""
        decay(chunk)
        u = kept_momentum(chunk, engine)
        kept = list(u) if self.traits.keeps_momenta else []
        factors = yield from engine.orthogonalize(chunk.indices, u)
        # not those of the chunk: a function of the user's in place of Newton-Schulz leaves factors unscaled here
        scales = [scale for i in chunk.indices for scale in self._session.plans.scales[1][i]]
        subtract(chunk, engine, factors, self._second_moment(chunk, engine, factors, kept, scales))

    def _second_moment(
        self, chunk: Chunk, engine: Engine, factors: list[Tensor], updates: Tensors, scales: list[float]
    ) -> Sequence[float] | Tensors:
        """The scale of each factor; adamuon and normuon scale factors themselves."""
        indices, moments = chunk.indices, list[Moment]()
        for batch in chunk.batches:
            beta2, eps = batch.settings["beta2"], batch.settings["eps"]
            moments += [Moment(v, batch.flag(n), beta2, eps) for n, vs in enumerate(batch.further) for v in vs]
        if not moments:
            return [1.0] * len(factors)
        matrices = engine.flat(indices)
        if self.moment2_method == "adamuon":
            new = engine.split(indices, adamuon(engine.merge(indices, factors), moments))
            if self.align_rms:
                ratios = list(_alignment(*_squared_norms(engine, matrices, factors, new)).unbind())
                torch._foreach_mul_(ratios, scales)
                foreach.scale_each(new, ratios)
            else:
                torch._foreach_mul_(new, scales)
            torch._foreach_copy_(factors, new)
            return [1.0] * len(factors)
        if self.moment2_method == "normuon":
            of_lines = normuon(engine, matrices, factors, moments)  # one for each row or column
            torch._foreach_mul_(of_lines, scales)
            foreach.scale_each(factors, of_lines)
            return [1.0] * len(factors)
        gradients = engine.split(indices, [gradient for batch in chunk.batches for gradient in batch.gradients])
        ratios = namo(moments, *_squared_norms(engine, matrices, gradients, updates))
        torch._foreach_mul_(ratios, scales)
        return ratios
