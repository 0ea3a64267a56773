"""Parameters that are orthogonalized together: their logical matrices, the plan, and its execution."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.kernels import Choice, choose
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import gram_dtype, product_dtype
from megatron_eopt.orthogonalize.products import Products, default_products
from megatron_eopt.parallel.agree import same_plan
from megatron_eopt.parallel.cost import Rates, Work
from megatron_eopt.parallel.execute import execute
from megatron_eopt.parallel.explain import explain
from megatron_eopt.parallel.layout import Layout, local_rows, split_layout
from megatron_eopt.parallel.measure import measured_rates
from megatron_eopt.parallel.pieces import Shape, whole
from megatron_eopt.parallel.plan import Bucket, Matrix, Plan, TpMode, make_plan
from megatron_eopt.parallel.sharing import Parameter, SharedParameters

_MOST_PLANS = 1024  # that are kept: one for each set of parameters that took part in a step


class Planned(SharedParameters):
    """The plan of a list of parameters, and what executes it.

    Args:
        parameters: in the same order on every rank.
        device: of the updates.
        tp_mode: what the user asked for.
        settings: of the iteration.
        scale: factor of a logical matrix from its global rows and columns (a piece's own under ``blockwise``).
        rates: for the predictions of ``auto``; None measures them, for which all ranks come here together.

    Raises:
        ValueError: for two groups of ranks of the same name, and for pieces that are not those of a matrix.

    Attributes:
        settings: of the iteration; what computes its symmetric products is among them when the plan is settled.
        plan: see :mod:`~megatron_eopt.parallel.plan`.
        work: what its costs were predicted with, and
        rates: likewise.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        device: torch.device,
        tp_mode: TpMode,
        settings: NewtonSchulz,
        scale: Callable[[int, int], float],
        rates: Rates | None = None,
    ) -> None:
        super().__init__(parameters, device)
        self.settings = settings
        self._scale = scale
        self._layouts = [split_layout(p.layout, p.split) for p in parameters]
        self._local = [local_rows(p.layout, p.split) for p in parameters]
        rows = max((min(layout.shape) for layouts in self._layouts for layout in layouts), default=0)
        self.work = _work(settings, device, rows)
        self.rates = rates or measured_rates(self.groups, device, product_dtypes(parameters, settings)[0])
        self.plan: Plan = make_plan(self._matrices(), tp_mode, self.work, self.rates)
        self._plans = {tuple(range(len(parameters))): self.plan}
        flat = iter(self.plan.matrices)
        self._logical = [[next(flat) for _ in layouts] for layouts in self._layouts]
        if tp_mode == "blockwise":
            self._logical = [
                [_alone(matrix, layout) for matrix, layout in zip(matrices, layouts, strict=True)]
                for matrices, layouts in zip(self._logical, self._layouts, strict=True)
            ]

    def _matrices(self) -> list[Matrix]:
        return [
            Matrix(
                f"{parameter.name}[{name}]" if name else parameter.name,
                layout.shape,
                layout.pieces,
                layout.label,
                parameter.dtype.itemsize,
            )
            for parameter, layouts in zip(self._parameters, self._layouts, strict=True)
            for name, layout in zip(parameter.split.names(parameter.layout.shape[0]), layouts, strict=True)
        ]

    def explain(self) -> str:
        """The plan as a table: scheme, operations, bytes, collectives and predicted time of each bucket."""
        return explain(self.plan, self.work, self.rates)

    def settle(self, kernel: str | None = None, kept: str | None = None) -> Choice:
        """Agree with the other ranks on the plan and on what computes symmetric products; all ranks call it together.

        Args:
            kernel: that the user asks for.
            kept: that of the checkpoint, where he does not; with neither the fastest is chosen.

        Raises:
            ValueError: if the plan differs between ranks.
            RuntimeError: if the kernel cannot serve on one of them.
        """
        same_plan(self.plan, self.groups, self.device)
        return choose_products([self], self.lowest, kernel, kept)

    def product_shapes(self) -> set[Shape]:
        """Shapes of the matrices whose symmetric products are computed."""
        return {matrix.shape for matrix in self.plan.matrices if 0 not in matrix.shape}

    def product_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which symmetric products are computed, those of the standard form first."""
        products = product_dtypes(self._parameters, self.settings)
        grams = [gram_dtype(dtype, self.device) for dtype in products]
        return [dtype for dtype in (*products, *grams) if dtype is not None]

    def compute_by(self, products: Products) -> None:
        """Let symmetric products be computed by what was chosen."""
        self.settings = replace(self.settings, products=products)

    def orthogonalize(self, updates: list[Tensor], places: Sequence[int]) -> list[Tensor]:
        """The orthogonal factors, scaled, of this rank's parts of parameters.

        Args:
            updates: this rank's parts; the list is emptied, so that each can be freed when its result is there.
            places: of their parameters, ascending. Of those that are shared with other ranks all ranks name the same.
        """
        return [self.merge(*each) for each in zip(places, self.factors(updates, places), strict=True)]

    def factors(self, updates: list[Tensor], places: Sequence[int]) -> list[list[Tensor]]:
        """What :meth:`orthogonalize` puts together: for each parameter the factors of its logical matrices."""
        shards = [part for update, place in zip(updates, places, strict=True) for part in self.split(place, update)]
        plan = self._plan_of(tuple(places))
        updates.clear()
        factors = iter(execute(plan, shards, self.groups, self.settings, self._scale))
        return [[next(factors) for _ in self._layouts[place]] for place in places]

    def split(self, place: int, x: Tensor) -> list[Tensor]:
        """This rank's pieces of the logical matrices of a parameter, from its part ``x`` of the parameter."""
        return self._local[place].split(x)

    def merge(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        return self._local[place].merge(parts)

    def matrices(self, places: Sequence[int]) -> list[list[Matrix]]:
        """The logical matrices of parameters, as they are orthogonalized: ``blockwise`` makes each piece a matrix."""
        return [self._logical[place] for place in places]

    def _plan_of(self, places: tuple[int, ...]) -> Plan:
        """What the plan says of the parameters at ``places``."""
        if places not in self._plans:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            counts = [len(layouts) for layouts in self._layouts]
            owners = [place for place, count in enumerate(counts) for _ in range(count)]
            self._plans[places] = subset(self.plan, [i for i, place in enumerate(owners) if place in places])
        return self._plans[places]


def product_dtypes(parameters: Sequence[Parameter], settings: NewtonSchulz) -> list[torch.dtype]:
    """The dtypes in which the products of the standard form are computed."""
    dtypes = sorted({parameter.dtype for parameter in parameters}, key=str)
    return [product_dtype(dtype, settings.fp32_matmul_prec) for dtype in dtypes]


def choose_products(
    each: Sequence[Planned], agree: Callable[[Tensor], Tensor], kernel: str | None, kept: str | None
) -> Choice:
    """Choose what computes the symmetric products of several plans, equal on all ranks, and let each compute by it.

    Args:
        each: of one device and one precision.
        agree: element-wise minimum over the ranks of all their groups.
        kernel: as for :meth:`Planned.settle`.
        kept: as for :meth:`Planned.settle`.
    """
    shapes = sorted({shape for planned in each for shape in planned.product_shapes()})
    dtypes = list(dict.fromkeys(dtype for planned in each for dtype in planned.product_dtypes()))
    device, precision = each[0].device, each[0].settings.fp32_matmul_prec
    fp32_precision: Literal["tf32", "ieee"] = "tf32" if precision == "high" else "ieee"
    choice = choose(shapes, dtypes, device, kernel=kernel, kept=kept, fp32_precision=fp32_precision, agree=agree)
    for planned in each:
        planned.compute_by(choice.products)
    return choice


def _alone(matrix: Matrix, layout: Layout) -> Matrix:
    """This rank's piece as a matrix that no other rank has a part of."""
    shape = layout.piece.shape
    return replace(matrix, shape=shape, pieces=(whole(shape),), group="")


def _work(settings: NewtonSchulz, device: torch.device, rows: int) -> Work:
    """What the costs of a plan are predicted with: the same on every rank, so not what will be chosen."""
    share = default_products(device, torch.float32).share(rows) if device.type == "cpu" else 0.5
    return Work(schedule=settings.schedule, restarts=settings.restarts, share=share)


def subset(plan: Plan, kept: Sequence[int]) -> Plan:
    """The plan with those of its matrices alone whose places are ``kept``, ascending; each keeps scheme and owner."""
    places = {old: new for new, old in enumerate(kept)}
    buckets = []
    for bucket in plan.buckets:
        left = [i for i, matrix in enumerate(bucket.matrices) if matrix in places]
        if left:
            matrices = tuple(places[bucket.matrices[i]] for i in left)
            owners = tuple(bucket.owners[i] for i in left) if bucket.owners else ()
            buckets.append(Bucket(matrices, bucket.scheme, owners))
    return Plan(tuple(plan.matrices[i] for i in kept), tuple(buckets))
