"""Optimizers that step stacks, and deal the matrices that they need whole to ranks.

A chunk of bounded size steps at a time. Where an optimizer needs whole matrices, shards of cut ones go to their compute
ranks, which alone have the further state of a matrix, and come back, by one collective of the chunk each way, or one
for each copy of what several ranks have.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.exchange_cost import Exchange, Side, SideSum, brought, handed_out, summed
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import grouped
from megatron_eopt.parallel.scheduler import Program, rounds
from megatron_eopt.parallel.workspace import IN_FLIGHT
from megatron_eopt.settings.modifiers import RADIUS, GroupModifiers
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.exchange_table import Alike, Kind, exchange_table
from megatron_eopt.step.foreach import where
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import DescribedMatrix, check_matrix, check_shard, names_of_last
from megatron_eopt.step.stacks import (
    WEIGHT,
    Chunk,
    Inputs,
    MatrixPlan,
    Member,
    Rule,
    Stack,
    gradients_of,
    joined,
    lockstep,
    matrices_of,
    shards_of,
    wide,
)
from megatron_eopt.step.state import EXP_AVG
from megatron_eopt.step.weight_step import on_spheres, squares_and_products

CLOCK = "clock"  # setting of a group: its steps so far, by which factors are worked on again

MOST_STACK_BYTES = 2**28  # of a stack of equal matrices, and of what is gathered at once, where one is not larger

Loads = Counter[int | str | None]  # bytes by compute rank, and under ALL_RANKS those of every rank
ALL_RANKS = "held"


class StackedOptimizer(BaseOptimizer):
    """Optimizers that step equal logical matrices as stacks.

    A subclass makes the update of a stack (:meth:`update`). Where that gathers whole matrices, these are dealt to
    compute ranks by costs, which follow from the setting ``max_dim`` of groups, the longest side that has a factor.
    """

    takes: ClassVar[Literal["matrices", "matrices and vectors"]] = "matrices"
    # What a rule exchanges of each matrix in a step that moves weights:
    gathered: ClassVar[int] = 0  # tensors that it gathers
    scattered: ClassVar[int] = 0  # tensors that it scatters

    _plans: dict[Tensor, list[MatrixPlan]] | None = None
    _updated: int = 0

    def update(self, stack: Stack) -> Rule:
        """An optimizer's algorithm; None while it makes factors alone."""
        raise NotImplementedError

    def _side_sums(self, plan: MatrixPlan, parameter: Tensor) -> Sequence[Side]:
        """What a rule sums over ranks for rows and columns of each matrix, in its order."""
        return ()

    @property
    def matrices_updated(self) -> int:
        """Also counts matrices without a factor."""
        return self._updated

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter that is no vector."""
        described: dict[Tensor, list[DescribedMatrix]] = {}
        for parameter in self._parameters():
            if parameter.ndim > 1:
                pairs = zip(self.named_layouts(parameter), self._planned(parameter), strict=True)
                described[parameter] = [self._describe(name, plan, parameter) for (name, _), plan in pairs]
        return described

    def named_layouts(self, parameter: Tensor) -> Iterator[tuple[str, Layout]]:
        """The logical matrices of a parameter: what each is called, and its layout."""
        names = self.split_of(parameter).names(self.layout(parameter).shape[0])
        return zip(names, self.matrix_layouts(parameter), strict=True)

    def _describe(self, name: str, plan: MatrixPlan, parameter: Tensor) -> DescribedMatrix:
        if plan.layout.sharded:
            scheme = "duplicated" if plan.compute_rank is None else "owner"
        else:
            scheme = "local" if plan.compute_rank is None else "share"
        return DescribedMatrix(name, plan.layout.shape, scheme, 1.0, None)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse parameters of the last group, and begin its clock."""
        name = type(self).__name__
        names = names_of_last(self.param_groups)
        indices = names_of_last(self.param_groups, shapes=False)
        for parameter, called, index in zip(group["params"], names, indices, strict=True):
            is_matrix = parameter.ndim > 1 or self.takes == "matrices"
            if is_matrix:
                check_matrix(name, parameter, f"takes {self.takes}, but {index}")
            self.layout(parameter)
            if is_matrix:
                self._check_split(parameter)
                check_shard(parameter, self.pg_collection, called)
        if CLOCK in self.persistent_group_keys:
            group.setdefault(CLOCK, 0)

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        spec = super()._described(name, parameter)
        return replace(spec, dtype=wide(parameter), layout=self.layout(parameter), split=self.split_of(parameter))

    def _plan(self, end: str, layout: Layout, longest: int) -> MatrixPlan:
        """The plan of a matrix, whose sides have a factor up to a length."""
        rows, cols = layout.shape
        has_factor = (0 < rows <= longest and cols > 0, 0 < cols <= longest and rows > 0)
        plan = MatrixPlan(end, layout, has_factor, 0)
        for length in plan.factor_lengths:
            plan.cost += 4 * length * (length**2 + rows * cols)  # cubes of sides, and products with them
        return plan

    def _planned(self, parameter: Tensor) -> list[MatrixPlan]:
        """Plans of a parameter's matrices; a new group changes no other's compute ranks."""
        if self._plans is not None and parameter in self._plans:
            return self._plans[parameter]
        self._plans = {}
        loads: dict[str, list[int]] = {}
        for group in self.param_groups:
            to_deal = list[MatrixPlan]()
            for p in group["params"]:
                longest = group.get("max_dim", 0) if p.ndim > 1 else 0
                pairs = zip(self.key_ends(p), self.matrix_layouts(p), strict=True)
                plans = [self._plan(end, layout, longest) for end, layout in pairs]
                self._plans[p] = plans
                if not isinstance(p, DTensor):
                    to_deal += [plan for plan in plans if plan.gathered]
            for plan in sorted(to_deal, key=lambda plan: -plan.cost):
                load = loads.setdefault(plan.layout.label, [0] * plan.layout.ranks)
                plan.compute_rank = load.index(min(load))
                load[plan.compute_rank] += plan.cost
        return self._plans[parameter]

    def proposed(self) -> Engine:
        """Also deals matrices anew: a setting may have changed."""
        self._plans = None
        return super().proposed()

    def skips_first_update(self, group: Mapping[str, Any]) -> bool:
        """Whether the first gradient makes factors alone."""
        return False

    def _advances_clock(self, group: Mapping[str, Any]) -> bool:
        """Whether the step counts for the clock of a group."""
        return True

    def _steps_of(self, ok: Flag) -> dict[int, bool]:
        """Which parameters step, by their indices, and whether factors of theirs are to be made.

        Creates what their state lacks.
        """
        return dict.fromkeys(self._begin_state(), False)

    def _together(self, parameter: Tensor) -> tuple[Any, ...]:
        """What parameters of one chunk have in common; chunks go in this order."""
        return self._planned(parameter)[0].layout.label, str(parameter.dtype)

    def _entries(self, plan: MatrixPlan) -> int:
        """How many a matrix takes in a chunk on its compute rank."""
        if not plan.cost:
            return max(shard.numel for shard in plan.layout.rectangles)
        # gradient and moments come together; a factor may be larger
        return max([3 * plan.arriving, *(length**2 for length in plan.factor_lengths)])

    def _loads(self, members: Sequence[Member]) -> Loads:
        """Bytes of matrices in a chunk."""
        loads = Loads()
        for member in members:
            itemsize = wide(member.parameter).itemsize
            plan = member.plan
            assert plan is not None, "matrices are dealt"
            loads[plan.compute_rank] += itemsize * self._entries(plan)
            # on every rank: shards, before and after the compute rank has a matrix whole, and sums of a whole side
            held = itemsize * max(shard.numel for shard in plan.layout.rectangles)
            sums = [side.bytes_of(plan.layout.shape) for side in self._summed(plan, member.parameter)]
            loads[ALL_RANKS] += 3 * (held + max(sums, default=0))
        return loads

    def _fits(self, loads: Loads) -> bool:
        """Whether a chunk has room for them."""
        # where each rank holds a copy of each matrix, all copies of a chunk are there at once
        return all(
            load <= (self.execution.workspace // IN_FLIGHT if key == ALL_RANKS else MOST_STACK_BYTES)
            for key, load in loads.items()
        )

    def _in_chunks(self, members: Sequence[Member]) -> list[list[list[Member]]]:
        """Matrices by chunks of bounded size, listed by what goes together."""
        together = grouped(members, lambda member: self._together(member.parameter))
        listed = []
        for _, some in sorted(together.items()):
            chunks: list[list[Member]] = [[]]
            loads = Loads()
            for alike in grouped(some, lambda member: member.kind).values():
                units = [(alike, self._loads(alike))]
                if not self._fits(units[0][1]):  # where it has room it is not cut, for half the launches
                    units = [([member], self._loads([member])) for member in alike]
                for unit, of_unit in units:
                    if chunks[-1] and not self._fits(loads + of_unit):
                        chunks.append([])
                        loads.clear()
                    loads += of_unit
                    chunks[-1] += unit
            listed.append(chunks)
        return listed

    def _members(self, steps: Iterable[int], first: Set[int]) -> list[Member]:
        """The matrices of parameters that step; of those in ``first`` factors are to be made."""
        steps = set(steps)
        members = []
        index = 0
        for group, of_group in enumerate(self.param_groups):
            for p in of_group["params"]:
                if index in steps:
                    of_parameter = group, index in first, p.dtype, min(p.ndim, 2)
                    for number, plan in enumerate(self._planned(p)):
                        kind = of_parameter, plan.has_factor, plan.layout.shape, plan.layout.rectangles
                        members.append(Member(p, group, index, number, plan.end, kind, plan))
                index += 1
        return members

    def _chunks(self, steps: Mapping[int, bool], ok: Flag) -> list[list[Chunk[Stack]]]:
        """Chunks of stacks in a step, made anew where other parameters step."""
        settled = self._session.settled
        first = {index for index, begins in steps.items() if begins}
        if len(first) == len(steps):
            first = set()  # which are alike, too
        made_for = tuple(steps), frozenset(first)
        make = partial(self._make_chunks, self.engine, settled.modifiers, steps, first)
        chunks: list[list[Chunk[Stack]]] = settled.chunks_for(made_for, make)
        inputs = Inputs(self.param_groups, gradients_of(self._parameters(), steps), ok)
        for chunk in chain(*chunks):
            chunk.begin(inputs)
            for stack in chunk.stacks:
                stack.first = steps[stack.members[0].index]
                stack.moves = not (stack.first and any(stack.has_factor) and self.skips_first_update(stack.group))
        return chunks

    def _make_chunks(
        self, engine: Engine, modifiers: Sequence[GroupModifiers], steps: Iterable[int], first: Set[int]
    ) -> list[list[Chunk[Stack]]]:
        listed = self._in_chunks(self._members(steps, first))
        return [[Chunk(self, engine, members, modifiers, Stack) for members in together] for together in listed]

    def plan(self) -> str:
        """What a step exchanges, a table; before ranks agree."""
        listed = self._proposed_chunks()
        stacks = []
        for stack in chain(*(chunk.stacks for chunk in chain(*listed))):
            if stack.members[0].parameter.ndim > 1:
                stacks.append(self._alike(stack))
        return exchange_table(stacks, [[self.exchanges(chunk.stacks) for chunk in together] for together in listed])

    def _proposed_chunks(self) -> list[list[Chunk[Stack]]]:
        """Chunks of a step of all parameters."""
        engine = self.proposed()
        modifiers = list(map(self.modifiers_of, self.param_groups))
        return self._make_chunks(engine, modifiers, range(len(self._parameters())), set())

    def _alike(self, stack: Stack) -> Alike:
        first = stack.members[0]
        assert first.plan is not None, "matrices are dealt"
        described = self._describe("", first.plan, first.parameter)
        kind = Kind(described.shape, stack.matrix.group or "-", described.scheme)
        return Alike(kind, len(stack.members), self.exchanges([stack]))

    def exchanges(self, stacks: Sequence[Stack]) -> list[Exchange]:
        """What stacks of a chunk exchange in a step that moves weights.

        Numbers by which ranks agree are not in it, nor are norms that weights keep.
        """
        found = list[Exchange]()
        spread = [stack.spread for stack in stacks if stack.spread is not None]
        if spread:
            found += brought([(each, self.gathered) for each in spread])
            found += handed_out([(each, self.scattered) for each in spread])
        sums = []
        for stack in stacks:
            first = stack.members[0]
            assert first.plan is not None, "matrices are dealt"
            sides = self._summed(first.plan, first.parameter)
            sums.append([SideSum(stack.matrix, len(stack.members), side) for side in sides])
        return found + summed(sums)

    def _summed(self, plan: MatrixPlan, parameter: Tensor) -> Sequence[Side]:
        """The sides that ranks sum; none of a matrix that each has whole."""
        return self._side_sums(plan, parameter) if plan.layout.sharded else ()

    def _take(self, ok: Flag) -> None:
        steps = self._steps_of(ok)
        self._session.changing = True
        for group in self.param_groups:
            if CLOCK in group:
                group[CLOCK] += self._advances_clock(group)
        chunks = self._chunks(steps, ok)
        self._run(chunks)
        for chunk in chain(*chunks):
            self._updated += sum(len(stack.members) for stack in chunk.stacks if stack.ndim > 2)

    def _run(self, chunks: Sequence[Sequence[Chunk[Stack]]]) -> None:
        """Step chunks of stacks."""
        for together in chunks:
            for _ in rounds(map(self._worked, together)):
                pass

    def _worked(self, chunk: Chunk[Stack]) -> Program:
        """One chunk's step."""
        made = yield from lockstep([(stack, self.update(stack)) for stack in chunk.stacks])
        updates = {stack: update for stack, update in made.items() if update is not None}
        subtract(updates, chunk.engine)  # W <- (1 - lr weight_decay) W - lr U
        chunk.end()


def first_moment(stack: Stack, beta: float) -> tuple[Tensor, Tensor]:
    """Gradients as a stack, zero if not ``ok``, and first moments that follow them."""
    gradient = stack.gradient
    momentum = stack.state(EXP_AVG)
    if stack.moves:
        momentum = torch.lerp(momentum, where(stack.ok, gradient, momentum), 1 - beta)
        stack.keep(EXP_AVG, momentum)
    return gradient, momentum


def refreshes(settings: Mapping[str, Any]) -> bool:
    """Whether factors are worked on again in this step, counted from the first as SOAP's authors do."""
    return bool((settings[CLOCK] - 1) % settings["precondition_frequency"] == 0)


def subtract(updates: Mapping[Stack, Tensor], engine: Engine) -> None:
    """Subtract updates of stacks from their weights."""
    held = [(stack, update) for stack, update in updates.items() if stack.modifiers.holds and stack.ndim > 2]
    on_spheres = steps_on_spheres(held, engine) if held else {}
    for stack, update in updates.items():
        weights = stack.state(WEIGHT)
        moved = weights.to(update.dtype) * (1 - stack.decay)
        if stack in on_spheres:
            moves, step, resize = on_spheres[stack]
            moved = (moved - update * step.to(update.dtype)) * resize.to(update.dtype)
            moved = torch.where(moves > 0, moved, weights.to(moved.dtype))
        else:
            moved = moved - update * stack.group["lr"]
        stack.keep(WEIGHT, where(stack.ok, moved.to(weights.dtype), weights))


def steps_on_spheres(held: Sequence[tuple[Stack, Tensor]], engine: Engine) -> dict[Stack, tuple[Tensor, ...]]:
    """Coefficients of updates that hold norms, by one reduction; the weights decay before."""
    stacks = [stack for stack, _ in held]
    updates = joined(update.unbind() for _, update in held)
    squares, inner = squares_and_products(engine, matrices_of(stacks), shards_of(stacks, WEIGHT), updates)
    counts = [len(stack.members) for stack in stacks]
    of_stacks = zip(held, squares.split(counts, 1), inner.split(counts), strict=True)
    steps = {}
    for (stack, _), (of_weights, of_updates), products in of_stacks:
        kept = 1 - stack.decay
        radii = torch.stack(stack.of_each(RADIUS))
        measured = torch.stack([of_weights * kept**2, of_updates])
        coefficients = on_spheres(measured, products * kept, radii, radii * stack.group["lr"])
        steps[stack] = tuple(x.view(-1, 1, 1) for x in coefficients.unbind(1))
    return steps
