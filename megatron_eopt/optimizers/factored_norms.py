"""Steps of whole matrices that keep their norms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_eopt.optimizers.factored_chunks import EqualMatrices
from megatron_eopt.optimizers.modifiers import RADIUS
from megatron_eopt.optimizers.weight_step import on_spheres
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.statistics import StatisticsRequest, norms_of


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
        at = slice(done, done := done + len(update))
        radii = torch.stack([p.state[RADIUS + p.plans[i].end] for p, i in equal.members])
        weights, products = squares[0, at] * (1 - equal.decay) ** 2, torch.stack(inner[at]) * (1 - equal.decay)
        of_equal = on_spheres(torch.stack([weights, squares[1, at]]), products, radii, radii * equal.settings["lr"])
        steps.append(tuple(x.view(-1, 1, 1) for x in of_equal.unbind(1)))
    return steps
