"""Parameters that are orthogonalized together: their logical matrices, the plan, and its execution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import merge_piece, split_piece
from megatron_eopt.orthogonalize.form import gram_dtype
from megatron_eopt.orthogonalize.ladder import Choice, choose, restore
from megatron_eopt.orthogonalize.precision import product_dtype
from megatron_eopt.orthogonalize.settings import NewtonSchulz
from megatron_eopt.orthogonalize.symmetric import default_products
from megatron_eopt.parallel.agree import same_plan
from megatron_eopt.parallel.cost import Rates, Work
from megatron_eopt.parallel.exchange import lowest
from megatron_eopt.parallel.execute import execute
from megatron_eopt.parallel.explain import explain
from megatron_eopt.parallel.layout import Layout, split_layout
from megatron_eopt.parallel.measure import measured_rates
from megatron_eopt.parallel.pieces import whole
from megatron_eopt.parallel.plan import Bucket, Matrix, Plan, TpMode, make_plan
from megatron_eopt.parallel.statistics import Statistics, Wanted, reduce_statistics

_MOST_PLANS = 1024  # that are kept: one for each set of parameters that took part in a step


@dataclass(frozen=True)
class Parameter:
    """What a plan has to know of a parameter.

    Attributes:
        name: the same on every rank, and unique.
        layout: where it lies.
        split_shapes: rows of each logical matrix within one query group; None for a parameter that is one matrix.
        dtype: of its updates.
    """

    name: str
    layout: Layout
    split_shapes: tuple[int, ...] | None
    dtype: torch.dtype


class Planned:
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
        self._parameters = list(parameters)
        self._device = device
        self._settings = settings
        self._scale = scale
        self._layouts = [
            [p.layout] if p.split_shapes is None else split_layout(p.layout, p.split_shapes) for p in parameters
        ]
        self.groups = _groups(parameters)
        self._sharers = {
            label: torch.tensor([p.layout.label == label for p in parameters], device=device) for label in self.groups
        }
        rows = max((min(layout.shape) for layouts in self._layouts for layout in layouts), default=0)
        self.work = _work(settings, device, rows)
        self.rates = rates or measured_rates(self.groups, device, self._product_dtypes()[0])
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
                name if len(layouts) == 1 else f"{name}[{part}]",
                layout.shape,
                layout.pieces,
                layout.label,
                parameter.dtype.itemsize,
            )
            for parameter, layouts in zip(self._parameters, self._layouts, strict=True)
            for name in [parameter.name]
            for part, layout in enumerate(layouts)
        ]

    def _product_dtypes(self) -> list[torch.dtype]:
        dtypes = sorted({parameter.dtype for parameter in self._parameters}, key=str)
        return [product_dtype(dtype, self._settings.fp32_matmul_prec) for dtype in dtypes]

    def explain(self) -> str:
        """The plan as a table: scheme, operations, bytes, collectives and predicted time of each bucket."""
        return explain(self.plan, self.work, self.rates)

    def settle(self, rung: str | None = None, kept: str | None = None) -> Choice:
        """Agree with the other ranks on the plan and on what computes symmetric products; all ranks call it together.

        Args:
            rung: of the ladder, that the user asks for.
            kept: that of the checkpoint, where he does not; with neither the fastest is chosen.

        Raises:
            ValueError: if the plan differs between ranks.
            RuntimeError: if the rung cannot serve on one of them.
        """
        same_plan(self.plan, self.groups, self._device)
        settings = self._settings
        shapes = sorted({matrix.shape for matrix in self.plan.matrices if 0 not in matrix.shape})
        products = self._product_dtypes()
        grams = [gram_dtype(dtype, self._device) for dtype in products]
        known = {"fp32_precision": "tf32" if settings.fp32_matmul_prec == "high" else "ieee", "agree": self.lowest}
        served = list(dict.fromkeys(dtype for dtype in (*products, *grams) if dtype is not None))
        if rung is None and kept is not None:
            choice = restore({"rung": kept}, shapes, served, self._device, **known)  # type: ignore[arg-type]
        else:
            choice = choose(shapes, served, self._device, rung=rung, **known)  # type: ignore[arg-type]
        self._settings = replace(settings, products=choice.products)
        return choice

    def lowest(self, x: Tensor) -> Tensor:
        """Element-wise minimum over the ranks of every group, one group after another."""
        for label in sorted(self.groups):
            x = lowest(x, self.groups[label])
        return x

    def agree(self, flags: Tensor) -> Tensor:
        """Element-wise minimum of ``flags`` (k x parameters) over the ranks that share each parameter."""
        for label in sorted(self.groups):
            flags = torch.where(self._sharers[label], lowest(flags, self.groups[label]), flags)
        return flags

    def shares(self, place: int) -> bool:
        """Whether other ranks wait for this one's part of a parameter."""
        return self._parameters[place].layout.ranks > 1

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
        factors = iter(execute(plan, shards, self.groups, self._settings, self._scale))
        return [[next(factors) for _ in self._layouts[place]] for place in places]

    def split(self, place: int, x: Tensor) -> list[Tensor]:
        """This rank's pieces of the logical matrices of a parameter, from its part ``x`` of the parameter."""
        shapes, piece = self._parameters[place].split_shapes, self._parameters[place].layout.piece
        return [x] if shapes is None else split_piece(x, piece.top, shapes)

    def merge(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        shapes, piece = self._parameters[place].split_shapes, self._parameters[place].layout.piece
        return parts[0] if shapes is None else merge_piece(parts, piece.top, piece.shape[0], shapes)

    def matrices(self, places: Sequence[int]) -> list[list[Matrix]]:
        """The logical matrices of parameters, as they are orthogonalized: ``blockwise`` makes each piece a matrix."""
        return [self._logical[place] for place in places]

    def statistics(self, wanted: Sequence[Wanted]) -> list[Statistics]:
        """Statistics of :meth:`matrices`, with at most one all-reduce for each group; the same on all its ranks."""
        places = {label: [i for i, one in enumerate(wanted) if one.matrix.group == label] for label in _labels(wanted)}
        pending = {
            label: reduce_statistics([wanted[i] for i in of_label], self.groups.get(label))
            for label, of_label in places.items()
        }
        found = {
            i: each
            for label, of_label in places.items()
            for i, each in zip(of_label, pending[label].wait(), strict=True)
        }
        return [found[i] for i in range(len(wanted))]

    def _plan_of(self, places: tuple[int, ...]) -> Plan:
        """What the plan says of the parameters at ``places``."""
        if places not in self._plans:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            counts = [len(layouts) for layouts in self._layouts]
            owners = [place for place, count in enumerate(counts) for _ in range(count)]
            self._plans[places] = subset(self.plan, [i for i, place in enumerate(owners) if place in places])
        return self._plans[places]


def _alone(matrix: Matrix, layout: Layout) -> Matrix:
    """This rank's piece as a matrix that no other rank has a part of."""
    shape = layout.piece.shape
    return replace(matrix, shape=shape, pieces=(whole(shape),), group="")


def _labels(wanted: Sequence[Wanted]) -> list[str]:
    return sorted({one.matrix.group for one in wanted})


def _groups(parameters: Sequence[Parameter]) -> dict[str, ProcessGroup]:
    groups: dict[str, ProcessGroup] = {}
    for parameter in parameters:
        layout = parameter.layout
        if layout.group is not None and groups.setdefault(layout.label, layout.group) is not layout.group:
            raise ValueError(
                f"{parameter.name} lies on another group of ranks than parameters before it, but both are called "
                f"{layout.label!r}: give the dimensions of one device mesh other names, or each mesh an optimizer"
            )
    return groups


def _work(settings: NewtonSchulz, device: torch.device, rows: int) -> Work:
    """What the costs of a plan are predicted with: the same on every rank, so not what the ladder will choose."""
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
