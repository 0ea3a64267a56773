"""Muon on a hyperball: matrices keep their initial norm."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import inf
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.foreach import Tensors
from megatron_eopt.optimizers.muon import Chunk, kept_momentum
from megatron_eopt.optimizers.muon_arguments import Transport, spelled_out
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.parallel.statistics import StatisticsRequest, norms_of

RADIUS = "radius"  # kept of each logical matrix


class MuonHyperball(TensorParallelMuon):
    """Muon whose matrices move on spheres, without weight decay [1].

    Each logical matrix ``W`` has a radius ``R``, its Frobenius norm before the first step. With ``O`` the orthogonal
    factor of its momentum, as in :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`, and
    ``normalize(X) = X / ||X||_F``::

        W <- R normalize(W - lr R normalize(O))

    A step turns the matrix by an angle of about ``lr``, whatever its size and shape. Norms are those of the global
    matrix, from one all-reduce of a step for each group of ranks. ``R`` is saved state in fp64, and only
    :meth:`scale_rows` changes it, so rounding of a bf16 parameter does not add up; but steps smaller than that rounding
    need fp32, as Megatron keeps it.

    A matrix stays as it is, bit for bit, where ``lr`` or the update is zero, where the step would end in the center,
    and where its gradient is missing or not finite.

    Args:
        params: matrices, or groups of them with their own ``lr``, ``momentum``, ``num_ns_steps`` or
            ``coefficient_type``; they have their initial values by the first step.
        lr: learning rate, at least 0: the length of a step relative to the norm of its matrix.
        weight_decay: 0, since the norm is kept anyway; here for those who fill it from a config.
        **transport: these, ``momentum`` and ``nesterov`` are those of
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Raises:
        ValueError: as by Muon; for a weight decay, for scale settings, and with ``blockwise`` for shards. In the first
            step, before anything is changed, for a matrix whose norm is zero or not finite.

    [1] Wen et al., Fantastic Pretraining Optimizers and Where to Find Them 2.1: Hyperball Optimization (2025).
    """

    traits = replace(
        TensorParallelMuon.traits,
        decays_weights=False,
        size_rule="lr times the norm of the matrix",
        measures=True,
        instead_of_decay="it keeps the norm of every matrix, whatever decays",
    )

    _radii_of: object = None  # the engine of the last step: another one may be of further matrices

    @spelled_out(Transport, TensorParallelMuon)
    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        **transport: Unpack[Transport],
    ) -> None:
        super().__init__(params, lr, momentum, nesterov, weight_decay, **transport)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum and each matrix's norm, zero until measured."""
        ends = enumerate(self.key_ends(parameter))
        radii = [StateTensor(RADIUS + end, (), index, torch.float64) for index, end in ends]
        return [*super().state_tensors(parameter), *radii]

    def _take(self, accepted: Tensor) -> None:
        if self._radii_of is not self.engine:
            self._find_radii()  # another try measures the same
            self._radii_of = self.engine
        super()._take(accepted)

    def _find_radii(self) -> None:
        matrices, radii, norms = self._norms(self._parameters())
        known_radii = torch.stack(radii)
        for matrix, radius, norm in zip(matrices, *torch.stack([known_radii, norms]).tolist(), strict=True):
            # what is 0 was not measured yet, unless the matrix has no entries
            if 0 not in matrix.shape and not radius and not 0 < norm < inf:
                raise ValueError(
                    f"{type(self).__name__} keeps the norm that a matrix starts with, and that of {matrix.name} is "
                    f"{norm:g}: initialize it, or give it to another optimizer (AdamW, say)"
                )
        torch._foreach_copy_(radii, torch.where(known_radii == 0, norms, known_radii).unbind())

    def _norms(self, parameters: Sequence[Tensor]) -> tuple[list[Matrix], list[Tensor], Tensor]:
        """Logical matrices, the norms they keep and those they have."""
        index_of = {parameter: index for index, parameter in enumerate(self._parameters())}
        indices = [index_of[parameter] for parameter in parameters]
        matrices, shards = self.engine.flat(indices), self.engine.split(indices, list(map(local, parameters)))
        wanted = [StatisticsRequest(matrix=W, x=x, squared_norm=True) for W, x in zip(matrices, shards, strict=True)]
        radii = [radius for parameter in parameters for radius in self._further_state(parameter)]
        return matrices, radii, norms_of(self.engine.statistics(wanted)).sqrt()

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale the norms that matrices keep."""
        if not parameters:
            return
        _, radii, before = self._norms(parameters)
        super().scale_rows(parameters, factors)
        after = self._norms(parameters)[2]
        torch._foreach_mul_(radii, torch.where(before > 0, after / nonzero(before), 1.0).unbind())

    def program(self, chunk: Chunk, engine: Engine) -> Program:
        """One chunk's step."""
        u = kept_momentum(chunk, engine)
        factors = yield from engine.orthogonalize(chunk.indices, u)
        rotate(chunk, engine, factors)


def rotate(chunk: Chunk, engine: Engine, factors: Tensors) -> None:
    """Apply ``W <- R normalize(W - lr R normalize(O))``."""
    if chunk.watch is not None:
        chunk.watch(chunk.indices, factors)
    weights = [weight for batch in chunk.batches for weight in batch.weights]
    shards = engine.split(chunk.indices, list(weights))
    several = list(zip(engine.flat(chunk.indices), shards, factors, strict=True))
    wanted = [StatisticsRequest(matrix=matrix, x=x, squared_norm=True, inner=factor) for matrix, x, factor in several]
    wanted += [StatisticsRequest(matrix=matrix, x=factor, squared_norm=True) for matrix, _, factor in several]
    measured = engine.statistics(wanted)
    inner = torch.stack([of_matrix["inner_product"] for of_matrix in measured[: len(several)]])
    squares = norms_of(measured)
    radii = [torch.stack([radius for norms in batch.further for radius in norms]) for batch in chunk.batches]
    lengths = torch.cat([of_batch * batch.lr for of_batch, batch in zip(radii, chunk.batches, strict=True)])
    flags = [batch.flag(n) for batch in chunk.batches for n, norms in enumerate(batch.further) for _ in norms]
    if masks := [flag for flag in flags if isinstance(flag, Tensor)]:  # all of them, or none
        lengths = lengths * torch.stack(masks)
    coefficients = on_spheres(squares, inner, torch.cat(radii), lengths)
    if chunk.kernels is not None:
        chunk.kernels.rotate(chunk.batches, factors, coefficients.float())
        return
    move(shards, factors, coefficients)
    for weight, x in zip(weights, engine.merge(chunk.indices, shards), strict=True):
        if weight is not x:
            weight.copy_(x)


def on_spheres(squares: Tensor, inner: Tensor, radii: Tensor, lengths: Tensor) -> Tensor:
    """Coefficients ``(moves, a, b)`` of each step ``(W - a O) b``.

    That is ``R normalize(W - lr R normalize(O))``. The norm of the difference follows from those of its terms, so one
    reduction is enough; fp64 leaves enough digits where they cancel. Takes vectors in fp64: squared norms of all ``W``,
    then of all ``O``; inner products; ``R``; and ``lr R``, which is 0 where a matrix stays. Waits for no device.
    """
    squared_weights, squared_factors = squares.chunk(2)
    steps = lengths / nonzero(squared_factors.sqrt())
    squared = (squared_weights - 2 * steps * inner + steps.square() * squared_factors).clamp(min=0)
    # nearer to the center, what a step leaves of a matrix is rounding, and so is its direction
    moves = (steps != 0) & (squared_factors > 0) & (squared > 1e-12 * squared_weights)
    return torch.stack([moves, steps, radii / nonzero(squared.sqrt())], 1)


def move(shards: Tensors, factors: Tensors, coefficients: Tensor) -> None:
    """Apply ``W <- (W - a O) b`` in place, rounded once."""
    pieces: list[tuple[Tensor, ...]] = []  # of few enough rows that a copy is bounded
    for x, factor, of_matrix in zip(shards, factors, coefficients.unbind(), strict=True):
        height = max(1, foreach.MOST_BYTES // 4 // max(1, x.shape[1]))
        pieces += zip(x.split(height), factor.split(height), repeat(of_matrix), strict=False)
    for some in foreach.alike(*zip(*pieces, strict=True)):
        xs, of_some, of_each = map(list, zip(*(pieces[i] for i in some), strict=True))
        before, after = torch.stack(xs), torch.stack(of_some)
        wide = torch.promote_types(before.dtype, torch.float32)
        moves, step, shrink = torch.stack(of_each).to(wide)[..., None, None].unbind(1)
        moved = (before.to(wide) - step * after.to(wide)) * shrink
        torch._foreach_copy_(xs, torch.where(moves > 0, moved.to(before.dtype), before).unbind())
