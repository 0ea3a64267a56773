"""A step of pairs of factors ``A B^T``: Spectron's, for factors that are kept and for factors that are parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.group_settings import Scalar
from megatron_eopt.orthogonalize.spectral import low_rank_factors, power_iterations, rayleigh_quotients
from megatron_eopt.parallel.collectives import all_reduce, broadcast
from megatron_eopt.parallel.layout import Layout


@dataclass(frozen=True, eq=False)
class Factor:
    """One factor, as this rank holds it: the rank is the second dimension.

    Attributes:
        place: of it among the factors that are orthogonalized together.
        value: (rows x r), written to.
        momentum: likewise.
        u: (rows,), likewise: the singular vector that the last step found.
        gradient: (rows x r).
        label: of the ranks that hold other rows; empty where this rank holds all.
    """

    place: int
    value: Tensor
    momentum: Tensor
    u: Tensor
    gradient: Tensor
    label: str


@dataclass(frozen=True, eq=False)
class Pair:
    """Two factors, whose step is of one size.

    Attributes:
        factors: both.
        accepted: whether they take part, on their device.
        lr: of their group, and
        weight_decay: likewise, and
        momentum_beta: likewise.
    """

    factors: tuple[Factor, Factor]
    accepted: Tensor
    lr: Scalar
    weight_decay: Scalar
    momentum_beta: float


class RankSums:
    """Sums over groups of ranks, with one exchange for all tensors of a group.

    Args:
        groups: of ranks, by label.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = groups

    def __call__(self, tensors: Sequence[Tensor], labels: Sequence[str]) -> list[Tensor]:
        """The sums of tensors, each over the group of its label; with an empty one it stays."""
        found = list(tensors)
        kinds = sorted({(label, str(x.dtype)) for x, label in zip(tensors, labels, strict=True) if label})
        pending = []
        for kind in kinds:
            places = [i for i, x in enumerate(tensors) if (labels[i], str(x.dtype)) == kind]
            several = torch.cat([tensors[i].reshape(-1) for i in places])
            pending.append((places, all_reduce(several, self._groups[kind[0]])))
        for places, sums in pending:
            parts = sums.wait().split([tensors[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                found[i] = part.view(tensors[i].shape)
        return found


def step_pairs(
    pairs: Sequence[Pair],
    orthogonalize: Callable[[list[Tensor], list[int]], list[Tensor]],
    power_steps: int,
    sums: RankSums,
) -> None:
    """Decay, momentum, and an update bounded by the singular values of both factors; does not wait for a GPU.

    Args:
        pairs: of all parameters that may take part.
        orthogonalize: maps momenta and their places to the orthogonal factors.
        power_steps: of the power iterations.
        sums: over the ranks that hold other rows.
    """
    for pair in pairs:
        _average(pair)
    factors = [factor for pair in pairs for factor in pair.factors]
    directions = iter(orthogonalize([factor.momentum for factor in factors], [factor.place for factor in factors]))
    norms = iter(_spectral_norms(factors, [pair.accepted for pair in pairs for _ in pair.factors], power_steps, sums))
    for pair in pairs:
        rate = pair.lr * pair.accepted.double() / (next(norms) + next(norms) + 1)
        for factor in pair.factors:
            factor.value.sub_(next(directions) * rate)


def factor_gradients(
    gradients: Sequence[Tensor], factors: Sequence[tuple[Tensor, Tensor]], labels: Sequence[str], sums: RankSums
) -> list[tuple[Tensor, Tensor]]:
    """``G B`` and ``G^T A`` of this rank's rows of ``A`` and ``B``, in the dtype of the factors.

    Args:
        gradients: this rank's pieces of ``G``.
        factors: this rank's rows of ``A`` and ``B``.
        labels: of ``A`` and of ``B`` in turn, as in :class:`Factor`.
        sums: over ranks.
    """
    parts = []
    for G, (A, B) in zip(gradients, factors, strict=True):
        G = G.to(A.dtype)
        parts += [G @ B, G.mT @ A]
    # a product along a dimension that is cut is of this rank's part of it alone
    across = [label for of_a, of_b in zip(labels[::2], labels[1::2], strict=True) for label in (of_b, of_a)]
    summed = sums(parts, across)
    return list(zip(summed[::2], summed[1::2], strict=True))


def project(
    pieces: Iterable[Tensor], layouts: Sequence[Layout], ranks: Sequence[int], turns: Sequence[int]
) -> list[tuple[Tensor, Tensor, float]]:
    """Factors of low rank of matrices of which this rank holds pieces; waits for the device.

    Matrices that are cut are put together on all ranks of their group, one at a time; the decomposition of each is made
    on one of them, the ranks in turn, and is sent to the others, so that all have the same to the bit.

    Args:
        pieces: of the weights, in the dtype of the factors; made one at a time, if they are an iterator.
        layouts: where they lie.
        ranks: ``r`` of each.
        turns: of each a number, the same on the ranks that share it, which says who of them decomposes it.

    Returns:
        This rank's rows of ``A`` and ``B``, and the relative error ``||W - A B^T||_F / ||W||_F``, which is not a number
        for a ``W`` that is zero or not finite.
    """
    packed = []
    for piece, layout, r, turn in zip(pieces, layouts, ranks, turns, strict=True):
        whole = _whole(piece, layout)
        if layout.rank == turn % layout.ranks:
            packed.append(_packed(whole, r))
        else:
            packed.append(whole.new_empty(sum(layout.shape) * r + 1))
    found = []
    for both, layout, r, turn in zip(packed, layouts, ranks, turns, strict=True):
        if layout.group is not None:
            both = broadcast(both, turn % layout.ranks, layout.group).wait()
        A, B, error = both.split([layout.shape[0] * r, layout.shape[1] * r, 1])
        place = layout.piece
        found.append((A.view(-1, r)[place.top : place.bottom], B.view(-1, r)[place.left : place.right], float(error)))
    return found


def _average(pair: Pair) -> None:
    """Decay of the factors, and their momenta."""
    # 1 - lr * weight_decay as one factor would be rounded alike in every step, and the errors would add up
    decay = pair.lr * pair.weight_decay * pair.accepted.double()
    for factor in pair.factors:
        gradient = torch.where(pair.accepted, factor.gradient.to(factor.momentum.dtype), factor.momentum)
        factor.value.sub_(factor.value * decay)
        factor.momentum.lerp_(gradient, 1 - pair.momentum_beta)


def _spectral_norms(
    factors: Sequence[Factor], accepted: Sequence[Tensor], power_steps: int, sums: RankSums
) -> list[Tensor]:
    values, labels = [factor.value for factor in factors], [factor.label for factor in factors]

    def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
        return sums(tensors, labels)

    found = power_iterations(values, [factor.u for factor in factors], power_steps, summed)
    us, vs = [u for u, _ in found], [v for _, v in found]
    for factor, u, flag in zip(factors, us, accepted, strict=True):
        factor.u.copy_(torch.where(flag, u, factor.u))
    return rayleigh_quotients(values, us, vs, summed)


def _whole(piece: Tensor, layout: Layout) -> Tensor:
    if layout.group is None or not layout.sharded:
        return piece
    whole, place = piece.new_zeros(layout.shape), layout.piece
    whole[place.top : place.bottom, place.left : place.right] = piece
    return all_reduce(whole, layout.group).wait()


def _packed(whole: Tensor, r: int) -> Tensor:
    """``A``, ``B`` and the relative error, one behind the other."""
    if not whole.isfinite().all():
        return whole.new_full((sum(whole.shape) * r + 1,), torch.nan)
    A, B, S = low_rank_factors(whole, r)
    squares = S.double().square()
    error = (squares[r:].sum() / squares.sum()).sqrt().to(A.dtype)
    return torch.cat([A.reshape(-1), B.reshape(-1), error[None]])
