"""Chunks of equal matrices with factors, and their compute ranks."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers.foreach import decay_power
from megatron_eopt.optimizers.group_settings import Scalar
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.orthogonalize.kernels import KEPT, Shapes
from megatron_eopt.parallel.engine import Engine, Spread
from megatron_eopt.parallel.layout import Layout

EXP_AVG, STEPS = "exp_avg", "steps"

Sides = tuple[tuple[str, ...], tuple[str, ...]]
"""State keys of the factor and of what is made of it, of the rows and of the columns."""

MOST_BYTES = 2**28  # of a stack of equal matrices, and of what is gathered at once, where one is not larger


class Planned:
    """How a logical matrix is worked on.

    With ``all_whole`` one that has no factor is worked on whole, too.
    """

    def __init__(self, end: str, layout: Layout, longest: int, sides: Sides, all_whole: bool = False) -> None:
        (rows, cols), self.layout, self.end, self.longest = layout.shape, layout, end, longest
        has_factor = [min(rows, cols) > 0 and length <= longest for length in (rows, cols)]
        # keys of each side; none where it has no factor
        self.sides = [[f"{key}{end}" for key in keys if has] for keys, has in zip(sides, has_factor, strict=True)]
        # of a step, up to a factor that is the same for all: cubes of sides, products with them, and entries
        self.cost = sum(4 * n * (n**2 + rows * cols) for n in compress((rows, cols), has_factor))
        self.cost += all_whole * rows * cols
        self.gathered = self.cost > 0 and layout.ranks > 1  # whether a rank needs what others have of it
        self.compute_rank: int | None = None  # the one of its group that alone needs it


def factor_stacks(plans: Iterable[Planned]) -> Shapes:
    """Stacks with which a kernel of factors is checked and timed.

    Their short side is the side of a factor, as kernels are tried: a longer side has more columns than in the step,
    which end inside a tile where those of the step do. Those of ``R`` are multiplied transposed.
    """
    stacks = set()
    for (shape, has_factor), count in Counter((p.layout.shape, tuple(map(bool, p.sides))) for p in plans).items():
        together = min(count, max(1, MOST_BYTES // (12 * max(1, math.prod(shape)))))
        for side, rows in compress(enumerate(shape), has_factor):
            cols = shape[1 - side]
            cols += max(0, -(-(rows + side - cols) // KEPT)) * KEPT
            stacks.add((together, *((cols, rows) if side else (rows, cols))))
    return sorted(stacks)


@dataclass(frozen=True, eq=False)
class ParameterStep:
    """A parameter in a step, alike on all sharing ranks."""

    index: int
    parameter: Tensor
    state: dict[str, Any]
    settings: Mapping[str, Any]
    accepted: Tensor  # if not, everything stays as it is
    first: bool  # whether its factors are zero so far, but are to be made; only if accepted
    rests: bool  # whether the first gradient makes the factors alone
    moments: Sequence[str]  # keys of state in its shape
    plans: list[Planned]  # of each logical matrix

    @property
    def label(self) -> str:
        """The ranks that exchange its matrices; empty for none."""
        return next((plan.layout.label for plan in self.plans if plan.gathered), "")

    @cached_property
    def kinds(self) -> tuple[Hashable, ...]:
        """What equal logical matrices have in common, for each."""
        ours = id(self.settings), self.first, self.parameter.dtype, min(self.parameter.ndim, 2)
        return tuple((*ours, *map(bool, plan.sides), plan.layout.shape, plan.layout.rectangles) for plan in self.plans)

    @property
    def gradient(self) -> Tensor:
        """The local gradient; zeros where there is none."""
        x = self.parameter
        return torch.atleast_1d(local(torch.zeros_like(x) if x.grad is None else x.grad))

    @property
    def written(self) -> list[Tensor]:
        """Views of local weight and moments, scalars as vectors."""
        return [torch.atleast_1d(local(x)) for x in (self.parameter, *(self.state[key] for key in self.moments))]


Chunk = list[tuple[ParameterStep, int]]  # logical matrices, by index, that are worked on and exchanged together


def chunks_of(parameters: Sequence[ParameterStep], most_bytes: int) -> Iterator[list[Chunk]]:
    """Chunks of bounded size, listed by ranks and dtype."""
    by_label: dict[tuple[str, str], dict[tuple[Hashable, ...], list[ParameterStep]]] = {}
    for p in parameters:
        by_label.setdefault((p.label, str(p.parameter.dtype)), {}).setdefault(p.kinds, []).append(p)
    for _, alike in sorted(by_label.items()):
        chunks: list[Chunk] = [[]]
        loads: Counter[int | None] = Counter()
        for p, i, plan in ((step, *of_one) for step in chain(*alike.values()) for of_one in enumerate(step.plans)):
            # gradient and moments come together; a factor may be larger
            most = max([3 * math.prod(plan.layout.shape), *(n**2 for n in compress(plan.layout.shape, plan.sides))])
            size = most * p.state[EXP_AVG].element_size()
            if chunks[-1] and loads[plan.compute_rank] + size > most_bytes:
                chunks.append([])
                loads.clear()
            loads[plan.compute_rank] += size
            chunks[-1].append((p, i))
        yield chunks


@dataclass(frozen=True, eq=False)
class EqualMatrices:
    """Stacked equal matrices of a chunk, by compute rank."""

    members: Chunk
    settings: Mapping[str, Any]  # of their group
    first: bool  # whether this step makes their factors
    moves: bool  # whether there is an update; without, the gradients make the factors alone
    own: slice  # those that this rank computes
    spread: Spread | None  # as what they are exchanged; None where nothing is
    accepted: Tensor  # of each, with as many dimensions as a stack has
    gradients: list[Tensor]  # this rank's shards, which may be copies
    weights: list[Tensor]
    moments: list[list[Tensor]]  # the first moments, and more if there are more

    @property
    def decay(self) -> Scalar:
        """The part of the weights that a step takes away."""
        method = self.settings.get("weight_decay_method", "decoupled")
        return decay_power(self.settings["lr"], method) * self.settings["weight_decay"]

    @property
    def held(self) -> bool:
        """Whether they keep their norms; vectors do not."""
        return self.settings["weight_norm"] == "hold" and self.members[0][0].parameter.ndim > 1


def split(chunk: Chunk, engine: Engine) -> list[EqualMatrices]:
    """Stack a chunk's equal matrices with their local shards."""
    kinds: dict[Hashable, Chunk] = {}
    for p, i in sorted(chunk, key=lambda member: member[0].plans[member[1]].compute_rank or 0):
        kinds.setdefault(p.kinds[i], []).append((p, i))
    shards = {p: [engine.split([p.index], [x]) for x in (*p.written, p.gradient)] for p in dict(chunk)}
    equal = []
    for members in kinds.values():
        (p, i), ranks = members[0], [q.plans[j].compute_rank for q, j in members]
        plan, rank = p.plans[i], p.plans[i].layout.rank
        moves = not (p.first and plan.cost and p.rests)
        numbers = [] if ranks[0] is None else [ranks.count(compute_rank) for compute_rank in range(plan.layout.ranks)]
        own = slice(sum(numbers[:rank]), sum(numbers[: rank + 1]) if numbers else None)
        spread = Spread(engine.matrices[p.index][i], numbers) if plan.gathered else None
        weights, *moments, gradients = ([shards[q][n][j] for q, j in members] for n in range(2 + len(p.moments)))
        accepted = torch.stack([q.accepted for q, _ in members]).view(-1, *[1] * weights[0].ndim)
        tensors = gradients, weights, moments
        equal.append(EqualMatrices(members, p.settings, p.first, moves, own, spread, accepted, *tensors))
    return equal


def merge(matrices: Sequence[EqualMatrices], engine: Engine) -> None:
    """Write shards that are copies back to weights and moments."""
    written: dict[ParameterStep, dict[int, list[Tensor]]] = {}
    for equal in matrices:
        for (p, i), *of_one in zip(equal.members, equal.weights, *equal.moments, strict=True):
            written.setdefault(p, {})[i] = of_one
    for p, of_matrices in written.items():
        for n, x in enumerate(p.written):
            new = {i: of_one[n] for i, of_one in of_matrices.items()}
            memory = {x.untyped_storage().data_ptr() for x in new.values() if x.numel()}
            if memory - {x.untyped_storage().data_ptr()}:
                if len(new) < len(p.plans):  # other chunks have the rest
                    new = dict(enumerate(engine.split([p.index], [x]))) | new
                x.copy_(engine.merge([p.index], [new[i] for i in range(len(p.plans))])[0])
