"""Dion: orthonormal updates of low rank, with error feedback."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import batched
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_matrix,
    check_shard,
    local,
    names_of_last,
)
from megatron_eopt.optimizers.state import StateTensor, check_placements
from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.orthogonalize.precision import fp32_products
from megatron_eopt.orthogonalize.spectral import start_basis
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix, Rectangle
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import ABOVE_0_UP_TO_1, Scalar

MOMENTUM_BUFFER = "momentum_buffer"
BASIS = "Q"
MOST_BYTES = 2**28  # of the shards of a chunk, where one parameter does not have more
NOISE = 100  # times the precision of the dtype: a column of P this much below the largest is rounding


@dataclass(frozen=True, eq=False)
class EqualMatrices:
    """Logical matrices of a chunk that lie alike on all ranks."""

    matrix: Matrix  # one of them
    shard: Rectangle  # this rank's
    numbers: list[int]  # of these among those of the chunk
    accepted: Tensor  # whether they step, (n x 1 x 1)
    bases: list[Tensor]  # Q (columns of the shard x r) of each, written to


@dataclass(frozen=True, eq=False)
class Chunk:
    """Parameters of a group that step together."""

    indices: list[int]  # among those of the optimizer
    matrices: list[EqualMatrices]
    weights: list[Tensor]
    momenta: list[Tensor]
    gradients: list[Tensor]  # in the dtype of the momenta
    accepted: Tensor  # one flag for each parameter
    settings: Mapping[str, Any]  # of the group


def dion(chunk: Chunk, engine: Engine) -> None:
    """Dion's step of a chunk, equal matrices as stacks: see :class:`Dion`."""
    lr, mu, weight_decay = (chunk.settings[key] for key in ("lr", "momentum", "weight_decay"))
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        foreach.subtract(chunk.weights, chunk.weights, lr * weight_decay, chunk.accepted)  # W -= lr weight_decay W
    torch._foreach_add_(chunk.momenta, foreach.masked(chunk.gradients, 0.0, chunk.accepted))  # B = M + G
    shards = engine.split(chunk.indices, list(chunk.momenta))
    stacks = [foreach.stacked(shards, equal.numbers) for equal in chunk.matrices]
    kept = list(zip(stacks, chunk.matrices, strict=True))
    matrices = [equal.matrix for equal in chunk.matrices]
    products = engine.side_sums([B @ foreach.stacked(equal.bases) for B, equal in kept], matrices, 0)
    P = [orthonormal(x, equal) for x, equal in zip(products, chunk.matrices, strict=True)]  # P = orth(B Q)
    R = engine.side_sums([B.mT @ p for p, B in zip(P, stacks, strict=True)], matrices, 1)  # R = B^T P
    updates = [torch.empty(0)] * len(shards)
    for p, r, (B, equal) in zip(P, R, kept, strict=True):
        columns = r[:, equal.shard.left : equal.shard.right]
        Q = foreach.stacked(equal.bases)
        B.baddbmm_(p, columns.mT, alpha=mu - 1)  # M = B - (1 - mu) P R^T
        norms = torch.linalg.vector_norm(r, dim=1, keepdim=True, dtype=torch.float64)
        # a column that is left out of P keeps its direction
        Q = torch.where(norms > 0, columns / nonzero(norms).to(r.dtype), Q)  # Q = R / ||R||
        torch._foreach_copy_(equal.bases, list(Q.unbind()))
        steps = (p * scale_of(equal.matrix)) @ Q.mT  # W <- W - lr sqrt(m / n) P Q^T
        for i, step, momentum in zip(equal.numbers, steps.unbind(), B.unbind(), strict=True):
            updates[i] = step
            shards[i] = momentum
    for m, x in zip(chunk.momenta, engine.merge(chunk.indices, shards), strict=True):
        if m.data_ptr() != x.data_ptr():  # of a stack, or of matrices that were put together
            m.copy_(x.view(m.shape))
    merged = zip(chunk.momenta, engine.merge(chunk.indices, updates), strict=True)
    foreach.subtract(chunk.weights, [x.view(m.shape) for m, x in merged], lr, chunk.accepted)


def orthonormal(x: Tensor, equal: EqualMatrices) -> Tensor:
    """This rank's rows of the Q of QR decompositions, whose R have positive diagonals.

    Columns are zero where all but rounding is in the span of those before them, and everywhere if not accepted.
    """
    rows = slice(equal.shard.top, equal.shard.bottom)
    if 0 in x.shape:
        return x[:, rows]
    Q, R = torch.linalg.qr(x)
    lengths = R.diagonal(dim1=-2, dim2=-1)[:, None]
    significant = lengths.abs() > NOISE * torch.finfo(x.dtype).eps * lengths.abs().amax(-1, keepdim=True)
    return torch.where(significant & equal.accepted, Q[:, rows] * lengths.sign(), 0.0)


def scale_of(matrix: Matrix) -> float:
    """``sqrt(m / n)`` of a global matrix."""
    return sqrt(matrix.shape[0] / max(1, matrix.shape[1]))


def bytes_of(matrix: Matrix) -> int:
    """Bytes of the largest shard of any rank."""
    return max(shard.numel for shard in matrix.rectangles) * matrix.itemsize


def rank_of(fraction: float, rows: int, cols: int) -> int:
    """The rank of updates: part of the short side, rounded up."""
    return ceil(fraction * min(rows, cols))


class Dion(BaseOptimizer):
    """Dion [1]: orthonormal updates of low rank, with error feedback.

    A logical matrix ``W`` (m x n) with gradient ``G`` has a momentum ``M`` and a basis ``Q`` (n x r), with
    ``r = ceil(rank_fraction min(m, n))``. In this order:

    1. weight decay: ``W <- (1 - lr weight_decay) W``;
    2. ``B = M + G``;
    3. one power iteration: ``P = orth(B Q)``, the orthonormal factor of a QR decomposition, and ``R = B^T P``, so that
       ``P R^T`` is near the closest matrix of rank r;
    4. error feedback: ``M <- B - (1 - momentum) P R^T``, which keeps what the update leaves out;
    5. ``Q <- R`` with columns of norm 1;
    6. ``W <- W - lr sqrt(m / n) P Q^T``.

    ``Q`` begins with normal numbers that are the same on any number of ranks. Where a column of ``B Q`` is rounding
    alone, as in the first steps if gradients have a smaller rank than r, it is left out of ``P``, and that column of
    ``Q`` stays: the formulas would divide rounding by its norm. ``M`` and ``Q`` are kept, and all is computed, in fp32
    (fp64 for fp64 parameters).

    The update at TP=k is the update at TP=1, since QR is of the whole ``B Q``; no rank has a whole matrix. Of a cut
    matrix, ``B Q`` and ``R`` are summed over its ranks: ``(m + n) r`` numbers in two all-reduces, for many matrices at
    once. ``M`` is cut as ``W``, and ``Q`` as its columns. Each rank of a matrix computes its QR, some ``4 m r^2``
    operations; the products, ``6 m n r``, are divided by the ranks.

    A group may have its own ``lr``, ``momentum``, ``weight_decay`` and ``rank_fraction``, which is fixed when the state
    is created. A parameter stays as it is where its gradient is missing or not finite: see
    :mod:`~megatron_eopt.optimizers.nonfinite`.

    Args:
        params: matrices, or groups of them; the attribute ``logical_matrices`` declares those that are several.
        lr: learning rate, at least 0.
        momentum: ``mu`` of the paper, in [0, 1).
        weight_decay: decoupled, at least 0.
        rank_fraction: rank of updates as a part of the short side, in (0, 1]. The paper has 1, 1/2, 1/4 and less.
        split_qkv: update the parts of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute of a parameter
            wins.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.

    Raises:
        ValueError: for a setting out of its range, a parameter that is no matrix, a split that does not fit, or shards
            without a group; in a step for another ``rank_fraction`` than that of the state.

    [1] Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv 2504.05295.
    """

    own_settings = (
        Setting(
            "rank_fraction",
            "Rank of updates, as a part of the short side of a matrix, in (0, 1].",
            ABOVE_0_UP_TO_1,
        ),
    )

    _updated: int = 0

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        rank_fraction: float = 0.25,
        *,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        pg_collection: TensorParallelGroups | None = None,
    ) -> None:
        super().__init__(params, locals())

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint describes."""
        return super().settings() | {"split_qkv": self.split_qkv}

    @property
    def matrices_updated(self) -> int:
        """Counts all matrices."""
        return self._updated

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter."""
        described = {}
        for parameter in self._parameters():
            names = self.split_of(parameter).names(self.layout(parameter).shape[0])
            fraction = self._fraction(parameter)
            described[parameter] = [
                DescribedMatrix(name, x.shape, "low rank" if x.sharded else "local", sqrt(x.shape[0] / x.shape[1]), rms)
                for name, x in zip(names, self.matrix_layouts(parameter), strict=True)
                for rms in [sqrt(rank_of(fraction, *x.shape)) / x.shape[1]]
            ]
        return described

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum and each matrix's basis."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        fraction = self._fraction(parameter)
        bases = []
        for i, (end, x) in enumerate(zip(self.key_ends(parameter), self.matrix_layouts(parameter), strict=True)):
            rank = rank_of(fraction, *x.shape)
            bases.append(StateTensor(BASIS + end, ("columns", rank), i, wide, start=partial(start_basis, rank=rank)))
        return [StateTensor(MOMENTUM_BUFFER, dtype=wide), *bases]

    def _fraction(self, parameter: Tensor) -> float:
        fraction: float = self.group_of(parameter)["rank_fraction"]
        return fraction

    def prepare(self) -> Engine:
        """Also refuse another rank than that of the state."""
        for parameter in self._parameters():
            state = self.state.get(parameter, {})
            for basis in (tensor for tensor in self.state_tensors(parameter)[1:] if tensor.key in state):
                rank = state[basis.key].shape[1]
                if basis.dims != ("columns", rank):
                    raise ValueError(
                        f"{type(self).__name__} keeps a basis of rank {rank} for the parameter of shape "
                        f"{tuple(parameter.shape)}, whose group now has rank_fraction {self._fraction(parameter)}: set "
                        f"it back, it cannot change"
                    )
        return super().prepare()

    def _planned_settings(self) -> object:
        return [group["rank_fraction"] for group in self.param_groups]

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return ParamSpec(name, dtype, self.layout(parameter), self.split_of(parameter))

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        indices = names_of_last(self.param_groups, shapes=False)
        for parameter, called, index in zip(group["params"], names_of_last(self.param_groups), indices, strict=True):
            check_matrix(name, parameter, f"orthogonalizes matrices, but {index}")
            self._check_split(parameter)
            check_shard(parameter, self.pg_collection, called)
            check_placements(f"{name}: {called}", parameter, self.state_tensors(parameter), self.matrix_layouts)

    def _take(self, accepted: Tensor) -> None:
        self._session.changing = True
        with fp32_products("highest"):
            for chunk in self._chunks(accepted):
                dion(chunk, self.engine)
                self._updated += sum(len(equal.numbers) for equal in chunk.matrices)

    def _chunks(self, accepted: Tensor) -> Iterator[Chunk]:
        """Parameters of each group and label, alike on all ranks."""
        engine = self.engine
        flags = accepted.unbind()
        first = 0
        for group in self.param_groups:
            alike: dict[str, list[int]] = {}
            for index, p in enumerate(group["params"], first):
                # also without a gradient where others wait for this rank's part
                if p.grad is not None or engine.shares(index):
                    alike.setdefault(self.layout(p).label, []).append(index)
            first += len(group["params"])
            for _, indices in sorted(alike.items()):
                chunk = list[int]()
                nbytes = 0
                for i in indices:
                    size = sum(map(bytes_of, engine.matrices[i]))
                    if chunk and nbytes + size > MOST_BYTES:
                        yield self._chunk(chunk, flags, group)
                        chunk = []
                        nbytes = 0
                    chunk.append(i)
                    nbytes += size
                yield self._chunk(chunk, flags, group)

    def _chunk(self, indices: list[int], flags: Sequence[Tensor], group: Mapping[str, Any]) -> Chunk:
        every = self._parameters()
        states = self._states
        parameters = [every[i] for i in indices]
        kinds = dict[Hashable, list[Any]]()
        number = 0
        momenta = [local(states.of(p)[MOMENTUM_BUFFER]) for p in parameters]
        pairs = zip(parameters, momenta, strict=True)
        gradients = [m if p.grad is None else local(p.grad).to(m.dtype) for p, m in pairs]
        for i, p in zip(indices, parameters, strict=True):
            for end, matrix in zip(self.key_ends(p), self.engine.matrices[i], strict=True):
                Q = local(states.kept[p][BASIS + end])
                kind = (matrix.shape, matrix.rectangles, matrix.itemsize)
                kinds.setdefault(kind, []).append((matrix, number, flags[i], Q))
                number += 1
        matrices = []
        for alike in kinds.values():
            matrix = alike[0][0]
            # of stacks, which are copies, no more than some; of one that is large there is none
            for some in batched(alike, max(1, foreach.MOST_BYTES // max(1, bytes_of(matrix)))):
                _, numbers, of_each, bases = map(list, zip(*some, strict=True))
                accepted = torch.stack(of_each)[:, None, None]
                matrices.append(EqualMatrices(matrix, self.engine.shard(matrix), numbers, accepted, bases))
        weights = list(map(local, parameters))
        accepted = torch.stack([flags[i] for i in indices])
        return Chunk(indices, matrices, weights, momenta, gradients, accepted, group)
