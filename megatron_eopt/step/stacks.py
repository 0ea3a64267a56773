"""Stacks of equal logical matrices, and the rules that step them.

A rule is an optimizer's algorithm for one stack. It yields where ranks wait for each other. All rules of a chunk
advance in lockstep, so that one collective serves all that ask for the same.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.exchange import Spread
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import Matrix, grouped
from megatron_eopt.parallel.scheduler import Rows
from megatron_eopt.settings.modifiers import GroupModifiers
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step.foreach import Tensors, decay_power, stacked, where
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import has_dtensors, local

WEIGHT = "weight"
GRADIENT = "gradient"


type Verb = Callable[[Sequence[Any], Sequence[Any]], Any]
"""Answers all stacks of a chunk that ask the same, from what they ask; a generator where ranks exchange something."""


class Request(NamedTuple):
    """What a rule waits for."""

    verb: Verb
    asked: Any


Rule = Generator[Request, Any, Any]
"""Makes the update of a stack, before the rate, and changes its state. It yields where ranks wait for each other."""

Write = Callable[[Sequence[Any], Sequence[Tensors]], None]
"""Writes shards of stacks, to be orthogonalized, into tensors."""


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
    def arriving(self) -> int:
        """Entries of the whole matrix where it arrives: an all-gather takes as many of each rank."""
        whole = prod(self.layout.shape)
        if not self.gathered or self.compute_rank is not None:
            return whole
        return max(whole, self.layout.ranks * max(shard.numel for shard in self.layout.rectangles))

    @property
    def factor_lengths(self) -> list[int]:
        """Lengths of the sides that have a factor."""
        return list(compress(self.layout.shape, self.has_factor))


@dataclass(frozen=True, eq=False)
class Member:
    """A logical matrix of a stack."""

    parameter: Tensor
    group: int  # its number
    index: int  # of the parameter
    number: int  # among the matrices of the parameter
    end: str  # of its state keys
    kind: Hashable  # what those of a stack have in common
    plan: MatrixPlan | None = None  # where the optimizer deals matrices to ranks


@dataclass(frozen=True)
class Inputs:
    """What a step reads beside weights and state."""

    groups: Sequence[Mapping[str, Any]]  # with their settings
    gradients: Mapping[int, Tensor]  # this rank's shards, by the index of the parameter
    ok: Flag = None  # whether there is a step; None where the host knows that there is one


NOTHING = Inputs([], {})


class Stack:
    """Equal logical matrices of one group in a chunk, in the order of their compute ranks.

    A step reads and writes by key: the weight, the gradient and state that lies as these of all members, and what else
    is kept of each of its own members.

    Attributes:
        group: its settings.
        modifiers: what is done to its updates and weights.
        weight_decay: of this step.
        matrix: one of them, as the engine has it; none where the engine knows no layout.
        has_factor: whether rows have a factor, and columns.
        own: those that this rank works on.
        spread: as what they are exchanged; None where nothing is.
        ndim: of a stack of shards: 3, or 2 for vectors.
        dtype: to compute and keep state in.
        first: whether factors are zero before this step, but are to be made.
        moves: whether there is an update; without, the gradients make the factors alone.
        places: of the matrices among all of the chunk.
    """

    matrix: Matrix

    def __init__(self, chunk: "Chunk[Any]", members: Sequence[Member]) -> None:
        self.chunk = chunk
        self.members = list(members)
        first = members[0]
        self.group_number = first.group
        self.modifiers = chunk.modifiers[first.group]
        of_parameter = chunk.engine.matrices[first.index]
        if of_parameter:
            self.matrix = of_parameter[first.number]
        self.has_factor = (False, False)
        self.own = self.members
        self.spread: Spread | None = None
        if first.plan is not None:
            self._deal(first.plan)
        # of two dimensions, or vectors, so that nothing is split
        self._are_parameters = all(member.index in chunk.are_matrices for member in members)
        self.ndim = 2 if first.parameter.ndim < 2 else 3
        self.dtype = wide(first.parameter)
        self.first = False
        self.moves = True
        self.places: list[int] = []
        self.group: Mapping[str, Any] = {}
        self.weight_decay: Scalar = 0.0
        self.ok: Flag = None
        self.tensors: dict[str, list[Tensor]] = {}  # that a step has read, by key

    def _deal(self, plan: MatrixPlan) -> None:
        self.has_factor = plan.has_factor
        numbers: list[int] = []  # how many each compute rank has; none where every rank works on all
        if plan.compute_rank is not None:
            ranks = [member.plan.compute_rank or 0 for member in self.members if member.plan is not None]
            in_order = sorted(zip(ranks, self.members, strict=True), key=lambda pair: pair[0])
            self.members = [member for _, member in in_order]
            numbers = [ranks.count(rank) for rank in range(plan.layout.ranks)]
            self.own = [member for rank, member in in_order if rank == plan.layout.rank]
        if plan.gathered:
            self.spread = Spread(self.matrix, len(self.members), numbers)

    def begin(self, inputs: Inputs) -> None:
        """Take what a step reads."""
        self.group = inputs.groups[self.group_number]
        self.weight_decay = self.group["weight_decay"]
        self.ok = inputs.ok
        self.tensors.clear()

    @property
    def gradient(self) -> Tensor:
        """To be followed by what decreases a loss, zero if not ``ok``; may be a view."""
        gradient = self.state(GRADIENT).to(self.dtype)
        if "maximize" in self.chunk.optimizer.defaults and self.group["maximize"]:
            gradient = -gradient
        return where(self.ok, gradient, 0.0)

    @property
    def decay(self) -> Scalar:
        """The part of the weights that a step takes away."""
        return decay_power(self.group["lr"], self.modifiers.decay_method) * self.weight_decay

    def wholes(self, key: str) -> list[Tensor]:
        """This rank's shards of each member's parameter, or of state that lies as it."""
        wholes = self.chunk.wholes(key)
        return [wholes[member.index] for member in self.members]

    def shards(self, key: str) -> list[Tensor]:
        """This rank's shards of the weight, gradient or state that lies as it; may be copies."""
        if key not in self.tensors:
            if self._are_parameters:
                wholes = self.chunk.wholes(key)
                self.tensors[key] = [wholes[member.index] for member in self.members]
            else:
                shards = self.chunk.shards(key)
                self.tensors[key] = [shards[member.index][member.number] for member in self.members]
        return self.tensors[key]

    def of_each(self, key: str) -> list[Tensor]:
        """The state of single matrices, under a key that ends as theirs do."""
        if key not in self.tensors:
            self.tensors[key] = self._of_members(key, self.members)
        return self.tensors[key]

    def _of_members(self, key: str, members: Sequence[Member]) -> list[Tensor]:
        state = self.chunk.optimizer.state
        return [local(state[member.parameter][key + member.end]) for member in members]

    def state(self, key: str) -> Tensor:
        """A stack of shards; of one, a view."""
        return stacked(self.shards(key))

    def keep(self, key: str, x: Tensor) -> None:
        """Write such a stack back."""
        torch._foreach_copy_(self.shards(key), list(x.unbind()))

    def owned(self, key: str) -> Tensor:
        """A stack of the state of each matrix that this rank computes; of one, a view."""
        return stacked(self._of_members(key, self.own))

    def keep_owned(self, key: str, x: Tensor) -> None:
        """Write such state back."""
        torch._foreach_copy_(self._of_members(key, self.own), list(x.unbind()))

    # What a rule may wait for: ``[whole] = yield stack.gather(shards)``.

    def gather(self, *shards: Tensor) -> Request:
        """Own whole matrices, of shards of all members."""
        return Request(gathered, list(shards))

    def scatter(self, *whole: Tensor) -> Request:
        """The way back from :meth:`gather`."""
        return Request(scattered, list(whole))

    def side_sums(self, x: Tensor, dim: int) -> Request:
        """Sums over ranks of what they have for rows (dim 0) or columns (members x length x k), for the whole side."""
        return Request(summed_columns if dim else summed_rows, x)

    def orthogonalize(self, shards: list[Tensor] | Write) -> Request:
        """Orthogonal factors of whole matrices; empties a list.

        Factors of what is written are read where they lie, and not to be written to.
        """
        return Request(orthogonalized, shards)


class Chunk[S: Stack]:
    """Stacks that are worked on together, of an optimizer's matrices in the order of ``members``.

    Attributes:
        stacks: all of them.
        groups: those of each group.
        modifiers: of each group.
        parameters: by their indices.
        matrices: how many there are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        members: Sequence[Member],
        modifiers: Sequence[GroupModifiers],
        kind: type[S],
    ) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self.modifiers = modifiers
        self.matrices = len(members)
        self.inputs = NOTHING
        self.on_device: Callable[[Tensor], Tensor] | None = None  # where state is kept in host memory
        self.parameters = {member.index: member.parameter for member in members}
        self._dtensors = has_dtensors(self.parameters.values())
        self.are_matrices = {i for i, p in self.parameters.items() if p.ndim in (1, 2) and engine.is_whole(i)}
        self._numbers: dict[int, list[int]] = {}  # of the matrices of each parameter that are here
        for member in members:
            self._numbers.setdefault(member.index, []).append(member.number)
        self._wholes: dict[str, dict[int, Tensor]] = {}
        self._shards: dict[str, dict[int, list[Tensor]]] = {}
        self.copies: dict[str, list[int]] = {}  # the parameters whose shards are copies, by key
        self.stacks = [kind(self, alike) for alike in grouped(members, lambda member: member.kind).values()]
        self.groups = list(grouped(self.stacks, lambda stack: stack.group_number).values())
        place_of = {member: n for n, member in enumerate(members)}
        for stack in self.stacks:
            stack.places = [place_of[member] for member in stack.members]

    @property
    def indices(self) -> list[int]:
        """Those of the parameters."""
        return list(self.parameters)

    def begin(self, inputs: Inputs) -> None:
        """Take what a step reads; an exception may have ended the last one."""
        self.forget()
        self.inputs = inputs
        for stack in self.stacks:
            stack.begin(inputs)

    def wholes(self, key: str) -> dict[int, Tensor]:
        """This rank's shard of each parameter, by its index, or of what lies as it, where it has that."""
        if key not in self._wholes:
            found = self.parameters
            if key == GRADIENT:
                found = {index: self.inputs.gradients[index] for index in self.parameters}
            elif key != WEIGHT:
                state = self.optimizer.state
                found = {index: state[p][key] for index, p in self.parameters.items() if key in state[p]}
            if self._dtensors:
                found = {index: local(x) for index, x in found.items()}
            if self.on_device is not None:
                found = {index: self.on_device(x) for index, x in found.items()}
            self._wholes[key] = found
        return self._wholes[key]

    def shards(self, key: str) -> dict[int, list[Tensor]]:
        """This rank's shards of the logical matrices of each parameter, by its index."""
        if key not in self._shards:
            self._shards[key] = {}
            for index, x in self.wholes(key).items():
                shards = self._split(index, x)
                self._shards[key][index] = shards
                if key != GRADIENT and _are_copies(shards, x):
                    self.copies.setdefault(key, []).append(index)
        return self._shards[key]

    def _split(self, index: int, x: Tensor) -> list[Tensor]:
        return self.engine.split([index], [torch.atleast_1d(x)])

    def write_back(self) -> None:
        """Write shards that are copies to where they belong."""
        for key, copied in self.copies.items():
            for index in copied:
                x = self._wholes[key][index]
                shards = self._shards[key][index]
                here = self._numbers[index]
                if len(here) < len(shards):  # other chunks have the rest
                    fresh = self._split(index, x)
                    for number in here:
                        fresh[number] = shards[number]
                    shards = fresh
                [merged] = self.engine.merge([index], shards)
                x.copy_(merged.view(x.shape))
        for key in (*self.copies, GRADIENT):  # whose copies are not kept longer than needed
            self._shards.pop(key, None)
            for stack in self.stacks:
                stack.tensors.pop(key, None)
        self.copies.clear()

    def end(self) -> None:
        """Write back, and drop what a step has read."""
        if self.copies:
            self.write_back()
        self.forget()
        self.inputs = NOTHING
        self.on_device = None

    def forget(self) -> None:
        """Drop what a step has read."""
        self._wholes.clear()
        self._shards.clear()
        self.copies.clear()
        for stack in self.stacks:
            stack.tensors.clear()


def _are_copies(shards: Sequence[Tensor], x: Tensor) -> bool:
    memory = {shard.untyped_storage().data_ptr() for shard in shards if shard.numel()}
    return bool(memory - {x.untyped_storage().data_ptr()})


def lockstep[S: Stack](rules: Iterable[tuple[S, Rule]]) -> Generator[Any, Any, dict[S, Any]]:
    """Advance the rules of a chunk's stacks together, and return what they made.

    What all ask for with one verb is answered at once. Yields while ranks exchange matrices, and, to be sent their
    factors, what is to be orthogonalized: this rank's shards of the whole chunk, or what writes them.
    """
    made: dict[S, Any] = {}
    running: list[tuple[S, Rule, Any]] = [(stack, rule, None) for stack, rule in rules]
    while running:
        asking: dict[Verb, list[tuple[S, Rule, Any]]] = {}
        for stack, rule, answer in running:
            if not isinstance(rule, Generator):
                raise TypeError(f"update() of {type(stack.chunk.optimizer).__name__} has to yield what it waits for")
            try:
                request = rule.send(answer)
            except StopIteration as end:
                made[stack] = end.value
                continue
            if not isinstance(request, Request):
                raise TypeError(f"a rule yields what methods of its stack return, as stack.momentum(), got {request!r}")
            asking.setdefault(request.verb, []).append((stack, rule, request.asked))
        running = []
        for verb, some in sorted(asking.items(), key=lambda item: item[0].__name__):
            answers = verb([stack for stack, _, _ in some], [asked for _, _, asked in some])
            if isinstance(answers, Generator):
                answers = yield from answers
            running += [(stack, rule, answer) for (stack, rule, _), answer in zip(some, answers, strict=True)]
    return made


# Verbs.


def gathered(stacks: Sequence[Stack], asked: Sequence[list[Tensor]]) -> Generator[None, None, list[list[Tensor]]]:
    """See :meth:`Stack.gather`."""
    return stacks[0].chunk.engine.gather_whole(asked, [stack.spread for stack in stacks])


def scattered(stacks: Sequence[Stack], asked: Sequence[list[Tensor]]) -> Generator[None, None, list[list[Tensor]]]:
    """See :meth:`Stack.scatter`."""
    return stacks[0].chunk.engine.scatter_back(asked, [stack.spread for stack in stacks])


def summed_rows(stacks: Sequence[Stack], asked: Sequence[Tensor]) -> list[Tensor]:
    """See :meth:`Stack.side_sums`."""
    return stacks[0].chunk.engine.side_sums(asked, [stack.matrix for stack in stacks], 0)


def summed_columns(stacks: Sequence[Stack], asked: Sequence[Tensor]) -> list[Tensor]:
    """See :meth:`Stack.side_sums`."""
    return stacks[0].chunk.engine.side_sums(asked, [stack.matrix for stack in stacks], 1)


def orthogonalized(
    stacks: Sequence[Stack], asked: Sequence[list[Tensor] | Write]
) -> Generator[Any, Tensors, list[Tensors]]:
    """See :meth:`Stack.orthogonalize`; all stacks of a chunk ask."""
    chunk = stacks[0].chunk
    if len(stacks) < len(chunk.stacks):
        raise ValueError("the rules of all groups orthogonalize once, and after the same other requests")
    if chunk.copies:
        chunk.write_back()  # a user's function may read parameters, and host memory takes momenta
    in_order = dict[int, Tensor]()
    writes: dict[Write, list[Stack]] = {}
    for stack, shards in zip(stacks, asked, strict=True):
        if isinstance(shards, list):
            in_order.update(zip(stack.places, shards, strict=True))
            shards.clear()
        elif isinstance(shards, Request | Tensor):
            raise TypeError("a rule orthogonalizes a list of shards, or what `yield stack.momentum()` gave")
        else:
            writes.setdefault(shards, []).append(stack)

    def written(updates: Tensors) -> None:
        for write, some in writes.items():
            write(some, [some_of(updates, stack.places) for stack in some])
        for place, shard in in_order.items():
            updates[place].copy_(shard)

    if writes:
        factors = yield written
    else:
        every = [in_order.pop(place) for place in range(chunk.matrices)]
        factors = yield every
    return [some_of(factors, stack.places) for stack in stacks]


def some_of(matrices: Tensors, places: Sequence[int]) -> Tensors:
    """Some of the matrices of a chunk."""
    if isinstance(matrices, Rows):
        return Rows(matrices.stacks, [matrices.rows[place] for place in places])
    return [matrices[place] for place in places]


def joined(lists: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    """All tensors of several lists."""
    return list(chain(*lists))


def matrices_of(stacks: Iterable[Stack]) -> list[Matrix]:
    """The matrices of stacks."""
    matrices = []
    for stack in stacks:
        matrices += [stack.matrix] * len(stack.members)
    return matrices


def shards_of(stacks: Iterable[Stack], key: str) -> list[Tensor]:
    """This rank's shards of all stacks, under a key."""
    return [shard for stack in stacks for shard in stack.shards(key)]


def by_stack[T](stacks: Iterable[Stack], of_matrices: Iterable[T]) -> list[list[T]]:
    """What belongs to the matrices of each stack."""
    remaining = iter(of_matrices)
    return [list(islice(remaining, len(stack.members))) for stack in stacks]


def gradients_of(parameters: Sequence[Tensor], indices: Iterable[int]) -> dict[int, Tensor]:
    """This rank's shards of gradients, by index; zeros where one is missing, for which other ranks wait."""
    gradients = {}
    for index in indices:
        p = parameters[index]
        gradients[index] = torch.zeros_like(p) if p.grad is None else p.grad
    if has_dtensors(gradients.values()):
        gradients = {index: local(x) for index, x in gradients.items()}
    return gradients


def wide(parameter: Tensor) -> torch.dtype:
    """What is computed, and kept, in: fp32, or fp64 for fp64 parameters."""
    return torch.promote_types(parameter.dtype, torch.float32)
