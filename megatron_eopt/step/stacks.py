"""Optimizers that step equal logical matrices as stacks.

A chunk of bounded size steps at a time. Where an optimizer needs whole matrices, shards of cut ones go to their compute
ranks, which alone have the further state of a matrix, and come back, by one collective of the chunk each way.
"""

from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, compress
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.exchange import Spread
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import Matrix, grouped
from megatron_eopt.parallel.scheduler import rounds
from megatron_eopt.parallel.workspace import IN_FLIGHT
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.foreach import decay_power, stacked, where
from megatron_eopt.step.modifiers import RADIUS
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import (
    DescribedMatrix,
    check_matrix,
    check_shard,
    local,
    names_of_last,
)
from megatron_eopt.step.weight_step import on_spheres, squares_and_products

CLOCK = "clock"  # setting of a group: steps of the optimizer so far, by which factors are worked on again
EXP_AVG = "exp_avg"
WEIGHT = "weight"
GRADIENT = "gradient"

MOST_BYTES = 2**28  # of a stack of equal matrices, and of what is gathered at once, where one is not larger

Program = Generator[None, None, None]


class Request(NamedTuple):
    """What a rule waits for."""

    verb: Literal["gather", "scatter", "sum rows", "sum columns"]
    tensors: list[Tensor]


Rule = Generator[Request, list[Tensor], Tensor | None]
"""Makes the update of a stack, before the rate, and changes its state. It yields where ranks wait for each other."""

Loads = Counter[int | str | None]  # bytes by compute rank, and under ALL_RANKS those of every rank
ALL_RANKS = "held"


@dataclass(eq=False)
class MatrixPlan:
    """How a logical matrix is worked on."""

    end: str  # of its state keys
    layout: Layout
    has_factor: tuple[bool, bool]  # of the rows, and of the columns
    cost: int  # of a step, up to a factor that is the same for all
    compute_rank: int | None = None  # the one of its group that alone needs it whole

    @property
    def gathered(self) -> bool:
        """Whether a rank needs what others have of it."""
        return self.cost > 0 and self.layout.ranks > 1

    @property
    def factor_lengths(self) -> list[int]:
        """Lengths of the sides that have a factor."""
        return list(compress(self.layout.shape, self.has_factor))


@dataclass(frozen=True, eq=False)
class Member:
    """A logical matrix of a stack."""

    parameter: Tensor
    index: int  # of the parameter
    number: int  # among the matrices of the parameter
    plan: MatrixPlan
    kind: Hashable  # what those of a stack have in common


class Stack:
    """Equal logical matrices of one group in a chunk, in the order of their compute ranks.

    A step reads and writes by key: the weight, the gradient and state that lies as these of all members, and what else
    is kept of each of its own members.

    Attributes:
        matrix: one of them, as the engine has it.
        has_factor: whether rows have a factor, and columns.
        numbers: how many each compute rank has; empty where every rank works on all.
        own: those that this rank works on.
        spread: as what they are exchanged; None where nothing is.
        ndim: of a stack of shards: 3, or 2 for vectors.
        dtype: to compute and keep state in.
        first: whether factors are zero before this step, but are to be made.
    """

    def __init__(self, chunk: "Chunk", members: Sequence[Member]) -> None:
        optimizer = chunk.optimizer
        self.chunk = chunk
        self.members = sorted(members, key=lambda member: member.plan.compute_rank or 0)
        index, number, plan = members[0].index, members[0].number, members[0].plan
        parameter = members[0].parameter
        self.group: Mapping[str, Any] = optimizer.group_of(parameter)
        self.matrix = chunk.engine.matrices[index][number]
        self.has_factor = plan.has_factor
        self.numbers: list[int] = []
        self.own = self.members
        if plan.compute_rank is not None:
            ranks = [member.plan.compute_rank for member in self.members]
            self.numbers = [ranks.count(rank) for rank in range(plan.layout.ranks)]
            self.own = [member for member in self.members if member.plan.compute_rank == plan.layout.rank]
        self.spread = Spread(self.matrix, self.numbers) if plan.gathered else None
        self.ndim = 2 if parameter.ndim < 2 else 3
        self.dtype = wide(parameter)
        self.first = False
        self.ok: Flag = None
        self.tensors: dict[str, list[Tensor]] = {}  # that a step has read, by key

    def setting(self, key: str, absent: Any) -> Any:
        """A setting of the group, or ``absent``: groups may have keys that are none of the optimizer's."""
        return self.group[key] if key in self.chunk.optimizer.defaults else absent

    @property
    def gradient(self) -> Tensor:
        """To be followed by what decreases a loss, zero if not ``ok``; may be a view."""
        gradient = self.state(GRADIENT).to(self.dtype)
        if self.setting("maximize", False):
            gradient = -gradient
        return where(self.ok, gradient, 0.0)

    @property
    def holds(self) -> bool:
        """Whether they keep their norms; vectors do not."""
        return self.setting("weight_norm", "none") == "hold" and self.ndim > 2

    @property
    def decay(self) -> Scalar:
        """The part of the weights that a step takes away."""
        method = self.setting("weight_decay_method", "decoupled")
        return decay_power(self.group["lr"], method) * self.group["weight_decay"]

    @property
    def moves(self) -> bool:
        """Whether there is an update; without, the gradients make the factors alone."""
        skips = self.first and any(self.has_factor) and self.chunk.optimizer.skips_first_update(self.group)
        return not skips

    def shards(self, key: str) -> list[Tensor]:
        """This rank's shards of the weight, gradient or state that lies as it; may be copies."""
        if key not in self.tensors:
            shards = self.chunk.shards(key)
            self.tensors[key] = [shards[member.index][member.number] for member in self.members]
        return self.tensors[key]

    def of_each(self, key: str, members: Sequence[Member]) -> list[Tensor]:
        """The state of single matrices, under a key that ends as theirs do."""
        if key not in self.tensors:
            state = self.chunk.optimizer.state
            self.tensors[key] = [local(state[member.parameter][key + member.plan.end]) for member in members]
        return self.tensors[key]

    def state(self, key: str) -> Tensor:
        """A stack of shards; of one, a view."""
        return stacked(self.shards(key))

    def keep(self, key: str, x: Tensor) -> None:
        """Write such a stack back."""
        torch._foreach_copy_(self.shards(key), list(x.unbind()))

    def owned(self, key: str) -> Tensor:
        """A stack of the state of each matrix that this rank computes; of one, a view."""
        return stacked(self.of_each(key, self.own))

    def keep_owned(self, key: str, x: Tensor) -> None:
        """Write such state back."""
        torch._foreach_copy_(self.of_each(key, self.own), list(x.unbind()))

    # Verbs of rules; what is whole here waits for nobody.

    def gather(self, *shards: Tensor) -> Generator[Request, list[Tensor], list[Tensor]]:
        """Own whole matrices, of shards of all members."""
        return list(shards) if self.spread is None else (yield Request("gather", list(shards)))

    def scatter(self, *whole: Tensor) -> Generator[Request, list[Tensor], list[Tensor]]:
        """The way back from :meth:`gather`."""
        return list(whole) if self.spread is None else (yield Request("scatter", list(whole)))

    def side_sums(self, x: Tensor, dim: int) -> Generator[Request, list[Tensor], Tensor]:
        """Sums over ranks of what they have for rows (dim 0) or columns (members x length x k), for the whole side."""
        if self.matrix.sharded:
            [x] = yield Request("sum columns" if dim else "sum rows", [x])
        return x


class Chunk:
    """Stacks that are worked on together."""

    def __init__(self, optimizer: "StackedOptimizer", members: Sequence[Member]) -> None:
        self.optimizer = optimizer
        self.engine = optimizer.engine
        self.stacks = [Stack(self, alike) for alike in grouped(members, lambda member: member.kind).values()]
        self._parameters = {member.index: member.parameter for member in members}
        self._numbers: dict[int, list[int]] = {}  # of the matrices of each parameter that are here
        for member in members:
            self._numbers.setdefault(member.index, []).append(member.number)
        self._shards: dict[str, dict[int, list[Tensor]]] = {}
        self._copies: list[tuple[int, Tensor, list[Tensor]]] = []  # parameter, what was copied, and the copies

    def shards(self, key: str) -> dict[int, list[Tensor]]:
        """This rank's shards of the logical matrices of each parameter, by its index."""
        if key not in self._shards:
            if key == WEIGHT:
                wholes = list(self._parameters.values())
            elif key == GRADIENT:
                wholes = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters.values()]
            else:
                wholes = [self.optimizer.state[p][key] for p in self._parameters.values()]
            wholes = [torch.atleast_1d(local(x)) for x in wholes]
            self._shards[key] = {}
            for index, x in zip(self._parameters, wholes, strict=True):
                shards = self.engine.split([index], [x])
                self._shards[key][index] = shards
                memory = {shard.untyped_storage().data_ptr() for shard in shards if shard.numel()}
                if key != GRADIENT and memory - {x.untyped_storage().data_ptr()}:
                    self._copies.append((index, x, shards))
        return self._shards[key]

    def end(self) -> None:
        """Write shards that are copies back."""
        for index, x, shards in self._copies:
            here = self._numbers[index]
            if len(here) < len(shards):  # other chunks have the rest
                fresh = self.engine.split([index], [x])
                for number in here:
                    fresh[number] = shards[number]
                shards = fresh
            [merged] = self.engine.merge([index], shards)
            x.copy_(merged.view(x.shape))
        self.forget()

    def forget(self) -> None:
        """Drop what a step has read."""
        self._shards.clear()
        self._copies.clear()
        for stack in self.stacks:
            stack.tensors.clear()


class StackedOptimizer(BaseOptimizer):
    """Optimizers that step equal logical matrices as stacks.

    A subclass makes the update of a stack (:meth:`update`). Where that gathers whole matrices, these are dealt to
    compute ranks by costs, which follow from the setting ``max_dim`` of groups, the longest side that has a factor.
    """

    takes: ClassVar[Literal["matrices", "matrices and vectors"]] = "matrices"

    _plans: dict[Tensor, list[MatrixPlan]] | None = None
    _updated: int = 0

    def update(self, stack: Stack) -> Rule:
        """An optimizer's algorithm; None while it makes factors alone."""
        raise NotImplementedError

    @property
    def matrices_updated(self) -> int:
        """Also counts matrices without a factor."""
        return self._updated

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter that is no vector."""
        described: dict[Tensor, list[DescribedMatrix]] = {}
        for parameter in self._parameters():
            if parameter.ndim > 1:
                names = self.split_of(parameter).names(self.layout(parameter).shape[0])
                pairs = zip(names, self._planned(parameter), strict=True)
                described[parameter] = [self._describe(name, plan, parameter) for name, plan in pairs]
        return described

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
        settled = self._session.settled
        parameters = self._parameters()
        if settled.state_keys is None:
            settled.state_keys = [[tensor.key for tensor in self.state_tensors(p)] for p in parameters]
        steps = {i: False for i, has_gradient in enumerate(self._stepping) if has_gradient}
        for i in steps:
            if not self.state[parameters[i]].keys() >= set(settled.state_keys[i]):
                self._states.of(parameters[i])
        return steps

    def _together(self, parameter: Tensor) -> tuple[Any, ...]:
        """What parameters of one chunk have in common; chunks go in this order."""
        return self._planned(parameter)[0].layout.label, str(parameter.dtype)

    def _entries(self, plan: MatrixPlan) -> int:
        """How many a matrix takes in a chunk on its compute rank."""
        if not plan.cost:
            return max(shard.numel for shard in plan.layout.rectangles)
        # gradient and moments come together; a factor may be larger
        return max([3 * prod(plan.layout.shape), *(length**2 for length in plan.factor_lengths)])

    def _loads(self, members: Sequence[Member]) -> Loads:
        """Bytes of matrices in a chunk."""
        loads = Loads()
        for member in members:
            itemsize = wide(member.parameter).itemsize
            loads[member.plan.compute_rank] += itemsize * self._entries(member.plan)
            # shards are on every rank, before and after the compute rank has a matrix whole
            loads[ALL_RANKS] += itemsize * 3 * max(shard.numel for shard in member.plan.layout.rectangles)
        return loads

    def _fits(self, loads: Loads) -> bool:
        """Whether a chunk has room for them."""
        # where each rank holds a copy of each matrix, all copies of a chunk are there at once
        return all(
            load <= (self.execution.workspace // IN_FLIGHT if key == ALL_RANKS else MOST_BYTES)
            for key, load in loads.items()
        )

    def _divided(self, members: Sequence[Member]) -> list[list[list[Member]]]:
        """Matrices by chunks of bounded size, listed by what goes together."""
        together = grouped(members, lambda member: self._together(member.parameter))
        divided = []
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
            divided.append(chunks)
        return divided

    def _members(self, steps: Iterable[int], first: Set[int]) -> list[Member]:
        """The matrices of parameters that step; of those in ``first`` factors are to be made."""
        parameters = self._parameters()
        members = []
        for index in steps:
            p = parameters[index]
            of_parameter = id(self.group_of(p)), index in first, p.dtype, min(p.ndim, 2)
            for number, plan in enumerate(self._planned(p)):
                kind = of_parameter, plan.has_factor, plan.layout.shape, plan.layout.rectangles
                members.append(Member(p, index, number, plan, kind))
        return members

    def _chunks(self, steps: Mapping[int, bool], ok: Flag) -> list[list[Chunk]]:
        """Chunks of stacks in a step, made anew where other parameters step."""
        settled = self._session.settled
        first = {index for index, begins in steps.items() if begins}
        if len(first) == len(steps):
            first = set()  # which are alike, too
        made_for = list(steps), first, list(map(id, self.param_groups))
        if settled.chunks is None or settled.chunks[0] != made_for:
            divided = self._divided(self._members(steps, first))
            settled.chunks = made_for, [[Chunk(self, some) for some in chunks] for chunks in divided]
        for chunk in chain(*settled.chunks[1]):
            chunk.forget()  # what a step left that an exception ended
            for stack in chunk.stacks:
                stack.first = steps[stack.members[0].index]
                stack.ok = ok
        return settled.chunks[1]

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

    def _run(self, chunks: Sequence[Sequence[Chunk]]) -> None:
        """Step chunks of stacks."""
        for together in chunks:
            for _ in rounds(map(self._worked, together)):
                pass

    def _worked(self, chunk: Chunk) -> Program:
        """One chunk's step; of all its stacks one collective does what they ask for together."""
        updates: dict[Stack, Tensor] = {}
        running: list[tuple[Stack, Rule, Any]] = [(stack, self.update(stack), None) for stack in chunk.stacks]
        while running:
            asked: dict[str, list[tuple[Stack, Rule, list[Tensor]]]] = {}
            for stack, rule, answer in running:
                try:
                    request = rule.send(answer)
                except StopIteration as end:
                    if end.value is not None:
                        updates[stack] = end.value
                    continue
                asked.setdefault(request.verb, []).append((stack, rule, request.tensors))
            running = []
            for verb, some in sorted(asked.items()):
                answers = yield from serve(verb, some, chunk.engine)
                running += [(stack, rule, answer) for (stack, rule, _), answer in zip(some, answers, strict=True)]
        subtract(updates, chunk.engine)  # W <- (1 - lr weight_decay) W - lr U
        chunk.end()


def serve(
    verb: str, asked: Sequence[tuple[Stack, Rule, list[Tensor]]], engine: Engine
) -> Generator[None, None, Sequence[list[Tensor]]]:
    """What all that ask with one verb wait for."""
    tensors = [of_stack for _, _, of_stack in asked]
    spread = [stack.spread for stack, _, _ in asked]
    if verb == "gather":
        return (yield from engine.gather_whole(tensors, spread))
    if verb == "scatter":
        return (yield from engine.scatter_back(tensors, spread))
    matrices = [stack.matrix for stack, _, _ in asked]
    return [[x] for x in engine.side_sums([x for [x] in tensors], matrices, int(verb == "sum columns"))]


def wide(parameter: Tensor) -> torch.dtype:
    """What is computed, and kept, in: fp32, or fp64 for fp64 parameters."""
    return torch.promote_types(parameter.dtype, torch.float32)


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
    held = [(stack, update) for stack, update in updates.items() if stack.holds]
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
    matrices = list[Matrix]()
    weights = list[Tensor]()
    updates = list[Tensor]()
    for stack, update in held:
        matrices += [stack.matrix] * len(stack.members)
        weights += stack.shards(WEIGHT)
        updates += update.unbind()
    squares, inner = squares_and_products(engine, matrices, weights, updates)
    counts = [len(stack.members) for stack, _ in held]
    of_stacks = zip(held, squares.split(counts, 1), inner.split(counts), strict=True)
    steps = {}
    for (stack, _), (of_weights, of_updates), products in of_stacks:
        kept = 1 - stack.decay
        radii = torch.stack(stack.of_each(RADIUS, stack.members))
        measured = torch.stack([of_weights * kept**2, of_updates])
        coefficients = on_spheres(measured, products * kept, radii, radii * stack.group["lr"])
        steps[stack] = tuple(x.view(-1, 1, 1) for x in coefficients.unbind(1))
    return steps
