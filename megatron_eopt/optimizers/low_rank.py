"""Weights of low rank, ``W = A B^T``: the layouts of their factors, and one step of them, Spectron's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import batched
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers import foreach
from megatron_eopt.orthogonalize.spectral import low_rank_factors, power_iterations
from megatron_eopt.parallel.collectives import all_reduce, broadcast
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.records import Rectangle, whole


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors of equal layout, one of each of several pairs, as this rank holds them.

    ``values``, ``momenta`` and ``us``, the singular vectors that the last step found, are written to. Each is
    (rows x r), a singular vector (rows,).
    """

    positions: Sequence[int]  # of the pairs, among those that are worked on at a time
    indices: Sequence[int]  # among the factors that are orthogonalized together
    label: str  # of the ranks that hold other rows; empty where this rank holds all
    transposed: bool  # values, momenta and gradients are (r x rows)
    accepted: Tensor  # whether the pairs step, on their device
    settings: Mapping[str, Any]  # of their group
    values: list[Tensor]
    momenta: list[Tensor]
    us: list[Tensor]
    gradients: list[Tensor] = field(default_factory=list)  # taken out when the momenta have them

    def upright(self, x: Tensor) -> Tensor:
        """(rows x r), of one of them or of a stack, which may be transposed."""
        return x.mT if self.transposed else x

    def stack(self) -> Tensor:
        """(pairs x rows x r), a copy of the values."""
        return self.upright(torch.stack(self.values))


def spectron(factors: Sequence[Factors], engine: Engine, power_steps: int) -> None:
    """One step of Spectron on pairs of factors, all first ones of equal pairs and then their second ones.

    Does not wait for a GPU. For factors ``A`` and ``B`` with gradients ``gA`` and ``gB``, in this order:

    1. weight decay of each factor: ``A -= lr * weight_decay * A``;
    2. momentum: ``mA += (1 - beta) (gA - mA)``;
    3. ``sA`` and ``sB``, the largest singular values, by power iteration;
    4. ``A -= lr / (sA + sB + 1) * orth(mA)``, and so ``B``.
    """
    for some in factors:
        lr, weight_decay, beta = (some.settings[key] for key in ("lr", "weight_decay", "momentum_beta"))
        # 1 - lr * weight_decay as one factor would be rounded alike in every step, and the errors would add up
        foreach.subtract(some.values, some.values, lr * weight_decay, some.accepted)
        foreach.average(some.momenta, some.gradients, beta, False, some.accepted)
        some.gradients.clear()
    momenta = {i: some.upright(m) for some in factors for i, m in zip(some.indices, some.momenta, strict=True)}
    indices = sorted(momenta)
    directions = dict(zip(indices, engine.factors(indices, [momenta[i] for i in indices]), strict=True))
    summed = partial(engine.sums, labels=[some.label for some in factors])
    found = power_iterations([x.stack for x in factors], [torch.stack(x.us) for x in factors], power_steps, summed)
    norms = summed([(u * image).sum(-1) for u, _, image in found])
    bounds = [sA + sB + 1 for sA, sB in batched(norms, 2) for _ in "AB"]
    for some, (u, _, _), bound in zip(factors, found, bounds, strict=True):
        torch._foreach_copy_(some.us, foreach.masked(u.unbind(), some.us, some.accepted))
        updates = [some.upright(directions.pop(i)) for i in some.indices]
        foreach.subtract(some.values, updates, some.settings["lr"] / bound, some.accepted)


def project(
    rectangles: Iterable[Tensor], layouts: Sequence[Layout], ranks: Sequence[int], turns: Sequence[int]
) -> list[tuple[Tensor, Tensor, float]]:
    """Factors of low rank of matrices of which this rank holds shards; reads on the host once, at the end.

    Matrices that are cut are put together on all ranks of their group, one at a time; the decomposition of each is made
    on one of them, which its turn says, and is sent to the others, so that all have the same to the bit.

    ``rectangles`` are in the dtype of the factors, and ``ranks`` are each one's ``r``. Returned are this rank's rows of
    ``A`` and ``B``, and the relative error: NaN for a weight that is zero or not finite.
    """
    packed = []
    for rectangle, layout, r, turn in zip(rectangles, layouts, ranks, turns, strict=True):
        W, own = rectangle, layout.rectangle
        if layout.group is not None and layout.sharded:
            W = rectangle.new_zeros(layout.shape)
            W[own.top : own.bottom, own.left : own.right] = rectangle
            W = all_reduce(W, layout.group).wait()
        if layout.rank == turn % layout.ranks:
            A, B, S = low_rank_factors(torch.where(W.isfinite().all(), W, 0), r)  # of zero the error is NaN
            squares = S.double().square()
            error = (squares[r:].sum() / squares.sum()).sqrt().to(A.dtype)
            packed.append(torch.cat([A.reshape(-1), B.reshape(-1), error[None]]))
        else:
            packed.append(W.new_empty(sum(layout.shape) * r + 1))
    found, errors = [], []
    for both, layout, r, turn in zip(packed, layouts, ranks, turns, strict=True):
        if layout.group is not None:
            both = broadcast(both, turn % layout.ranks, layout.group).wait()
        A, B, error = both.split([layout.shape[0] * r, layout.shape[1] * r, 1])
        own = layout.rectangle
        found.append((A.view(-1, r)[own.top : own.bottom], B.view(-1, r)[own.left : own.right]))
        errors.append(error)
    return [(A, B, error) for (A, B), error in zip(found, torch.cat(errors).tolist(), strict=True)]


def is_tall(layout: Layout) -> bool:
    """Whether the rank is the second dimension of a parameter that is a factor; squares count as tall."""
    return layout.shape[0] >= layout.shape[1]


def factor_layouts(matrices: Sequence[Layout], rank: int | None) -> tuple[Layout, ...]:
    """The layouts of the factors of logical matrices, ``A`` and ``B`` in turn; of one that is a factor for no rank."""
    if rank is not None:
        return tuple(_side(layout, dim, rank) for layout in matrices for dim in (0, 1))
    (own,) = matrices
    return (_side(own, 0 if is_tall(own) else 1, min(own.shape)),)


def _side(layout: Layout, dim: int, rank: int) -> Layout:
    """The layout of a factor whose rows are those of one dimension of a matrix."""
    shape = layout.shape[dim], rank
    edges = ((x.left, x.right) if dim else (x.top, x.bottom) for x in layout.rectangles)
    rectangles = tuple(Rectangle(*each, 0, rank) for each in edges)
    if set(rectangles) == {whole(shape)}:  # each rank treats as its own what it has whole
        return on_one_rank(shape)
    return replace(layout, shape=shape, rectangles=rectangles)


def check_pairs(name: str, layouts: Sequence[Layout], names: Sequence[str]) -> None:
    """Refuse parameters that are not the factors of weights, two by two, by a ``ValueError`` that names the first."""
    if len(layouts) % 2:
        raise ValueError(f"{name}: a group of pairs has an even number of factors, got {len(layouts)}")
    for layout, called in zip(layouts, names, strict=True):
        if (1 if is_tall(layout) else 0) in layout.cut_dims:
            raise ValueError(
                f"{name}: {called}, a factor {layout.shape}, is cut along its rank: cut it along its long side "
                f"(under FSDP2 a shard_placement_fn says so), or keep it whole"
            )
    for (a, of_a), (b, of_b) in batched(zip(layouts, names, strict=True), 2):
        if min(a.shape) not in b.shape or min(b.shape) not in a.shape:
            raise ValueError(
                f"{name}: {of_a} and {of_b} are no factors of one weight: {a.shape} and {b.shape} have no rank in "
                f"common"
            )


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of what is kept of a parameter: fp32, or fp64 for an fp64 one."""
    return torch.promote_types(parameter.dtype, torch.float32)
