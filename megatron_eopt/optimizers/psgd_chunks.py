"""PSGD-Kron's chunks of equal matrices and their compute ranks."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers.factored_chunks import MOST_BYTES
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.parallel.engine import Engine, Spread
from megatron_eopt.parallel.layout import Layout

EXP_AVG = "exp_avg"
FACTORS, BOUNDS = ("Q_L", "Q_R"), "bounds"  # of each logical matrix


class Planned:
    """How a logical matrix is worked on."""

    def __init__(self, end: str, layout: Layout, longest: int) -> None:
        self.layout = layout
        self.keys = [f"{key}{end}" for key in (*FACTORS, BOUNDS)]
        self.dense = [length <= longest for length in layout.shape]  # of which side the factor is a matrix
        numel = math.prod(layout.shape)
        self.gathered = numel > 0 and layout.ranks > 1  # whether a rank needs what others have of it
        sides = list(compress(layout.shape, self.dense))
        self.cost = numel + sum(n * (4 * n**2 + 4 * numel) for n in sides)  # up to a factor that is the same for all
        self.entries = max([3 * numel, *(n**2 for n in sides)])
        self.compute_rank: int | None = None  # the one of its group that alone needs it


@dataclass(frozen=True, eq=False)
class ParameterStep:
    """A parameter in a step, alike on all sharing ranks."""

    index: int
    parameter: Tensor
    state: dict[str, Any]
    settings: Mapping[str, Any]
    accepted: Tensor  # if not, everything stays as it is
    plans: list[Planned]  # of each logical matrix

    @property
    def label(self) -> str:
        """The ranks that exchange its matrices; empty for none."""
        return next((plan.layout.label for plan in self.plans if plan.gathered), "")

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """What equal logical matrices have in common, for each."""
        ours = id(self.settings), self.parameter.dtype
        return tuple((*ours, *plan.dense, plan.layout.shape, plan.layout.rectangles) for plan in self.plans)

    @property
    def written(self) -> list[Tensor]:
        """The local weight and momentum."""
        return [local(self.parameter), local(self.state[EXP_AVG])]

    def split(self, engine: Engine) -> list[list[Tensor]]:
        """This rank's shards of weight, momentum and gradient."""
        x = self.parameter
        gradient = local(torch.zeros_like(x) if x.grad is None else x.grad)
        return [engine.split([self.index], [y]) for y in (*self.written, gradient)]

    def merge(self, engine: Engine, shards_of: Sequence[Sequence[Tensor]]) -> None:
        """Write shards of :meth:`split` back, if they are copies."""
        for x, shards in zip(self.written, shards_of, strict=False):
            if {y.untyped_storage().data_ptr() for y in shards if y.numel()} - {x.untyped_storage().data_ptr()}:
                x.copy_(engine.merge([self.index], shards)[0])


def chunks_of(steps: Sequence[ParameterStep]) -> Iterator[list[list[ParameterStep]]]:
    """Chunks of bounded size, listed by ranks and dtype."""
    by_label: dict[tuple[str, str], dict[Any, list[ParameterStep]]] = {}
    for p in steps:
        by_label.setdefault((p.label, str(p.parameter.dtype)), {}).setdefault(p.kinds, []).append(p)
    for _, alike in sorted(by_label.items()):
        chunks: list[list[ParameterStep]] = [[]]
        loads = Counter[int | None]()
        for p in chain(*alike.values()):
            more = Counter[int | None]()
            for plan in p.plans:
                more[plan.compute_rank] += plan.entries * p.state[EXP_AVG].element_size()
            if chunks[-1] and max((loads + more).values(), default=0) > MOST_BYTES:
                chunks.append([])
                loads.clear()
            loads += more
            chunks[-1].append(p)
        yield chunks


@dataclass(frozen=True, eq=False)
class EqualMatrices:
    """Stacked equal matrices of a chunk, by compute rank."""

    members: list[tuple[ParameterStep, Planned]]
    settings: Mapping[str, Any]  # of their group
    own: slice  # those that this rank computes
    spread: Spread | None  # as what they are exchanged; None where nothing is
    accepted: Tensor  # of each, (n x 1 x 1)
    weights: list[Tensor]  # this rank's shards, which may be copies
    momenta: list[Tensor]
    gradients: list[Tensor]


def equal_matrices(shards: Mapping[ParameterStep, list[list[Tensor]]], engine: Engine) -> list[EqualMatrices]:
    """Stack a chunk's equal matrices with their local shards."""
    kinds: dict[Any, list[tuple[ParameterStep, int]]] = {}
    pairs = [(p, i) for p in shards for i in range(len(p.plans))]
    for p, i in sorted(pairs, key=lambda pair: pair[0].plans[pair[1]].compute_rank or 0):
        kinds.setdefault(p.kinds[i], []).append((p, i))
    equal = []
    for members in kinds.values():
        (p, i), ranks = members[0], [q.plans[j].compute_rank for q, j in members]
        plan, rank = p.plans[i], p.plans[i].layout.rank
        numbers = [] if ranks[0] is None else [ranks.count(compute_rank) for compute_rank in range(plan.layout.ranks)]
        own = slice(sum(numbers[:rank]), sum(numbers[: rank + 1]) if numbers else None)
        spread = Spread(engine.matrices[p.index][i], numbers) if plan.gathered else None
        tensors = [[shards[q][n][j] for q, j in members] for n in range(3)]
        accepted = torch.stack([q.accepted for q, _ in members]).view(-1, 1, 1)
        planned = [(q, q.plans[j]) for q, j in members]
        equal.append(EqualMatrices(planned, p.settings, own, spread, accepted, *tensors))
    return equal
