"""Steps of whole matrices that keep their norms."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from megatron_eopt.optimizers.factored_chunks import EqualMatrices
from megatron_eopt.optimizers.foreach import decay_power
from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix
from megatron_eopt.parallel.statistics import StatisticsRequest, norms_of

RADIUS = "radius"  # kept of each logical matrix


def held_steps(weights: Tensor, updates: Tensor, inner: Tensor, radii: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Coefficients ``(moves, a, b)`` of each step ``(W - a U) b`` that holds a norm.

    That is ``R normalize(W - length normalize(U))``. The norm of the difference follows from those of its terms, so one
    reduction is enough; fp64 leaves enough digits where they cancel. Takes vectors in fp64: squared norms of all ``W``
    and of all ``U``, their inner products, ``R``, and lengths, 0 where a matrix stays.
    """
    steps = lengths / nonzero(updates.sqrt())
    squares = (weights - 2 * steps * inner + steps.square() * updates).clamp(min=0)
    # nearer to the center, what a step leaves of a matrix is rounding, and so is its direction
    return (steps != 0) & (updates > 0) & (squares > 1e-12 * weights), steps, radii / nonzero(squares.sqrt())


def steps_of(held: Sequence[tuple[EqualMatrices, Tensor]], engine: Engine) -> list[tuple[Tensor, ...]]:
    """The coefficients of stacked updates, by one reduction; the weights decay before."""
    wanted, of_updates = list[StatisticsRequest](), list[StatisticsRequest]()
    for equal, update in held:
        for (p, i), x, u in zip(equal.members, equal.weights, update.unbind(), strict=True):
            matrix = engine.matrices[p.index][i]
            wanted.append(StatisticsRequest(matrix=matrix, x=x, squared_norm=True, inner=u))
            of_updates.append(StatisticsRequest(matrix=matrix, x=u, squared_norm=True))
    measured = engine.statistics([*wanted, *of_updates])
    squares, inner = norms_of(measured).view(2, -1), [each["inner_product"] for each in measured[: len(wanted)]]
    steps, done = list[tuple[Tensor, ...]](), 0
    for equal, update in held:
        at, settings = slice(done, done := done + len(update)), equal.settings
        decay = decay_power(settings["lr"], settings["weight_decay_method"]) * settings["weight_decay"]
        radii = torch.stack([p.state[RADIUS + p.plans[i].end] for p, i in equal.members])
        weights, products = squares[0, at] * (1 - decay) ** 2, torch.stack(inner[at]) * (1 - decay)
        of_equal = held_steps(weights, squares[1, at], products, radii, radii * settings["lr"])
        steps.append(tuple(x.view(-1, 1, 1) for x in of_equal))
    return steps


def measured_norms(matrices: Sequence[Matrix], shards: Sequence[Tensor], engine: Engine) -> Tensor:
    """The norms of logical matrices, in fp64."""
    wanted = [StatisticsRequest(matrix=W, x=x, squared_norm=True) for W, x in zip(matrices, shards, strict=True)]
    return norms_of(engine.statistics(wanted)).sqrt()


def measure_radii(name: str, matrices: Sequence[Matrix], radii: Sequence[Tensor], norms: Tensor) -> None:
    """Set the radii that are 0, which were not measured yet; a norm of 0 is a ``ValueError``."""
    known = torch.stack(list(radii))
    for matrix, radius, norm in zip(matrices, *torch.stack([known, norms]).tolist(), strict=True):
        if 0 not in matrix.shape and not radius and not 0 < norm < inf:
            raise ValueError(
                f"{name} with weight_norm 'hold' keeps the norm that a matrix starts with, and that of {matrix.name} "
                f"is {norm:g}: initialize it, or set weight_norm 'none' for it"
            )
    torch._foreach_copy_(list(radii), list(torch.where(known == 0, norms, known).unbind()))
