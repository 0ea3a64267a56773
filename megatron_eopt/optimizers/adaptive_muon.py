"""Muon whose orthogonal factors are normalized by a second moment, for parameters that may be sharded.

Orthogonal factors have any floating dtype; statistics and what is computed with them are fp32. For each logical matrix
a direction and a ratio come out, whose product replaces the orthogonal factor. Each method makes at most one all-reduce
for each group of ranks. Nothing here waits for the device.

- AdaMuon: Si, Zhang and Shen, arXiv 2507.11005.
- NorMuon: Li et al., arXiv 2510.05491.
- NAMO: arXiv 2602.17080.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.foreach import Batch, Tensors
from megatron_eopt.optimizers.group_settings import DecayMethod, check_flag, decay_method
from megatron_eopt.optimizers.muon import TensorParallelMuon, passed_on
from megatron_eopt.optimizers.parameters import TensorParallelGroups, names_of_last
from megatron_eopt.optimizers.state import Dim, StateTensor
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix, Shape, TpMode
from megatron_eopt.parallel.statistics import Statistics, Wanted, known

MOMENT2_BUFFER = "moment2_buffer"

Moment2Method = Literal["adamuon", "normuon", "namo"]
Directed = tuple[Tensor, Tensor | float]  # a direction and a ratio


@dataclass(frozen=True)
class Moment:
    """A second moment ``v``, which stays as it is, bit for bit, where the flag ``accepted`` on the device is False."""

    v: Tensor
    accepted: Tensor
    beta2: float
    eps: float

    def average(self, value: Tensor) -> Tensor:
        """``v += (1 - beta2) (value - v)``; values beyond fp32 count as its largest number."""
        largest = torch.finfo(torch.float32).max  # an infinity would stay in v for ever
        value = value.clamp(max=largest).to(self.v.dtype)
        return self.v.lerp_(torch.where(self.accepted, value, self.v), 1 - self.beta2)


def adamuon(
    engine: Engine, indices: Sequence[int], factors: Tensors, moments: Sequence[Moment], align: bool
) -> list[Directed]:
    """``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)`` of parameters; aligned, each matrix gets the norm of its ``O``."""
    directions = []
    for factor, moment in zip(engine.merge_all(indices, list(factors)), moments, strict=True):
        wide = factor.float()
        directions.append(wide / moment.average(wide.square()).sqrt().add_(moment.eps))
    directions = engine.split_all(indices, directions)
    if not align:
        return [(direction, 1.0) for direction in directions]
    norms = _squared_norms(engine, engine.flat(indices), factors, directions)
    return [(x, _alignment(*pair)) for x, pair in zip(directions, norms, strict=True)]


def normuon(engine: Engine, matrices: Sequence[Matrix], factors: Tensors, moments: Sequence[Moment]) -> list[Directed]:
    """``v <- EMA(mean(O^2))`` over the short dimension, ``U = O rsqrt(max(v, eps))``, with the norm of ``O``.

    Two kinds of matrices need one reduction. Where the short dimension is whole on every rank, this one has its means,
    and ``||O||`` and ``||U||`` are left to sum over the ranks. Where it is cut, the means are; these are then of the
    whole long dimension, so the norms follow from them.
    """
    directions: dict[int, Tensor] = {}
    ratios: dict[int, Tensor] = {}
    means = [
        Wanted(matrix=m, x=x, row_means=_tall(m.shape), column_means=not _tall(m.shape), of_squares=True)
        for m, x in zip(matrices, factors, strict=True)
    ]
    crossing = [i for i, matrix in enumerate(matrices) if _means_cross(matrix)]
    here = [i for i, matrix in enumerate(matrices) if not _means_cross(matrix)]

    def follow(i: int, found: Statistics) -> tuple[Tensor, Tensor]:
        """The means of a matrix, and by what its rows or columns are multiplied, as they are here."""
        along = known(found.row_means if _tall(matrices[i].shape) else found.column_means)
        steps = moments[i].average(along).clamp(min=moments[i].eps).rsqrt()
        directions[i] = factors[i].float() * (steps[:, None] if _tall(matrices[i].shape) else steps)
        return along, steps

    for i, found in zip(here, engine.statistics([means[i] for i in here]), strict=True):  # exchanges nothing
        follow(i, found)
    norms = [Wanted(matrix=matrices[i], x=x, squared_norm=True) for i in here for x in (factors[i], directions[i])]
    reduced = iter(engine.statistics([*norms, *(means[i] for i in crossing)]))
    for i in here:
        ratios[i] = _alignment(known(next(reduced).squared_norm), known(next(reduced).squared_norm))
    for i in crossing:
        along, steps = follow(i, next(reduced))
        squares = along.double()  # times the short dimension, which the ratio does not see
        ratios[i] = _alignment(squares.sum(), (squares * steps.double().square()).sum())
    return [(directions[i], ratios[i]) for i in range(len(matrices))]


def namo(factors: Tensors, moments: Sequence[Moment], norms: Sequence[tuple[Tensor, ...]]) -> list[Directed]:
    """``v <- EMA(||G||^2)``, ``U = O ||g'|| / (sqrt(v) + eps)``, from the squared norms of ``G`` and of ``g'``."""
    return [
        (factor, update.sqrt() / (moment.average(gradient).sqrt() + moment.eps))
        for factor, moment, (gradient, update) in zip(factors, moments, norms, strict=True)
    ]


def _tall(shape: Shape) -> bool:
    """Whether rows are the long dimension of a matrix, which normuon keeps its statistics of; squares count as tall."""
    return shape[0] >= shape[1]


def _means_cross(matrix: Matrix) -> bool:
    """Whether the short dimension is cut; then the long one is not, since a matrix is cut along one at most."""
    short = 1 if _tall(matrix.shape) else 0
    return any(each.shape[1 - short] and each.shape[short] != matrix.shape[short] for each in matrix.rectangles)


def _squared_norms(engine: Engine, matrices: Sequence[Matrix], *shards: Tensors) -> list[tuple[Tensor, ...]]:
    """For each matrix the squared norms of several tensors that lie as it does, in fp64."""
    wanted = [
        Wanted(matrix=matrix, x=x, squared_norm=True) for xs in shards for matrix, x in zip(matrices, xs, strict=True)
    ]
    found = [known(statistics.squared_norm) for statistics in engine.statistics(wanted)]
    return [tuple(found[i :: len(matrices)]) for i in range(len(matrices))]


def _alignment(factor: Tensor, update: Tensor) -> Tensor:
    """``||O|| / ||U||`` from the squares of the norms of whole matrices; 0 where ``U`` is zero."""
    return torch.where(update > 0, factor / update, 0.0).sqrt()


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
        workspace: int = 2**31,
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
        self._further = {"beta2": beta2, "eps": eps}
        super().__init__(**passed_on(locals()))

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
        name, method, beta2, eps = type(self).__name__, self.moment2_method, group["beta2"], group["eps"]
        if not 0 <= beta2 < 1:
            raise ValueError(f"{name}: beta2 must lie in [0, 1), got {beta2}")
        if not 0 < eps < inf:
            raise ValueError(f"{name}: eps must be a finite number above 0, since {method} divides by it, got {eps}")
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

        The first second moment is ``1 - beta2`` times its first value. So the entries of an AdaMuon update that is not
        aligned are ``+-scale / sqrt(1 - beta2)``, whatever the shape. The first ``g'`` of NAMO is ``(1 - b) G``, with
        Nesterov's look-ahead ``(1 - b) (1 + b) G``, so it multiplies ``O`` by that over ``sqrt(1 - beta2)``. What is
        aligned has the size of Muon's update.
        """
        settings, rates = self.update_settings(group or {}), {**self.defaults, **(group or {})}
        muon, momentum, root = settings.predicted_rms(rows, cols), rates[self.momentum_key], sqrt(1 - rates["beta2"])
        if self.moment2_method == "namo":
            return muon * (1 - momentum) * (1 + momentum if rates[self.nesterov_key] else 1) / root
        aligned = self.moment2_method == "normuon" or self.align_rms
        return muon if aligned else settings.scale(rows, cols) / root

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum, and the second moment: of the parameter, or one for each of its logical matrices."""
        tensors = super().state_tensors(parameter)
        if self.moment2_method == "adamuon":
            return [*tensors, StateTensor(MOMENT2_BUFFER, dtype=torch.float32)]
        ends, layouts = self.key_ends(parameter), self.matrix_layouts(parameter)
        for part, (end, layout) in enumerate(zip(ends, layouts, strict=True)):
            along: tuple[Dim, ...] = ("rows" if _tall(layout.shape) else "columns",)
            dims = along if self.moment2_method == "normuon" else ()
            tensors.append(StateTensor(MOMENT2_BUFFER + end, dims, part, torch.float32))
        return tensors

    def update(self, batches: Sequence[Batch], factors: list[Tensor], directions: Sequence[Tensor]) -> Sequence[Tensor]:
        """``U`` of each logical matrix, times its scale."""
        engine, indices, moments = self.engine, [i for batch in batches for i in batch.indices], []
        for batch in batches:
            beta2, eps = batch.settings["beta2"], batch.settings["eps"]
            for n, tensors in enumerate(batch.further):
                accepted = torch.as_tensor(batch.flag(n), device=tensors[0].device)
                moments += [Moment(v, accepted, beta2, eps) for v in tensors]
        if self.moment2_method == "adamuon":
            directed = adamuon(engine, indices, factors, moments, self.align_rms)
        elif self.moment2_method == "normuon":
            directed = normuon(engine, engine.flat(indices), factors, moments)
        else:
            gradients = engine.split_all(indices, [gradient for batch in batches for gradient in batch.gradients])
            norms = _squared_norms(engine, engine.flat(indices), gradients, directions)
            directed = namo(factors, moments, norms)
        return [
            (x * (ratio * scale)).to(factor.dtype)
            for factor, (x, ratio), scale in zip(factors, directed, engine.scales(indices), strict=True)
        ]
