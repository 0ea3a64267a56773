"""Low-rank factors of weights, as state or parameters."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.matrices import Split
from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.state import SIDES, Dim, StateTensor
from megatron_eopt.orthogonalize.spectral import low_rank_factors, start_vector
from megatron_eopt.parallel.collectives import all_reduce, broadcast
from megatron_eopt.parallel.layout import Layout, on_one_rank, split_layout
from megatron_eopt.parallel.records import Rectangle, whole

PROJECTED = "projected"  # 1 where the factors are those of the weight, 0 before the first step
# State keys: of a weight with _A and _B behind; of a parameter that is a factor itself the last two, as they are.
FACTOR = "factor"
MOMENTUM = "momentum_buffer"
U = "u"
Tensors = Callable[[Tensor, "Factor"], list[Tensor]]  # of a parameter: a factor, its momentum and its singular vector


def factor_pairs(pairs: Iterable[Sequence[Any]], **settings: Any) -> dict[str, Any]:
    """Group of parameters that are factors themselves::

        Spectron([factor_pairs([(layer.up, layer.down) for layer in layers], lr=0.01), {"params": dense_weights}])

    Args:
        pairs: the two factors of each weight, in any order and orientation (``A`` and ``B``, or ``A`` and ``B^T`` as
            two linear layers hold them), each a parameter or its name and it.
        **settings: of the group.

    Raises:
        ValueError: for what is not two parameters.
    """
    params = []
    for index, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(f"a pair has two factors, got {len(pair)} in pair {index}")
        params += list(pair)
    return {"params": params, "pairs": True, **settings}


@dataclass(frozen=True)
class Factor:
    """A factor of a logical matrix and its state."""

    name: str  # behind that of its parameter
    number: int  # of the matrix, among those of its parameter
    matrix: Layout  # of which it is a factor, one object where they are equal; where it is a parameter, its own
    layout: Layout  # (rows x r)
    dtype: torch.dtype  # of what is kept
    in_state: bool  # or it is the parameter
    transposed: bool  # that is (r x rows)
    kept: list[StateTensor]  # itself where it is in the state, its momentum and its singular vector


def factors_of_weight(matrix: Layout, i: int, name: str, end: str, rank: int, dtype: torch.dtype) -> list[Factor]:
    """Factors of a weight's ``i``-th matrix, kept in state."""
    factors = []
    for dim, letter in enumerate("AB"):
        side: Dim = SIDES[dim]
        kept = [StateTensor(f"{key}_{letter}{end}", (side, rank), i, dtype) for key in (FACTOR, MOMENTUM)]
        kept += [StateTensor(f"{U}_{letter}{end}", (side,), i, dtype, start=start_vector)]
        called = f"[{name} {letter}]" if name else f"[{letter}]"
        factors.append(Factor(called, i, matrix, _side(matrix, dim, rank), dtype, True, False, kept))
    return factors


def factor_of_pair(matrix: Layout, i: int, name: str, end: str, rank: int, dtype: torch.dtype) -> list[Factor]:
    """The parameter itself, whose short side is the rank."""
    dim = int(matrix.shape[0] < matrix.shape[1])  # squares count as tall
    kept = [StateTensor(MOMENTUM, dtype=dtype), StateTensor(U, (SIDES[dim],), 0, dtype, start=start_vector)]
    return [Factor("", i, matrix, _side(matrix, dim, min(matrix.shape)), dtype, False, dim == 1, kept)]


def _side(layout: Layout, dim: int, rank: int) -> Layout:
    shape = layout.shape[dim], rank
    edges = ((x.left, x.right) if dim else (x.top, x.bottom) for x in layout.rectangles)
    rectangles = tuple(Rectangle(*edge, 0, rank) for edge in edges)
    if set(rectangles) == {whole(shape)}:  # each rank treats as its own what it has whole
        return on_one_rank(shape)
    return replace(layout, shape=shape, rectangles=rectangles)


def check_weights(name: str, rank: int, parameters: Sequence[tuple[str, Layout, Split]]) -> None:
    """Refuse weights too small for factors of this rank."""
    for called, layout, split in parameters:
        for part, matrix in zip(split.names(layout.shape[0]), split_layout(layout, split), strict=True):
            if rank > min(matrix.shape):
                of_part = f"{called} ({part})" if part else called
                raise ValueError(
                    f"{name}: rank must lie in [1, {min(matrix.shape)}] for {of_part}, a matrix {matrix.shape}, got "
                    f"{rank}: set rank (options={{'rank': ...}} of build_optimizer, or in a group of its own), or take "
                    f"another optimizer"
                )


def check_pairs(name: str, rank: int, parameters: Sequence[tuple[str, Layout, Split]]) -> None:
    """Refuse parameters that are not pairs of factors."""
    for called, layout, split in parameters:
        if not split.is_whole:
            raise ValueError(f"{name}: {called} is a factor of a pair, and cannot be split into logical matrices")
        if int(layout.shape[0] >= layout.shape[1]) in layout.cut_dims:
            raise ValueError(
                f"{name}: {called}, a factor {layout.shape}, is cut along its rank: cut it along its long side "
                f"(under FSDP2 a shard_placement_fn says so), or keep it whole"
            )
    if len(parameters) % 2:
        raise ValueError(f"{name}: a group of pairs has an even number of factors, got {len(parameters)}")
    for (of_a, a, _), (of_b, b, _) in batched(parameters, 2):
        if min(a.shape) not in b.shape or min(b.shape) not in a.shape:
            raise ValueError(
                f"{name}: {of_a} and {of_b} are no factors of one weight: {a.shape} and {b.shape} have no rank in "
                f"common"
            )


@dataclass(eq=False)
class FactorStack:
    """Factors of equal layout, from several pairs, on this rank."""

    pairs: Sequence[int]  # their numbers among those of the program
    parameters: Sequence[Tensor]  # each one's
    indices: Sequence[int]  # among the factors that are orthogonalized together
    label: str  # of the ranks that hold other rows; empty where this rank holds all
    transposed: bool  # values, momenta and gradients are (r x rows)
    accepted: Tensor  # whether the pairs step, on their device
    settings: Mapping[str, Any]  # of their group
    values: list[Tensor]  # (rows x r), written to as the next two are
    momenta: list[Tensor]
    us: list[Tensor]  # (rows,), the singular vectors that the last step found
    gradients: Any = ()  # of each one, or a stack; taken out when the momenta have them
    summed_over: str = ""  # label of the ranks whose stacks of gradients are to be summed

    def upright(self, x: Tensor) -> Tensor:
        """Factors as (rows x r), one or a stack."""
        return x.mT if self.transposed else x

    def stack(self) -> Tensor:
        """Copy of the values, (pairs x rows x r)."""
        return self.upright(torch.stack(self.values))


@dataclass(frozen=True, eq=False)
class Factored:
    """A parameter and the factors of its logical matrices."""

    index: int  # of the parameter
    first: int  # index of its first factor among those of all parameters
    factors: list[Factor]
    nbytes: int  # of the largest shard of any rank and matrix, in the dtype of the factors


def chunks(units: Iterable[Sequence[Tensor]], known: Mapping[Tensor, Factored]) -> Iterable[Mapping[Tensor, Factored]]:
    """Parameters to work on together, alike on all ranks."""
    chunks: dict[object, dict[Tensor, Factored]] = {}
    nbytes: Counter[object] = Counter()
    for unit in units:
        of_unit = {p: known[p] for p in unit}
        alike = tuple((p.dtype, w.factors[0].matrix.label) for p, w in of_unit.items())
        nbytes[alike] += sum(w.nbytes * len(w.factors[::2]) for w in of_unit.values())
        chunks.setdefault((alike, nbytes[alike] // foreach.MOST_BYTES), {}).update(of_unit)
    return chunks.values()


def stacks(
    factored: Mapping[Tensor, Factored], group: Mapping[str, Any], flags: Mapping[Tensor, Tensor], tensors: Tensors
) -> Iterator[FactorStack]:
    """First and second factors of equal pairs, of bounded size."""
    factors = [(p, i, factor) for p, w in factored.items() for i, factor in enumerate(w.factors, w.first)]
    alike: dict[tuple[int, ...], list[Any]] = {}
    for number, pair in enumerate(batched(factors, 2)):
        alike.setdefault(tuple(id(factor.matrix) for *_, factor in pair), []).append((number, pair))
    for equal in alike.values():
        nbytes = max(1, *(factored[p].nbytes for p, *_ in equal[0][1]))
        for some in batched(equal, max(1, foreach.MOST_BYTES // nbytes)):
            numbers, pairs = zip(*some, strict=True)
            both = list(zip(*pairs, strict=True))
            accepted = torch.stack([flags[p] for side in both for p, *_ in side]).view(2, -1).all(0)
            for side in both:
                of_side, indices, (first, *_) = zip(*side, strict=True)
                label = first.layout.label
                transposed = first.transposed
                values, momenta, us = map(list, zip(*(tensors(p, factor) for p, _, factor in side), strict=True))
                yield FactorStack(numbers, of_side, indices, label, transposed, accepted, group, values, momenta, us)


def project(
    rectangles: Iterable[Tensor], factors: Sequence[Factor], turns: Sequence[int]
) -> list[tuple[Tensor, Tensor, float]]:
    """Low-rank factors of matrices of which this rank holds shards.

    A cut matrix is put together on all ranks of its group, one at a time. One rank, by its turn, decomposes it and
    sends the factors to the others, so that all have the same bits. The host reads once, at the end. ``factors`` has
    each matrix's first one. Returns local rows of ``A`` and ``B``, and the relative error: NaN for a weight that is
    zero or not finite.
    """
    packed = []
    for rectangle, factor, turn in zip(rectangles, factors, turns, strict=True):
        W = rectangle
        layout = factor.matrix
        _, r = factor.layout.shape
        if layout.group is not None and layout.sharded:
            W = rectangle.new_zeros(layout.shape)
            shard = layout.rectangle
            W[shard.top : shard.bottom, shard.left : shard.right] = rectangle
            W = all_reduce(W, layout.group).wait()
        if layout.rank == turn % layout.ranks:
            A, B, S = low_rank_factors(torch.where(W.isfinite().all(), W, 0), r)  # of zero the error is NaN
            squares = S.double().square()
            error = (squares[r:].sum() / squares.sum()).sqrt().to(A.dtype)
            packed.append(torch.cat([A.reshape(-1), B.reshape(-1), error[None]]))
        else:
            packed.append(W.new_empty(sum(layout.shape) * r + 1))
    projected = []
    for both, factor, turn in zip(packed, factors, turns, strict=True):
        layout = factor.matrix
        shard = factor.matrix.rectangle
        _, r = factor.layout.shape
        if layout.group is not None:
            both = broadcast(both, turn % layout.ranks, layout.group).wait()
        A, B, error = both.split([layout.shape[0] * r, layout.shape[1] * r, 1])
        projected.append((A.view(-1, r)[shard.top : shard.bottom], B.view(-1, r)[shard.left : shard.right], error))
    errors = torch.cat([error for *_, error in projected]).tolist()
    return [(A, B, error) for (A, B, _), error in zip(projected, errors, strict=True)]
