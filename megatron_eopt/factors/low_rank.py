"""Low-rank factors of matrices: layouts, stacks, projections."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.spectral import low_rank_factors, power_iterations
from megatron_eopt.parallel.collectives import all_reduce, broadcast
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle, whole
from megatron_eopt.step import stacked_optimizer
from megatron_eopt.step.foreach import where
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.stacks import joined


def side_of(layout: Layout, dim: int, rank: int) -> Layout:
    """The layout of a matrix's first or second factor (rows x rank)."""
    shape = layout.shape[dim], rank
    rectangles = []
    for x in layout.rectangles:
        edge = (x.left, x.right) if dim else (x.top, x.bottom)
        rectangles.append(Rectangle(*edge, 0, rank))
    if set(rectangles) == {whole(shape)}:  # each rank treats as its own what it has whole
        return on_one_rank(shape)
    return replace(layout, shape=shape, rectangles=tuple(rectangles))


def is_wide(layout: Layout) -> bool:
    """Whether a factor is (r x rows); squares count as tall."""
    return layout.shape[0] < layout.shape[1]


# Stacks of equal factors.


@dataclass(eq=False)
class Factors:
    """Equal factors of one group that step together, this rank's rows."""

    group: Mapping[str, Any]
    ok: Flag
    matrix: Matrix  # one of them (rows x r), as the engine of factors has it
    numbers: list[int]  # among all factors: those of a matrix are 0 and 1, 2 and 3, ...
    transposed: bool  # whether they are parameters (r x rows)
    values: list[Tensor]
    momenta: list[Tensor]
    us: list[Tensor]  # (rows,)
    gradients: Sequence[Tensor] | Tensor  # until the momenta have them
    summed_over: str = ""  # label of the ranks whose stacks of gradients are to be summed

    def upright(self, x: Tensor) -> Tensor:
        """Factors as (rows x r), one or a stack."""
        return x.mT if self.transposed else x

    def stack(self) -> Tensor:
        """Copy of the values, (matrices x rows x r)."""
        return self.upright(torch.stack(self.values))


def summed(factors: Sequence[Factors], engine: Engine) -> list[Factors]:
    """Sum gradients over ranks, and stack equal factors.

    Stacks are of whatever matrices, and of bounded size.
    """
    gradients: list[Any] = [some.gradients for some in factors]
    sums = engine.sums(gradients, [some.summed_over for some in factors])
    parts: dict[Hashable, list[Factors]] = {}
    nbytes = Counter[Hashable]()
    for some, of_some in zip(factors, sums, strict=True):
        some.gradients = of_some
        matrix = some.matrix
        dtype = some.momenta[0].dtype
        kind = (id(some.group), matrix.group, matrix.shape, matrix.rectangles, dtype, some.transposed)
        nbytes[kind] += len(some.numbers) * dtype.itemsize * max(x.numel for x in matrix.rectangles)
        parts.setdefault((kind, nbytes[kind] // stacked_optimizer.MOST_STACK_BYTES), []).append(some)
    stacks = []
    for equal in parts.values():
        stack = replace(equal[0], numbers=list(chain(*(some.numbers for some in equal))))
        stack.values = joined(some.values for some in equal)
        stack.momenta = joined(some.momenta for some in equal)
        stack.us = joined(some.us for some in equal)
        stack.gradients = joined(some.gradients for some in equal)
        stacks.append(stack)
    return stacks


def orthogonalized(factors: Sequence[Factors], engine: Engine) -> dict[int, Tensor]:
    """``orth(m)`` of each momentum, by its number."""
    momenta = dict[int, Tensor]()
    for some in factors:
        momenta |= zip(some.numbers, map(some.upright, some.momenta), strict=True)
    numbers = sorted(momenta)
    return dict(zip(numbers, engine.factors(numbers, [momenta[i] for i in numbers]), strict=True))


def largest_singular_values(factors: Sequence[Factors], engine: Engine, steps: int) -> list[Tensor]:
    """Largest singular values, by power iteration; ``us`` follow."""
    sums = partial(engine.sums, labels=[some.matrix.group for some in factors])
    before = [torch.stack(some.us) for some in factors]
    vectors = power_iterations([some.stack for some in factors], before, steps, sums)
    norms = sums([(u * image).sum(-1) for u, _, image in vectors])
    for some, u_before, (u, _, _) in zip(factors, before, vectors, strict=True):
        torch._foreach_copy_(some.us, list(where(some.ok, u, u_before).unbind()))
    return norms


# The first step of a weight.


class Weight(NamedTuple):
    """A logical matrix that is to be projected."""

    shard: Tensor
    layout: Layout
    rank: int  # of the factors
    turn: int  # the rank of its group that decomposes it


class Projected(NamedTuple):
    """This rank's rows of the factors, and their error."""

    A: Tensor
    B: Tensor
    error: Tensor  # relative, of A B^T; NaN for a matrix that is zero or not finite


def projected(weights: Sequence[Weight]) -> list[Projected]:
    """Factors of the closest matrices; same bits on all ranks."""
    results = []
    # all are decomposed, each by one rank, before any is sent
    for weight, sent in [(weight, _decomposed(weight)) for weight in weights]:
        layout = weight.layout
        own = layout.rectangle
        x = sent if layout.group is None else broadcast(sent, weight.turn, layout.group).wait()
        A, B, error = x.split([layout.shape[0] * weight.rank, layout.shape[1] * weight.rank, 1])
        A = A.view(-1, weight.rank)[own.top : own.bottom]
        B = B.view(-1, weight.rank)[own.left : own.right]
        results.append(Projected(A, B, error))
    return results


def _decomposed(weight: Weight) -> Tensor:
    """``A``, ``B`` and error as one vector, to be received otherwise."""
    layout = weight.layout
    W = weight.shard
    if layout.group is not None and layout.sharded:
        W = W.new_zeros(layout.shape)
        own = layout.rectangle
        W[own.top : own.bottom, own.left : own.right] = weight.shard
        W = all_reduce(W, layout.group).wait()
    if layout.rank != weight.turn:
        return W.new_empty(sum(layout.shape) * weight.rank + 1)
    A, B, S = low_rank_factors(torch.where(W.isfinite().all(), W, 0), weight.rank)
    squares = S.double().square()
    error = (squares[weight.rank :].sum() / squares.sum()).sqrt().to(A.dtype)
    return torch.cat([A.reshape(-1), B.reshape(-1), error[None]])
