"""Low-rank factors of weights, as state or parameters."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import batched
from typing import Any, Self

import torch
from torch import Tensor

from megatron_eopt.matrices import Split
from megatron_eopt.orthogonalize.spectral import low_rank_factors, start_vector
from megatron_eopt.parallel.collectives import all_reduce, broadcast
from megatron_eopt.parallel.layout import Layout, on_one_rank, split_layout
from megatron_eopt.parallel.rectangles import Rectangle, whole
from megatron_eopt.step import whole_matrices
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.state import MOMENTUM_BUFFER, SIDES, Dim, StateTensor

PROJECTED = "projected"  # 1 where the factors are those of the weight, 0 before the first step
# State keys beside MOMENTUM_BUFFER, of a weight with _A and _B behind; a parameter that is a factor itself has U alone.
FACTOR = "factor"
U = "u"


def factor_pairs(pairs: Iterable[Sequence[Any]], **settings: Any) -> dict[str, Any]:
    """Group of parameters that are factors themselves::

        Spectron([factor_pairs([(layer.up, layer.down) for layer in layers], lr=0.01), {"params": dense_weights}])

    Args:
        pairs: the two factors of each weight, in any order and orientation (``A`` and ``B``, or ``A`` and ``B^T`` as
            two linear layers hold them), each a parameter or its name and it.
        **settings: of the group.
    """
    params = []
    for one, other in pairs:
        params += [one, other]
    return {"params": params, "pairs": True, **settings}


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of a logical matrix."""

    parameter: Tensor
    index: int  # among the factors of all parameters
    name: str  # behind that of its parameter
    number: int  # of the matrix, among those of its parameter
    matrix: Layout  # of which it is a factor, one object where they are equal; where it is a parameter, its own
    dim: int  # 0 with rows of the matrix, 1 with columns
    rank: int
    end: str  # of its state keys
    in_state: bool  # or it is the parameter
    nbytes: int  # of the largest shard of any rank and matrix of the parameter, in the dtype of the factors

    @cached_property
    def layout(self) -> Layout:
        """Its layout (rows x r)."""
        return _side(self.matrix, self.dim, self.rank)

    @property
    def partner(self) -> int:
        """The index of its matrix's other factor: they are 0 and 1, 2 and 3, ..."""
        return self.index ^ 1

    @property
    def transposed(self) -> bool:
        """Whether it is a parameter (r x rows)."""
        return self.dim == 1 and not self.in_state

    @property
    def dtype(self) -> torch.dtype:
        """That of its state."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def state_tensors(self) -> list[StateTensor]:
        """Itself where it is in the state, its momentum and its singular vector."""
        side: Dim = SIDES[self.dim]
        keys = (FACTOR, MOMENTUM_BUFFER) if self.in_state else (MOMENTUM_BUFFER,)
        dims = (side, self.rank) if self.in_state else None
        tensors = [StateTensor(key + self.end, dims, self.number, self.dtype) for key in keys]
        return [*tensors, StateTensor(U + self.end, (side,), self.number, self.dtype, start=start_vector)]


@dataclass(frozen=True)
class LocalFactor:
    """Tensors of a factor, this rank's rows of it."""

    value: Tensor
    momentum: Tensor
    u: Tensor


def factors_of(
    parameter: Tensor,
    first: int,
    matrices: Sequence[Layout],
    names: Sequence[str],
    ends: Sequence[str],
    group: Mapping[str, Any],
) -> list[Factor]:
    """``A`` and ``B`` of each logical matrix of a weight, or the parameter itself."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    nbytes = dtype.itemsize * max(rectangle.numel for matrix in matrices for rectangle in matrix.rectangles)
    if group["pairs"]:
        [matrix] = matrices
        dim = int(matrix.shape[0] < matrix.shape[1])  # squares count as tall
        return [Factor(parameter, first, "", 0, matrix, dim, min(matrix.shape), "", False, nbytes)]
    factors: list[Factor] = []
    for number, (matrix, name, end) in enumerate(zip(matrices, names, ends, strict=True)):
        for dim, letter in enumerate("AB"):
            called = f"[{name} {letter}]" if name else f"[{letter}]"
            index = first + len(factors)
            end_of_keys = f"_{letter}{end}"
            factor = Factor(parameter, index, called, number, matrix, dim, group["rank"], end_of_keys, True, nbytes)
            factors.append(factor)
    return factors


def _side(layout: Layout, dim: int, rank: int) -> Layout:
    shape = layout.shape[dim], rank
    rectangles = []
    for x in layout.rectangles:
        edge = (x.left, x.right) if dim else (x.top, x.bottom)
        rectangles.append(Rectangle(*edge, 0, rank))
    if set(rectangles) == {whole(shape)}:  # each rank treats as its own what it has whole
        return on_one_rank(shape)
    return replace(layout, shape=shape, rectangles=tuple(rectangles))


def check_weights(name: str, rank: int, parameters: Sequence[tuple[str, Layout, Split]]) -> None:
    """Refuse weights too small for factors of this rank."""
    for called, layout, split in parameters:
        for part, matrix in zip(split.names(layout.shape[0]), split_layout(layout, split), strict=True):
            most = min(matrix.shape)
            if rank > most:
                of_part = f"{called} ({part})" if part else called
                raise ValueError(
                    f"{name}: rank must lie in [1, {most}] for {of_part}, a matrix {matrix.shape}, got {rank}: set "
                    "rank (options={'rank': ...} of build_optimizer, or in a group of its own), or take another "
                    "optimizer"
                )


def check_pairs(name: str, rank: int, parameters: Sequence[tuple[str, Layout, Split]]) -> None:
    """Refuse parameters that are not pairs of factors."""
    for called, layout, split in parameters:
        if not split.is_whole:
            raise ValueError(f"{name}: {called} is a factor of a pair, and cannot be split into logical matrices")
        if int(layout.shape[0] >= layout.shape[1]) in layout.cut_dims:
            raise ValueError(
                f"{name}: {called}, a factor {layout.shape}, is cut along its rank: cut it along its long side "
                "(under FSDP2 a shard_placement_fn says so), or keep it whole"
            )
    if len(parameters) % 2:
        raise ValueError(f"{name}: a group of pairs has an even number of factors, got {len(parameters)}")
    for (of_a, a, _), (of_b, b, _) in batched(parameters, 2):
        if min(a.shape) not in b.shape or min(b.shape) not in a.shape:
            raise ValueError(
                f"{name}: {of_a} and {of_b} are no factors of one weight: {a.shape} and {b.shape} have no rank in "
                "common"
            )


@dataclass(eq=False)
class FactorStack:
    """First, or second, factors of equal matrices of a chunk."""

    factors: Sequence[Factor]
    numbers: Sequence[int]  # of their matrices among those of the chunk
    ok: Flag
    settings: Mapping[str, Any]  # of their group
    values: list[Tensor]  # (rows x r), written to as the next two are; of a transposed parameter (r x rows)
    momenta: list[Tensor]
    us: list[Tensor]  # (rows,), the singular vectors that the last step found
    gradients: Sequence[Tensor] | Tensor = ()  # of each one, or a stack; taken out when the momenta have them
    summed_over: str = ""  # label of the ranks whose stacks of gradients are to be summed

    @classmethod
    def of(
        cls,
        factors: Sequence[Factor],
        numbers: Sequence[int],
        ok: Flag,
        group: Mapping[str, Any],
        tensors_of: Callable[[Factor], LocalFactor],
    ) -> Self:
        """The stack of some factors."""
        tensors = [tensors_of(factor) for factor in factors]
        values = [x.value for x in tensors]
        momenta = [x.momentum for x in tensors]
        return cls(factors, numbers, ok, group, values, momenta, [x.u for x in tensors])

    @property
    def label(self) -> str:
        """The ranks that hold other rows; empty where this rank holds all."""
        return self.factors[0].layout.label

    def upright(self, x: Tensor) -> Tensor:
        """Factors as (rows x r), one or a stack."""
        return x.mT if self.factors[0].transposed else x

    def stack(self) -> Tensor:
        """Copy of the values, (matrices x rows x r)."""
        return self.upright(torch.stack(self.values))


@dataclass(frozen=True, eq=False)
class FactorChunk:
    """Parameters of a group that are worked on together."""

    parameters: list[Tensor]
    indices: list[int]  # of these
    pairs: list[tuple[FactorStack, FactorStack]]  # A and B of equal matrices
    in_state: bool  # whether the parameters are weights, and not factors


def in_chunks(units: Iterable[Sequence[Tensor]], known: Mapping[Tensor, Sequence[Factor]]) -> Iterable[list[Tensor]]:
    """Parameters of equal matrices to work on together, of bounded size, on all ranks the same."""
    chunks: dict[object, list[Tensor]] = {}
    nbytes: Counter[object] = Counter()
    for unit in units:
        kind = tuple((p.dtype, *(id(factor.matrix) for factor in known[p][::2])) for p in unit)
        for p in unit:
            nbytes[kind] += sum(factor.nbytes for factor in known[p][::2])
        chunks.setdefault((kind, nbytes[kind] // whole_matrices.MOST_BYTES), []).extend(unit)
    return chunks.values()


def stacked_pairs(
    factors: Iterable[Factor],
    group: Mapping[str, Any],
    ok: Flag,
    tensors_of: Callable[[Factor], LocalFactor],
) -> list[tuple[FactorStack, FactorStack]]:
    """Stacks of equal pairs, of bounded size."""
    kinds: dict[tuple[int, int], list[tuple[int, Factor, Factor]]] = {}
    for number, (a, b) in enumerate(batched(factors, 2)):
        kinds.setdefault((id(a.matrix), id(b.matrix)), []).append((number, a, b))
    pairs = []
    for equal in kinds.values():
        _, first, second = equal[0]
        most = max(1, whole_matrices.MOST_BYTES // max(1, first.nbytes, second.nbytes))
        for some in batched(equal, most):
            numbers, of_a, of_b = zip(*some, strict=True)
            A = FactorStack.of(of_a, numbers, ok, group, tensors_of)
            B = FactorStack.of(of_b, numbers, ok, group, tensors_of)
            pairs.append((A, B))
    return pairs


def together(stacks: Sequence[FactorStack]) -> list[FactorStack]:
    """Stacks of equal factors of whatever matrices, of bounded size."""
    kinds: dict[tuple[object, ...], list[FactorStack]] = {}
    nbytes: Counter[tuple[object, ...]] = Counter()
    for stack in stacks:
        first = stack.factors[0]
        kind = (first.layout, first.dtype, first.transposed, stack.summed_over, id(stack.settings))
        nbytes[kind] += len(stack.factors) * first.dtype.itemsize * max(x.numel for x in first.layout.rectangles)
        kinds.setdefault((*kind, nbytes[kind] // whole_matrices.MOST_BYTES), []).append(stack)
    return [_joined(equal) for equal in kinds.values()]


def _joined(stacks: Sequence[FactorStack]) -> FactorStack:
    """One stack of several, for the step alone: it knows no numbers."""
    first = stacks[0]
    if len(stacks) == 1:
        return first
    gradients: Sequence[Tensor] | Tensor = [x for stack in stacks for x in stack.gradients]
    if first.factors[0].in_state:
        gradients = torch.stack(list(gradients))
    return replace(
        first,
        factors=[factor for stack in stacks for factor in stack.factors],
        numbers=[],
        values=[x for stack in stacks for x in stack.values],
        momenta=[x for stack in stacks for x in stack.momenta],
        us=[x for stack in stacks for x in stack.us],
        gradients=gradients,
    )


@dataclass(frozen=True)
class Projection:
    """Local rows of ``A`` and ``B``, and the relative error of ``A B^T``."""

    A: Tensor
    B: Tensor
    error: float  # NaN for a weight that is zero or not finite


def project(shards: Iterable[Tensor], factors: Sequence[Factor]) -> list[Projection]:
    """Low-rank factors of matrices of which this rank holds shards.

    A cut matrix is put together on all ranks of its group, one at a time. One rank, in turn, decomposes it and sends
    the factors to the others, so that all have the same bits. The host reads once, at the end. ``factors`` has each
    matrix's first one.
    """
    packed = [_decomposed(shard, factor) for shard, factor in zip(shards, factors, strict=True)]
    rows = []
    errors = []
    for vector, factor in zip(packed, factors, strict=True):
        layout = factor.matrix
        shard = layout.rectangle
        _, r = factor.layout.shape
        if layout.group is not None:
            vector = broadcast(vector, _turn(factor), layout.group).wait()
        A, B, error = vector.split([layout.shape[0] * r, layout.shape[1] * r, 1])
        rows.append((A.view(-1, r)[shard.top : shard.bottom], B.view(-1, r)[shard.left : shard.right]))
        errors.append(error)
    found = torch.cat(errors).tolist()
    return [Projection(A, B, error) for (A, B), error in zip(rows, found, strict=True)]


def _decomposed(shard: Tensor, factor: Factor) -> Tensor:
    """``A``, ``B`` and the error in one vector, to be received where it is another rank's turn."""
    layout = factor.matrix
    _, r = factor.layout.shape
    W = shard
    if layout.group is not None and layout.sharded:
        W = shard.new_zeros(layout.shape)
        own = layout.rectangle
        W[own.top : own.bottom, own.left : own.right] = shard
        W = all_reduce(W, layout.group).wait()
    if layout.rank != _turn(factor):
        return W.new_empty(sum(layout.shape) * r + 1)
    A, B, S = low_rank_factors(torch.where(W.isfinite().all(), W, 0), r)  # of zero the error is NaN
    squares = S.double().square()
    error = (squares[r:].sum() / squares.sum()).sqrt().to(A.dtype)
    return torch.cat([A.reshape(-1), B.reshape(-1), error[None]])


def _turn(factor: Factor) -> int:
    """The rank that decomposes the matrix of a first factor."""
    return factor.index // 2 % factor.matrix.ranks
