"""Where the factors of all weights lie, and the plan by which they are orthogonalized together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import batched

import torch
from torch import Tensor

from megatron_eopt.matrices import WHOLE, LocalRows, Split
from megatron_eopt.orthogonalize.precision import fp32_products
from megatron_eopt.parallel.cost import DEFAULT_RATES
from megatron_eopt.parallel.layout import Layout, local_rows, on_one_rank, split_layout
from megatron_eopt.parallel.pieces import Piece, whole
from megatron_eopt.parallel.plan import TpMode
from megatron_eopt.parallel.sharing import Parameter
from megatron_eopt.parallel.variants import Variant, plan_together


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, and the factors of its logical matrices.

    Attributes:
        first: place of its first factor among those of all parameters.
        factors: where they lie, each with the rank as its second dimension: ``A`` and ``B`` of one logical matrix after
            the other, or the parameter that is a factor itself.
        matrices: where its logical matrices lie.
        rows: splits this rank's part of the parameter into them, and merges them.
    """

    first: int
    factors: tuple[Layout, ...]
    matrices: tuple[Layout, ...]
    rows: LocalRows


@dataclass(frozen=True)
class Described:
    """What is planned of a parameter.

    Attributes:
        name: the same on every rank, and unique.
        layout: where it lies.
        split: its logical matrices.
        rank: of their factors; None for a parameter that is a factor itself.
        dtype: of the momenta.
        variant: how these are orthogonalized.
    """

    name: str
    layout: Layout
    split: Split
    rank: int | None
    dtype: torch.dtype
    variant: Variant


class FactorPlan:
    """The factors of all parameters, and what orthogonalizes them; all ranks make it together.

    Args:
        described: the parameters, in the same order on every rank.
        device: of the momenta.
        tp_mode: how factors that are cut are orthogonalized.

    Attributes:
        weights: of each parameter.
        planned: the plan, which ranks have to :meth:`settle` before it is executed.
    """

    def __init__(self, described: Sequence[Described], device: torch.device, tp_mode: TpMode) -> None:
        self.weights: list[Weight] = []
        factors: list[Parameter] = []
        for one in described:
            matrices = split_layout(one.layout, one.split)
            lying = _factor_layouts(matrices, one.rank)
            names = one.split.names(one.layout.shape[0])
            ends = [""] if one.rank is None else [f"{name} {side}".strip() for name in names for side in "AB"]
            called = [f"{one.name}[{end}]" if end else one.name for end in ends]
            rows = local_rows(one.layout, one.split)
            self.weights.append(Weight(len(factors), lying, tuple(matrices), rows))
            factors += [Parameter(name, each, WHOLE, one.dtype) for name, each in zip(called, lying, strict=True)]
        variants = [one.variant for one, weight in zip(described, self.weights, strict=True) for _ in weight.factors]
        self._precision = described[0].variant.settings.fp32_matmul_prec
        self.planned = plan_together(factors, variants, device, tp_mode, DEFAULT_RATES)

    def settle(self, rung: str | None = None) -> str:
        """Agree with the other ranks on the plan and on what computes symmetric products.

        Args:
            rung: what computed them when the state was saved; None chooses the fastest.

        Raises:
            ValueError: if the plan differs between ranks.
            RuntimeError: if the rung cannot serve on one of them.
        """
        return self.planned.settle(None, rung).kernel

    def schemes(self, weight: Weight) -> list[str]:
        """How the factors of each logical matrix of a parameter are orthogonalized: that of the one which is cut."""
        plan = self.planned.plan
        of_factor = {i: bucket.scheme.replace("_", " ") for bucket in plan.buckets for i in bucket.matrices}
        factors = [of_factor[weight.first + number] for number in range(len(weight.factors))]
        both = batched(factors, max(1, len(factors) // len(weight.matrices)))
        return [next((scheme for scheme in each if scheme != "local"), "local") for each in both]

    def orthogonalize(self, momenta: list[Tensor], places: list[int]) -> list[Tensor]:
        """The orthogonal factors of this rank's rows of momenta, given in the order of their places."""
        with fp32_products(self._precision):
            return [factor for (factor,) in self.planned.factors(momenta, places)]


def is_tall(layout: Layout) -> bool:
    """Whether the rank is the second dimension of a parameter that is a factor; squares count as tall."""
    return layout.shape[0] >= layout.shape[1]


def _factor_layouts(matrices: Sequence[Layout], rank: int | None) -> tuple[Layout, ...]:
    if rank is not None:
        return tuple(_side(layout, dim, rank) for layout in matrices for dim in (0, 1))
    (own,) = matrices
    return (_side(own, 0, own.shape[1]) if is_tall(own) else _side(own, 1, own.shape[0]),)


def _side(layout: Layout, dim: int, rank: int) -> Layout:
    """Where a factor lies whose rows are those of one dimension of a matrix."""
    shape = layout.shape[dim], rank
    edges = [((piece.top, piece.bottom), (piece.left, piece.right))[dim] for piece in layout.pieces]
    pieces = tuple(Piece(*edge, 0, rank) for edge in edges)
    # each rank treats as its own what it has whole
    return on_one_rank(shape) if set(pieces) == {whole(shape)} else replace(layout, shape=shape, pieces=pieces)
