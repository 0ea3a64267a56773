"""Optimizers whose steps orthogonalize momenta: how their stacks are made, and stepped by the engine's plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.parallel.workspace import BYTES_OF_ENTRY
from megatron_eopt.settings.groups import MOMENTUM_STEPS
from megatron_eopt.settings.of_class import is_ours
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step import held_norms
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.momenta.cuda_graph import GraphedUpdate
from megatron_eopt.step.momenta.momentum_stack import MomentumStack, Update, Updates, decay, subtract
from megatron_eopt.step.momenta.offload import Streamed
from megatron_eopt.step.momenta.step_form import step_form
from megatron_eopt.step.momenta.step_kernels import StepKernels
from megatron_eopt.step.momenta.users_step import users_step
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import local
from megatron_eopt.step.session import Session, StepCache
from megatron_eopt.step.stacks import Chunk, Inputs, Member, Rule, gradients_of, lockstep
from megatron_eopt.step.state import MOMENTUM_BUFFER, StateTensor
from megatron_eopt.step.users_functions import scales_of

# methods by which users make updates of whole parameters or matrices
OF_PARAMETERS = ("orthogonalize", "scaled_orthogonalize_fn", "orthogonalize_fn")


@dataclass
class MomentumCache(StepCache):
    """Also what steps of momenta need."""

    needs_norms: bool = False  # whether norms of weights are to be found before the step
    norms_checked: bool = False  # those by which updates are sized
    by_user: bool = False  # whether a user's methods make updates of whole parameters
    scales: list[list[float]] = field(default_factory=list)  # of each parameter's matrices
    kernels: StepKernels | None = None  # what does the elementwise work; None for torch
    graphed: GraphedUpdate | None = None  # a captured step, which reads tables of the kernels


class MomentumOptimizer(BaseOptimizer):
    """Optimizers that step stacks by orthogonalized momenta.

    A subclass makes the update of a stack (:meth:`update`), says how a group's factors are scaled (:meth:`_scale_of`),
    and divides updates by second moments where groups have one (:meth:`_divided`).
    """

    by_users_alone: ClassVar[bool] = False  # whether methods for users to override make updates in any case
    scales_factors_of_users: ClassVar[bool] = False  # whether a user's function leaves its factors unscaled
    momentum_key: ClassVar[str]  # names of these settings
    nesterov_key: ClassVar[str]

    fp32_matmul_prec: MatmulPrecision
    newton_schulz_calls: int = 0

    _session: Session[MomentumCache]
    _streamed: Streamed | None = None

    def update(self, stack: MomentumStack) -> Rule:
        """An optimizer's algorithm."""
        raise NotImplementedError

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """One parameter's update, before the learning rate."""
        raise NotImplementedError

    def _divided(self, updates: Updates, engine: Engine) -> Updates:
        """Updates of a chunk whose groups have a second moment."""
        raise NotImplementedError

    def _scale_of(self, group: Mapping[str, Any]) -> Callable[[int, int], float] | None:
        """The scale of a group's matrices; None for 1."""
        return None

    def _overridden(self, *names: str) -> list[str]:
        """Which of these methods a user has overridden or set."""
        owners = {name: next(cls for cls in type(self).__mro__ if name in vars(cls)) for name in names}
        return [name for name, cls in owners.items() if name in vars(self) or not is_ours(cls)]

    # What is planned.

    def _settled(self, engine: Engine) -> MomentumCache:
        """Also find scales, which a user's function may get wrong, and kernels."""
        cache = MomentumCache(super()._settled(engine).modifiers)
        cache.by_user = self.by_users_alone or bool(self._overridden(*OF_PARAMETERS))
        cache.needs_norms = any(each.needs_norm for each in cache.modifiers)
        for p, matrices in zip(self._parameters(), engine.matrices, strict=True):
            cache.scales.append(scales_of(self._scale_of(self.group_of(p)), matrices))
        form, _ = step_form(self, engine.device)
        if form == "triton" and not cache.by_user:
            cache.kernels = StepKernels(engine)
            both = any(each.moment2_method != "none" and each.measured for each in cache.modifiers)
            engine.slice_chunks(BYTES_OF_ENTRY if both or self._overridden("update") else 0)
        return cache

    # State.

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Describe the momentum."""
        return [StateTensor(MOMENTUM_BUFFER, dtype=self.execution.momentum_dtype)]

    def state_dict(self) -> dict[str, Any]:
        """As torch's; waits for state to reach host memory."""
        if self._streamed is not None:
            self._streamed.wait()
        return super().state_dict()

    @property
    def streamed(self) -> Streamed:
        """Moves state between host memory and the device."""
        self._streamed = self._streamed or Streamed(self.engine.device)
        return self._streamed

    # The step.

    def _take(self, ok: Flag) -> None:
        cache = self._session.settled
        if cache.needs_norms:
            held_norms.find_norms(self)
        inputs = self._inputs(ok)
        if cache.by_user:
            self._take_users(inputs)
        else:
            run = self._run
            if self.execution.cuda_graphs:
                run = cache.graphed = cache.graphed or GraphedUpdate(self._run)
                run.check(inputs, self._places(inputs.gradients))
            self._session.changing = True
            run(inputs)
        self.newton_schulz_calls += sum(len(cache.scales[index]) for index in inputs.gradients)
        if self.execution.momentum_dtype is not None:
            for group in self.param_groups:
                group[MOMENTUM_STEPS] += 1

    def _inputs(self, ok: Flag) -> Inputs:
        """What the step reads; makes state that is missing."""
        return Inputs(self.param_groups, gradients_of(self._parameters(), self._begin_state()), ok)

    def _take_users(self, inputs: Inputs) -> None:
        session = self._session
        assert session.nonfinite is not None  # a step is made
        of_updates = session.nonfinite.of_updates
        agree = partial(self._agree, present=session.stepping or [])

        def accept(updates: Mapping[int, Tensor]) -> Tensor:
            of_all = [updates.get(i) for i, _ in enumerate(self._parameters())]
            return of_updates.accept(of_all, agree) == 1

        chunk = self._chunk_of(inputs.gradients, inputs)
        session.changing = True
        with fp32_products(self.fp32_matmul_prec, as_torch=True):
            users_step(chunk, self._worked(chunk), self.orthogonalize, accept)

    def _run(self, inputs: Inputs) -> None:
        engine = self.engine
        indices = list(inputs.gradients)
        if not self.execution.offload_fraction:
            engine.run(indices, lambda some: self._worked(self._chunk_of(some, inputs)))
            return
        streamed = self.streamed
        streamed.begin(engine.order(indices), self._on_host(indices))
        engine.run(indices, lambda some: streamed.around(self._chunk_of(some, inputs), self._worked))
        streamed.end()

    def _worked(self, chunk: Chunk[MomentumStack]) -> Program:
        """One chunk's step."""
        decay(chunk)
        updates: Updates = yield from lockstep([(stack, self.update(stack)) for stack in chunk.stacks])
        if not all(isinstance(update, Update) for update in updates.values()):
            raise TypeError(f"{type(self).__name__}.update() has to return an Update(factors, scale)")
        if any(stack.modifiers.moment2_method != "none" for stack in chunk.stacks):
            updates = self._divided(updates, chunk.engine)
        subtract(updates, chunk)
        chunk.end()

    def _chunk_of(self, indices: Iterable[int], inputs: Inputs) -> Chunk[MomentumStack]:
        """The chunk of these parameters, which is kept from step to step, with what a step reads."""
        some = tuple(indices)
        chunk: Chunk[MomentumStack] = self._session.settled.chunks_for(some, partial(self._make_chunk, some))
        chunk.begin(inputs)
        for stack in chunk.stacks:
            stack.beta, stack.weight_decay = self._rates_of(stack.group)
            stack.decays = isinstance(stack.weight_decay, Tensor) or stack.weight_decay != 0
            stack.nesterov = self.nesterov_key in self.defaults and stack.group[self.nesterov_key]
        return chunk

    def _make_chunk(self, indices: Sequence[int]) -> Chunk[MomentumStack]:
        cache = self._session.settled
        group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        parameters = self._parameters()
        members = []
        for index in indices:
            p = parameters[index]
            matrices = self.engine.matrices[index]
            pairs = zip(self.key_ends(p), matrices, strict=True) if matrices else [("", None)]
            for number, (end, matrix) in enumerate(pairs):
                like = local(p).shape if matrix is None else (matrix.group, matrix.shape, matrix.rectangles)
                kind = group_of[index], p.dtype, like
                members.append(Member(p, group_of[index], index, number, end, kind))
        chunk = Chunk(self, self.engine, members, cache.modifiers, MomentumStack)
        for stack in chunk.stacks:
            first = stack.members[0]
            stack.kernels = cache.kernels
            stack.has_views = stack.kernels is not None and not stack.modifiers.measured
            stack.rounded = self.execution.momentum_dtype is not None
            if self.scales_factors_of_users or not cache.by_user:
                stack.scale = cache.scales[first.index][first.number]
        return chunk

    def _rates_of(self, group: Mapping[str, Any]) -> tuple[float, Scalar]:
        """Momentum and weight decay of a group's next step."""
        return group[self.momentum_key], group["weight_decay"]

    def _on_host(self, indices: Iterable[int]) -> dict[int, list[Tensor]]:
        """State of parameters that is in host memory, by their indices."""
        parameters = self._parameters()
        homes = {}
        for index in indices:
            p = parameters[index]
            if self.on_host(p):
                state = map(local, self.state[p].values())
                homes[index] = [x for x in state if x.shape == local(p).shape]
        return homes

    def _places(self, indices: Iterable[int]) -> list[int]:
        """Where a step changes weights and state of parameters."""
        parameters = self._parameters()
        places = []
        for p in (parameters[index] for index in indices):
            places += [local(x).data_ptr() for x in (p, *self.state[p].values())]
        return places
