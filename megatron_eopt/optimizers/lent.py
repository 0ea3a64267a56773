"""Whole matrices that a team orthogonalizes: see :mod:`megatron_eopt.parallel.teams`.

Their parameters, state and gradients stay with one rank. A step begins with the exchange, on every rank of the team,
whatever it has to step: so none waits for another.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.collectives import values_of
from megatron_eopt.parallel.engine import Engine, Spread
from megatron_eopt.parallel.explain import explain
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.records import Matrix, Shape, whole
from megatron_eopt.parallel.scheduler import Program, resume
from megatron_eopt.parallel.teams import TEAM, cut_over, mode_of_team, shared_by
from megatron_eopt.parallel.workspace import Workspace


def _no_program(indices: Sequence[int]) -> Program:
    raise AssertionError("a rank without parameters steps none")


@dataclass(frozen=True)
class TeamPlan:
    """What a team does in a step, the same on all of its ranks."""

    engine: Engine  # of all lent matrices, cut over the team
    spread: list[Spread]  # of each of them: whose it is
    dtype: torch.dtype  # in which they are handed over
    own: dict[int, list[int]]  # of this rank's lent parameters the indices of their matrices here
    of: object  # the settings that it was made for

    def factors(self, matrices: list[Tensor]) -> list[Tensor]:
        """The factors of this rank's matrices; empties the list; all ranks of the team call it together."""
        engine, mine = self.engine, set(chain(*self.own.values()))
        none = [torch.empty(0, *each.matrix.shape, dtype=self.dtype, device=engine.device) for each in self.spread]
        stacks = [[matrices.pop(0)[None]] if i in mine else [empty] for i, empty in enumerate(none)]
        sending = engine.scatter_back(stacks, self.spread)
        next(sending)
        stacks.clear()
        shards = [x[0] for (x,) in _finished(sending)]
        factors = engine.factors(range(len(shards)), shards)
        back = _finished(engine.gather_whole([[x[None]] for x in factors], self.spread))
        return [x[0] for i, (x,) in enumerate(back) if i in mine]


@dataclass(frozen=True)
class Team:
    """Ranks of a node, and the parameters that they orthogonalize together."""

    group: ProcessGroup
    names: frozenset[str]  # of the parameters, whichever of the ranks has them
    device: torch.device

    def plan(self, optimizer: Any) -> TeamPlan:
        """The team's plan, made by all of its ranks together where settings are new."""
        plans = optimizer._session.plans
        # a rank with parameters has looked already
        wanted = plans.engine_of if optimizer._parameters() else optimizer._planned_settings()
        if plans.team is None or plans.team.of != wanted:
            plans.team = self._planned(optimizer, wanted)
        return plans.team

    def _planned(self, optimizer: Any, wanted: object) -> TeamPlan:
        parameters, names = optimizer._parameters(), optimizer._names()
        lent = [i for i, name in enumerate(names) if name in self.names]
        specs = {i: optimizer._described(names[i], parameters[i]) for i in lent}
        facts = [[(m.name, m.shape, spec.dtype, spec.iteration) for m, _ in spec.matrices()] for spec in specs.values()]
        kernel = optimizer.engine.kernel if lent else None
        ranks, this_rank = range(self.group.size()), self.group.rank()
        told = values_of(ranks, (list(chain(*facts)), kernel), self.group)

        def spec_of(name: str, shape: Shape, dtype: torch.dtype, iteration: Any) -> ParamSpec:
            matrix = cut_over(Matrix(name, shape, (whole(shape),)), len(ranks))
            layout = Layout(shape, matrix.rectangles, self.group, TEAM)
            return ParamSpec(name, iteration.sent_dtype(dtype), layout, iteration=iteration)

        all_specs = [spec_of(*fact) for of_rank, _ in told for fact in of_rank]
        workspace = Workspace(bytes=optimizer.workspace)
        engine = Engine(all_specs, self.device, mode_of_team(optimizer.tp_mode), workspace=workspace)
        engine.prepare(kept=next((kernel for _, kernel in told if kernel is not None), None))
        owners = [rank for rank, (of_rank, _) in enumerate(told) for _ in of_rank]
        spread = [
            Spread(matrix, [int(rank == owner) for rank in ranks])
            for owner, (matrix,) in zip(owners, engine.matrices, strict=True)
        ]
        remaining = iter([i for i, owner in enumerate(owners) if owner == this_rank])
        own = {i: [next(remaining) for _ in of_parameter] for i, of_parameter in zip(lent, facts, strict=True)}
        dtype = reduce(torch.promote_types, [spec.dtype for spec in all_specs])
        return TeamPlan(engine, spread, dtype, own, wanted)

    @torch.no_grad()
    def step(
        self, optimizer: Any, indices: Sequence[int] = (), program: Callable[[Sequence[int]], Program] = _no_program
    ) -> list[int]:
        """Step lent parameters among ``indices``; returns the others.

        A rank that has none, or steps none, sends zeros of what is its, and works on what others send.
        """
        plan = self.plan(optimizer)
        plan.engine.watched = optimizer._session.watched
        running, matrices = list[tuple[Program, list[int], list[torch.dtype] | None]](), dict[int, Tensor]()
        for i in (i for i in plan.own if i in indices):
            at, one = plan.own[i], program([i])
            shards, dtypes = next(one), None
            if callable(shards):
                updates = [self._room(plan, n) for n in at]
                shards(updates)
            else:
                updates, dtypes = [x.to(plan.dtype) for x in shards], [x.dtype for x in shards]
                shards.clear()
            matrices |= zip(at, updates, strict=True)
            running.append((one, at, dtypes))
        mine = list(chain(*plan.own.values()))
        sent = [matrices[n] if n in matrices else self._room(plan, n).zero_() for n in mine]
        matrices.clear()
        factors = dict(zip(mine, plan.factors(sent), strict=True))
        for one, at, dtypes in running:
            of_one = [factors.pop(n) for n in at]
            resume(one, of_one if dtypes is None else [x.to(d) for x, d in zip(of_one, dtypes, strict=True)])
        return [i for i in indices if i not in plan.own]

    def schemes(self, optimizer: Any) -> dict[str, str]:
        """How matrices of this rank are orthogonalized, by name."""
        plan = self.plan(optimizer).engine.plan
        size = self.group.size()
        of_all = {i: f"{b.scheme.replace('_', ' ')} over {size} of a node" for b in plan.buckets for i in b.matrices}
        return {plan.matrices[i].name: scheme for i, scheme in of_all.items()}

    def explain(self, optimizer: Any) -> str:
        """The plan of a rank's matrices, and of those of its team; all ranks ask."""
        plan, alone = self.plan(optimizer), optimizer.engine
        owners = [each.numbers.index(1) for each in plan.spread]
        shared = shared_by([each.matrix for each in plan.spread], owners, self.group.rank())
        works, rates, workspace = alone.works | plan.engine.works, plan.engine.rates, alone.workspace
        together = shared.plan(alone.plan.matrices, mode_of_team(optimizer.tp_mode), works, rates, workspace)
        return f"{explain(together, works, rates, workspace)}\n{shared.explain(rates)}"

    def _room(self, plan: TeamPlan, number: int) -> Tensor:
        return torch.empty(plan.spread[number].matrix.shape, dtype=plan.dtype, device=self.device)


def _finished(exchange: Generator[None, None, list[list[Tensor]]]) -> list[list[Tensor]]:
    while True:
        try:
            next(exchange)
        except StopIteration as done:
            found: list[list[Tensor]] = done.value
            return found
