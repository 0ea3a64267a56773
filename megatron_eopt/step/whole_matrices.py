"""Optimizers that step equal logical matrices as stacks.

A chunk of bounded size steps at a time. Where an optimizer needs whole matrices, shards of cut ones go to their compute
ranks, which alone have the further state of a matrix, and come back, by one collective of the chunk each way.
"""

from collections import Counter
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.exchange import Spread
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import Matrix
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


def plan_of(end: str, layout: Layout, longest: int) -> MatrixPlan:
    """The plan of a matrix, whose sides have a factor up to a length."""
    rows, cols = layout.shape
    has_factor = (0 < rows <= longest and cols > 0, 0 < cols <= longest and rows > 0)
    plan = MatrixPlan(end, layout, has_factor, 0)
    for length in plan.factor_lengths:
        plan.cost += 4 * length * (length**2 + rows * cols)  # cubes of sides, and products with them
    return plan


@dataclass(eq=False)
class ParameterStep:
    """A parameter in a step, alike on all sharing ranks."""

    index: int
    parameter: Tensor
    state: dict[str, Any]
    group: Mapping[str, Any]
    plans: list[MatrixPlan]  # of each logical matrix
    moments: Sequence[str]  # keys of state in its shape
    first: bool = False  # whether its factors are zero so far, but are to be made
    skips_first_update: bool = False  # whether the first gradient makes the factors alone

    @property
    def label(self) -> str:
        """The ranks that exchange its matrices; empty for none."""
        return next((plan.layout.label for plan in self.plans if plan.gathered), "")

    @cached_property
    def kinds(self) -> tuple[Hashable, ...]:
        """What equal logical matrices have in common, for each."""
        of_all = (id(self.group), self.first, self.parameter.dtype, min(self.parameter.ndim, 2))
        return tuple((of_all, plan.has_factor, plan.layout.shape, plan.layout.rectangles) for plan in self.plans)

    @property
    def gradient(self) -> Tensor:
        """The local gradient; zeros where there is none."""
        gradient = self.parameter.grad
        return as_array(torch.zeros_like(self.parameter) if gradient is None else gradient)

    @property
    def written(self) -> dict[str, Tensor]:
        """Views of local weight and moments, by name."""
        moments = {key: as_array(self.state[key]) for key in self.moments}
        return {WEIGHT: as_array(self.parameter)} | moments


def as_array(x: Tensor) -> Tensor:
    """A view of the local shard, a scalar as a vector."""
    return torch.atleast_1d(local(x))


class MatrixStep(NamedTuple):
    """A logical matrix in a step."""

    of: ParameterStep
    number: int  # among those of its parameter

    @property
    def plan(self) -> MatrixPlan:
        """How it is worked on."""
        return self.of.plans[self.number]

    def state(self, key: str) -> Tensor:
        """Its own state, or this rank's part of it."""
        return local(self.of.state[key + self.plan.end])


@dataclass(frozen=True, eq=False)
class MatrixStack:
    """Equal logical matrices of a chunk, in the order of compute ranks."""

    matrices: Sequence[MatrixStep]
    matrix: Matrix  # one of them, as the engine has it
    numbers: Sequence[int]  # how many each compute rank has; empty where each rank works on all
    ok: Flag
    shards: dict[str, list[Tensor]]  # of weight, gradient and moments, by name; may be copies

    @property
    def one(self) -> ParameterStep:
        """The parameter of one of them."""
        return self.matrices[0].of

    @property
    def group(self) -> Mapping[str, Any]:
        """The settings of all."""
        return self.one.group

    @property
    def own(self) -> slice:
        """Those that this rank computes."""
        if not self.numbers:
            return slice(None)
        rank = self.matrices[0].plan.layout.rank
        start = sum(self.numbers[:rank])
        return slice(start, start + self.numbers[rank])

    @property
    def spread(self) -> Spread | None:
        """As what they are exchanged; None where nothing is."""
        return Spread(self.matrix, self.numbers) if self.matrices[0].plan.gathered else None

    @property
    def moves(self) -> bool:
        """Whether there is an update; without, the gradients make the factors alone."""
        return not (self.one.first and self.one.skips_first_update and any(self.matrices[0].plan.has_factor))

    @property
    def holds(self) -> bool:
        """Whether they keep their norms; vectors do not."""
        return self.group.get("weight_norm") == "hold" and self.one.parameter.ndim > 1

    @property
    def decay(self) -> Scalar:
        """The part of the weights that a step takes away."""
        method = self.group.get("weight_decay_method", "decoupled")
        return decay_power(self.group["lr"], method) * self.group["weight_decay"]

    def read(self, name: str) -> Tensor:
        """A stack of shards, by name; of one, a view."""
        return stacked(self.shards[name])

    def write(self, name: str, stack: Tensor) -> None:
        """Write such a stack back."""
        torch._foreach_copy_(self.shards[name], list(stack.unbind()))

    def kept(self, key: str) -> Tensor:
        """A stack of the state of the matrices that this rank computes; of one, a view."""
        return stacked([matrix.state(key) for matrix in self.matrices[self.own]])

    def keep(self, key: str, stack: Tensor) -> None:
        """Write such state back."""
        torch._foreach_copy_([matrix.state(key) for matrix in self.matrices[self.own]], list(stack.unbind()))


class StackedOptimizer(BaseOptimizer):
    """Optimizers that step equal logical matrices as stacks.

    Those of whole matrices say what they gather of a stack (:meth:`gathered`), and what they make of it
    (:meth:`updated`); their groups have the setting ``max_dim``, the longest side that has a factor, by which matrices
    are dealt to compute ranks. Others have a :meth:`program` of their own.
    """

    takes: ClassVar[Literal["matrices", "matrices and vectors"]] = "matrices"
    moments: ClassVar[tuple[str, ...]] = (EXP_AVG,)

    _plans: dict[Tensor, list[MatrixPlan]] | None = None
    _updated: int = 0

    def gathered(self, stack: MatrixStack) -> list[Tensor]:
        """This rank's shards of what the update is made of."""
        raise NotImplementedError

    def updated(self, stack: MatrixStack, *whole: Tensor) -> list[Tensor]:
        """Updates of own matrices, and the last of their moments; empty while factors are made."""
        raise NotImplementedError

    def program(self, stacks: list[MatrixStack]) -> Program:
        """One chunk's step."""
        spread = [stack.spread for stack in stacks]
        tensors = [self.gathered(stack) for stack in stacks]  # g;  M <- EMA(g)
        tensors = yield from self.engine.gather_whole(tensors, spread)
        for i, stack in enumerate(stacks):
            tensors[i] = self.updated(stack, *tensors[i])  # U, and the state of the compute rank
        tensors = yield from self.engine.scatter_back(tensors, spread)
        subtract(stacks, tensors, self.engine)  # p <- (1 - lr weight_decay) p - lr U
        write_copies(stacks, self.engine)

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint describes."""
        return super().settings() | {"split_qkv": self.split_qkv}

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
        return replace(spec, layout=self.layout(parameter), split=self.split_of(parameter))

    def _plan(self, end: str, layout: Layout, longest: int) -> MatrixPlan:
        return plan_of(end, layout, longest)

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

    def _ticks(self, group: Mapping[str, Any]) -> bool:
        """Whether the step counts for the clock of a group."""
        return True

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state in a step."""
        return self._states.of(parameter)

    def _steps_of(self, ok: Flag) -> list[ParameterStep]:
        """Parameters that step."""
        steps = list[ParameterStep]()
        stepping = self._stepping
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                if stepping[index]:
                    steps.append(ParameterStep(index, p, self._state_of(p), group, self._planned(p), self.moments))
                index += 1
        return steps

    def _together(self, p: ParameterStep) -> tuple[Any, ...]:
        """What parameters of one chunk have in common; chunks go in this order."""
        return p.label, str(p.parameter.dtype)

    def _bytes(self, matrix: MatrixStep) -> int:
        """What a matrix takes in a chunk on its compute rank."""
        # gradient and moments come together; a factor may be larger
        squares = [length**2 for length in matrix.plan.factor_lengths]
        itemsize: int = matrix.of.state[self.moments[0]].element_size()
        return itemsize * max([3 * prod(matrix.plan.layout.shape), *squares])

    def _bytes_held(self, matrix: MatrixStep) -> int:
        """What the shard of a matrix takes in a chunk on every rank, before and after the compute rank has it whole."""
        itemsize: int = matrix.of.state[self.moments[0]].element_size()
        return itemsize * 3 * max(shard.numel for shard in matrix.plan.layout.rectangles)

    def _chunks(self, steps: Sequence[ParameterStep]) -> Iterator[list[list[MatrixStep]]]:
        """Chunks of bounded size, listed by what goes together."""
        together: dict[tuple[Any, ...], dict[Hashable, list[MatrixStep]]] = {}
        for p in steps:
            kinds = together.setdefault(self._together(p), {})
            for number, kind in enumerate(p.kinds):
                kinds.setdefault(kind, []).append(MatrixStep(p, number))
        for _, kinds in sorted(together.items()):
            chunks: list[list[MatrixStep]] = [[]]
            loads = Loads()
            for matrices in kinds.values():
                units = [(matrices, self._loads(matrices))]
                if not self._fits(units[0][1]):  # where it has room it is not cut, for half the launches
                    units = [([matrix], self._loads([matrix])) for matrix in matrices]
                for unit, of_unit in units:
                    if chunks[-1] and not self._fits(loads + of_unit):
                        chunks.append([])
                        loads.clear()
                    loads += of_unit
                    chunks[-1] += unit
            yield chunks

    def _loads(self, matrices: Sequence[MatrixStep]) -> Loads:
        """Bytes of matrices in a chunk."""
        loads = Loads()
        for matrix in matrices:
            loads[matrix.plan.compute_rank] += self._bytes(matrix)
            loads[ALL_RANKS] += self._bytes_held(matrix)
        return loads

    def _fits(self, loads: Loads) -> bool:
        """Whether a chunk has room for them."""
        # where each rank holds a copy of each matrix, all copies of a chunk are there at once
        return all(
            load <= (self.workspace // IN_FLIGHT if key == ALL_RANKS else MOST_BYTES) for key, load in loads.items()
        )

    def _take(self, ok: Flag) -> None:
        self._session.changing = True
        for group in self.param_groups:
            if CLOCK in group:
                group[CLOCK] += self._ticks(group)
        steps = self._steps_of(ok)
        for chunks in self._chunks(steps):
            for _ in rounds(self.program(self._stacks(chunk, ok)) for chunk in chunks):
                pass
        self._updated += sum(len(p.plans) for p in steps if p.parameter.ndim > 1)

    def _stacks(self, chunk: Sequence[MatrixStep], ok: Flag) -> list[MatrixStack]:
        """A chunk's equal matrices with their local shards."""
        shards: dict[ParameterStep, dict[str, list[Tensor]]] = {}
        kinds: dict[Hashable, list[MatrixStep]] = {}
        for matrix in sorted(chunk, key=lambda matrix: matrix.plan.compute_rank or 0):
            p = matrix.of
            kinds.setdefault(p.kinds[matrix.number], []).append(matrix)
            if p not in shards:
                tensors = p.written | {GRADIENT: p.gradient}
                shards[p] = {name: self.engine.split([p.index], [x]) for name, x in tensors.items()}
        stacks = []
        for matrices in kinds.values():
            p, number = matrices[0]
            numbers = []
            if p.plans[number].compute_rank is not None:
                ranks = Counter(matrix.plan.compute_rank for matrix in matrices)
                numbers = [ranks[rank] for rank in range(p.plans[number].layout.ranks)]
            of_stack = {name: [shards[of][name][i] for of, i in matrices] for name in shards[p]}
            one = self.engine.matrices[p.index][number]
            stacks.append(MatrixStack(matrices, one, numbers, ok, of_stack))
        return stacks


def first_moment(stack: MatrixStack, beta: float) -> tuple[Tensor, Tensor]:
    """Gradients as a stack, zero if not ``ok``, and first moments that follow them."""
    momentum = stack.read(EXP_AVG)
    gradient = stack.read(GRADIENT).to(momentum.dtype)
    if stack.group["maximize"]:
        gradient = -gradient
    gradient = where(stack.ok, gradient, 0.0)
    if stack.moves:
        momentum = torch.lerp(momentum, where(stack.ok, gradient, momentum), 1 - beta)
        stack.write(EXP_AVG, momentum)
    return gradient, momentum


def refreshes(settings: Mapping[str, Any]) -> bool:
    """Whether factors are worked on again in this step, counted from the first as SOAP's authors do."""
    return bool((settings[CLOCK] - 1) % settings["precondition_frequency"] == 0)


def subtract(stacks: Sequence[MatrixStack], results: Sequence[Sequence[Tensor]], engine: Engine) -> None:
    """Subtract updates, the first of each result, and write the moments that follow them, which are the last."""
    moving = [(stack, result) for stack, result in zip(stacks, results, strict=True) if stack.moves]
    held = iter(steps_on_spheres([(stack, update) for stack, (update, *_) in moving if stack.holds], engine))
    for stack, (update, *moments) in moving:
        weights = stack.read(WEIGHT)
        moved = weights.to(update.dtype) * (1 - stack.decay)
        if stack.holds:
            moves, step, resize = next(held)
            moved = (moved - update * step.to(update.dtype)) * resize.to(update.dtype)
            moved = torch.where(moves > 0, moved, weights.to(moved.dtype))
        else:
            moved = moved - update * stack.group["lr"]
        stack.write(WEIGHT, where(stack.ok, moved.to(weights.dtype), weights))
        keys = stack.one.moments
        for key, moment in zip(keys[len(keys) - len(moments) :], moments, strict=True):
            stack.write(key, moment)


def steps_on_spheres(held: Sequence[tuple[MatrixStack, Tensor]], engine: Engine) -> list[tuple[Tensor, ...]]:
    """Coefficients of updates that hold norms, by one reduction; the weights decay before."""
    if not held:
        return []
    matrices = list[Matrix]()
    weights = list[Tensor]()
    updates = list[Tensor]()
    for stack, update in held:
        matrices += [engine.matrices[p.index][number] for p, number in stack.matrices]
        weights += stack.shards[WEIGHT]
        updates += update.unbind()
    squares, inner = squares_and_products(engine, matrices, weights, updates)
    counts = [len(stack.matrices) for stack, _ in held]
    of_stacks = zip(held, squares.split(counts, 1), inner.split(counts), strict=True)
    steps = []
    for (stack, _), (of_weights, of_updates), products in of_stacks:
        kept = 1 - stack.decay
        radii = torch.stack([matrix.state(RADIUS) for matrix in stack.matrices])
        measured = torch.stack([of_weights * kept**2, of_updates])
        coefficients = on_spheres(measured, products * kept, radii, radii * stack.group["lr"])
        steps.append(tuple(x.view(-1, 1, 1) for x in coefficients.unbind(1)))
    return steps


def write_copies(stacks: Sequence[MatrixStack], engine: Engine) -> None:
    """Write shards that are copies back to weights and moments."""
    written: dict[ParameterStep, dict[str, dict[int, Tensor]]] = {}
    for stack in stacks:
        for name, shards in stack.shards.items():
            for (p, number), shard in zip(stack.matrices, shards, strict=True):
                written.setdefault(p, {}).setdefault(name, {})[number] = shard
    for p, of_names in written.items():
        for name, x in p.written.items():
            new = of_names[name]
            memory = {shard.untyped_storage().data_ptr() for shard in new.values() if shard.numel()}
            if memory - {x.untyped_storage().data_ptr()}:
                if len(new) < len(p.plans):  # other chunks have the rest
                    new = dict(enumerate(engine.split([p.index], [x]))) | new
                [merged] = engine.merge([p.index], [new[i] for i in range(len(p.plans))])
                x.copy_(merged.view(x.shape))
