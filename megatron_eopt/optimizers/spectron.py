"""Spectron: low-rank weights with spectrally bounded steps of factors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import batched, chain, compress
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.matrices import WHOLE
from megatron_eopt.optimizers.orthogonalized import refuse_blockwise
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.spectral import power_iterations
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.settings.groups import also_called, iteration_of, note_short_schedule, warn
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import BELOW_1, Scalar, count
from megatron_eopt.step import foreach, low_rank
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.foreach import where
from megatron_eopt.step.low_rank import FACTOR, PROJECTED, Factor, FactorChunk, FactorStack, LocalFactor, U
from megatron_eopt.step.low_rank import factor_pairs as factor_pairs
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_matrix,
    check_shard,
    local,
    names_of_last,
    scale_rows,
)
from megatron_eopt.step.session import StepCache
from megatron_eopt.step.state import MOMENTUM_BUFFER, StateTensor, check_placements


def gradients_of_factors(chunk: FactorChunk, engine: Engine) -> None:
    """Give the factors of a chunk their gradients."""
    if not chunk.in_state:
        for stack in chain(*chunk.pairs):
            gradients = []
            for factor, m in zip(stack.factors, stack.momenta, strict=True):
                g = factor.parameter.grad
                # averaged with itself a momentum stays as it is
                gradients.append(m if g is None else local(g).to(m.dtype))
            stack.gradients = gradients
        return
    given = [local(torch.zeros_like(p) if p.grad is None else p.grad) for p in chunk.parameters]
    shards = engine.split(chunk.indices, given)
    for A, B in chunk.pairs:
        G = torch.stack([shards[i] for i in A.numbers]).to(A.values[0].dtype)
        A.gradients = G @ B.stack()  # gA = G B
        A.summed_over = B.label
        B.gradients = G.mT @ A.stack()  # gB = G^T A
        B.summed_over = A.label


def step_of_factors(stacks: Sequence[FactorStack], engine: Engine, power_steps: int) -> None:
    """Step stacks of factors, with both of each pair among them."""
    _sum_gradients(stacks, engine)
    for stack in stacks:
        lr = stack.settings["lr"]
        # A -= lr * weight_decay * A; 1 - lr * weight_decay as one factor would be rounded alike in every step
        foreach.subtract(stack.values, stack.values, lr * stack.settings["weight_decay"], stack.ok)
        # mA += (1 - beta) (gA - mA)
        foreach.average(stack.momenta, list(stack.gradients), stack.settings["momentum_beta"], False, stack.ok)
        stack.gradients = ()
    momenta = {}
    for stack in stacks:
        for factor, m in zip(stack.factors, stack.momenta, strict=True):
            momenta[factor.index] = stack.upright(m)
    indices = sorted(momenta)
    directions = dict(zip(indices, engine.factors(indices, [momenta[i] for i in indices]), strict=True))  # orth(mA)
    summed = partial(engine.sums, labels=[stack.label for stack in stacks])
    us = [torch.stack(stack.us) for stack in stacks]
    vectors = power_iterations([stack.stack for stack in stacks], us, power_steps, summed)
    norms = summed([(u * image).sum(-1) for u, _, image in vectors])  # sA, sB
    norm_of = dict[int, Tensor]()
    for stack, of_stack in zip(stacks, norms, strict=True):
        norm_of |= zip([factor.index for factor in stack.factors], of_stack.unbind(), strict=True)
    for stack, before, (u, _, _), own in zip(stacks, us, vectors, norms, strict=True):
        torch._foreach_copy_(stack.us, list(where(stack.ok, u, before).unbind()))
        others = torch.stack([norm_of[factor.partner] for factor in stack.factors])
        bound = own + others + 1  # lr' = lr / (sA + sB + 1)
        updates = stack.upright(torch.stack([directions.pop(factor.index) for factor in stack.factors]))
        updates = updates * (stack.settings["lr"] / bound).view(-1, 1, 1)
        foreach.subtract(stack.values, updates.unbind(), 1.0, stack.ok)  # A -= lr' orth(mA)


def _sum_gradients(stacks: Sequence[FactorStack], engine: Engine) -> None:
    cut = [stack for stack in stacks if stack.summed_over]
    tensors: list[Any] = [stack.gradients for stack in cut]
    sums = engine.sums(tensors, [stack.summed_over for stack in cut])
    for stack, gradients in zip(cut, sums, strict=True):
        stack.gradients = gradients


def write_weights(chunk: FactorChunk, engine: Engine) -> None:
    """``W = A B^T`` of the chunk's matrices."""
    tensors = [local(p) for p in chunk.parameters]
    shards = engine.split(chunk.indices, list(tensors))
    for A, B in chunk.pairs:
        before = torch.stack([shards[i] for i in A.numbers])
        W = (A.stack() @ B.stack().mT).to(before.dtype)
        changes = (A.settings["lr"] != 0) & (True if A.ok is None else A.ok)
        W = torch.where(changes, W, before) if isinstance(changes, Tensor) else W if changes else before
        for i, shard in zip(A.numbers, W.unbind(), strict=True):
            shards[i] = shard
    torch._foreach_copy_(tensors, engine.merge(chunk.indices, shards))


class FactorPlan(NamedTuple):
    """The factors of each parameter, and the engine that orthogonalizes their momenta."""

    factors: dict[Tensor, list[Factor]]
    engine: Engine


class Spectron(BaseOptimizer):
    """Spectron [1]: orthogonalized, bounded steps of low-rank factors of weights.

    For a weight ``W`` (m x n) with gradient ``G`` and its factors ``A`` (m x r) and ``B`` (n x r), in this order:

    1. ``gA = G B`` and ``gB = G^T A``;
    2. weight decay of each factor: ``A -= lr * weight_decay * A``, so that ``W`` shrinks by the square;
    3. momentum, an exponential moving average: ``mA += (1 - beta) (gA - mA)``, and so ``mB``;
    4. ``sA`` and ``sB``, the largest singular values of the factors, by power iteration from the last step's vectors,
       at first from those of the decomposition below;
    5. ``A -= lr' * orth(mA)``, ``B -= lr' * orth(mB)`` with ``lr' = lr / (sA + sB + 1)``: ``W`` changes by at most
       about ``lr`` in spectral norm;
    6. ``W = A B^T``.

    The first step with ``lr > 0`` takes the factors from the singular value decomposition of the weight, and **so
    projects it to rank r**; the relative change is logged, and in :attr:`projection_errors`. Steps with ``lr = 0``
    change nothing before, and only momenta after. From then on the factors are what is trained: other changes of a
    weight are overwritten, except by :meth:`scale_rows`.

    Factors, momenta and singular vectors are kept in fp32 (fp64 for an fp64 parameter), and steps 1, 4 and 6 are
    computed in it. Only steps up to the one that projects a parameter wait for a GPU.

    In the paper's own form the model holds the factors: groups of
    :func:`~megatron_eopt.optimizers.spectron.factor_pairs` skip steps 1 and 6 and the projection, keep momenta and
    singular vectors alone, and read no ``rank``.

    A weight cut by tensor parallelism has the factor of the cut dimension cut alike and the other on every rank, and
    takes the step of one rank. For a matrix cut along its rows, a step exchanges ``n r`` entries for ``gB`` in one
    all-reduce for all matrices, ``mA`` for its orthogonal factor as ``tp_mode`` says, and ``2 k + 1`` small all-reduces
    for ``k`` power iterations. DTensors may be cut along rows or along columns; their state are DTensors too, which
    torch's checkpoints load on any number of ranks.

    A group may have its own ``lr``, ``rank``, ``momentum_beta``, ``weight_decay``, ``num_ns_steps`` and
    ``coefficient_type``; the rank is fixed when the state is created. All else is as of
    :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Args:
        params: matrices, or groups of them; the attribute ``logical_matrices`` declares those that are several.
        rank: ``r``, from 1 to the short side of every logical matrix. The paper has a quarter of that.
        momentum_beta: ``beta``, in [0, 1). The paper has 0.95.
        num_power_iterations: of each step, at least 1; also as ``num_power_iter``.
        tp_mode: how a factor that is cut is orthogonalized: ``duplicated``, ``owner``, ``distributed``, ``gram`` or
            ``auto``, all exact: see :mod:`~megatron_eopt.parallel.plan`.

    Raises:
        ValueError: for a setting out of its range, a parameter that is no matrix or is cut along both dimensions, a
            split that does not fit, or shards without a group; in the first step for a weight that is zero or not
            finite, before any is changed.

    [1] Spectron, arXiv 2602.12429.
    """

    own_settings = (
        Setting("rank", "Rank of the two factors of every weight.", count(1), planned=True),
        Setting("momentum_beta", "Decay rate of the factors' momenta, in [0, 1); the paper has 0.95.", BELOW_1),
        Setting("num_power_iterations", "Power iterations of a step, for the spectral norms.", count(1), whole=True),
    )
    group_keys = ("lr", "rank", "momentum_beta", "weight_decay")
    newton_schulz: NewtonSchulz
    num_power_iterations: int
    newton_schulz_calls: int = 0

    _plan: FactorPlan  # made by prepare()
    _errors: Mapping[str, float] = {}

    @also_called(num_power_iter="num_power_iterations")
    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 3e-4,
        rank: int = 64,
        momentum_beta: float = 0.9,
        weight_decay: float = 0.01,
        num_power_iterations: int = 1,
        num_ns_steps: int = 5,
        coefficient_type: str | Sequence[Coefficients] = "quintic",
        fp32_matmul_prec: MatmulPrecision = "medium",
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        pg_collection: TensorParallelGroups | None = None,
        tp_mode: TpMode = "duplicated",
        symmetric_products: str | None = None,
    ) -> None:
        super().__init__(params, locals(), {"pairs": False})

    def _settle(self, values: dict[str, Any]) -> None:
        self.newton_schulz = iteration_of(values)
        note_short_schedule(self.newton_schulz)

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint describes."""
        return super().settings() | {
            "coefficients": [list(coefficients) for coefficients in self.newton_schulz.schedule],
            "fp32_matmul_prec": self.newton_schulz.fp32_matmul_prec,
            "num_power_iterations": self.num_power_iterations,
            "split_qkv": self.split_qkv,
            "tp_mode": self.tp_mode,
        }

    def settings_of_groups(self) -> dict[str, Any]:
        """Without ``pairs``, which is no setting."""
        return {key: value for key, value in super().settings_of_groups().items() if key != "pairs"}

    @property
    def projection_errors(self) -> dict[str, float]:
        """Parameter -> ``||W - A B^T||_F / ||W||_F`` of its worst matrix."""
        return dict(self._errors)

    def explain(self) -> str:
        """The plan for factors, a table; all ranks ask."""
        self.prepare()
        return self._plan.engine.explain()

    def engine_to_explain(self) -> Engine:
        """The engine of :meth:`explain`, before ranks agree on it."""
        return self._proposed_plan().engine

    @property
    def matrices_updated(self) -> int:
        """Counts all matrices."""
        return self.newton_schulz_calls

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter."""
        if settled:
            self.prepare()
        plan = self._plan if settled else self._proposed_plan()
        schemes = {i: bucket.scheme for bucket in plan.engine.plan.buckets for i in bucket.matrices}
        described: dict[Tensor, list[DescribedMatrix]] = {}
        for parameter, factors in plan.factors.items():
            names = self.split_of(parameter).names(self.layout(parameter).shape[0])
            shapes = {}
            found = dict.fromkeys(range(len(names)), "local")
            for factor in factors:
                shapes[factor.number] = factor.matrix.shape
                if schemes[factor.index] != "local":
                    found[factor.number] = schemes[factor.index].replace("_", " ")
            described[parameter] = []
            for i, name in enumerate(names):
                described[parameter].append(DescribedMatrix(name, shapes[i], found[i], 1.0, None))
        return described

    def _settled(self, engine: Engine) -> StepCache:
        """Also settle the factors, whose rank cannot change."""
        plan = self._proposed_plan()
        for first, *_ in plan.factors.values():
            kept = self.state.get(first.parameter, {}).get(FACTOR + first.end)
            if kept is not None and kept.shape[1] != first.rank:
                raise ValueError(
                    f"{type(self).__name__} keeps factors of rank {kept.shape[1]} for the parameter of shape "
                    f"{tuple(first.parameter.shape)}, whose group now has rank {first.rank}: set it back, it cannot "
                    "change"
                )
        plan.engine.prepare()
        self._plan = plan
        return super()._settled(engine)

    def _check_together(self, group: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        iteration_of(settings)

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return ParamSpec(name, dtype, self.layout(parameter), self.split_of(parameter))

    def _proposed_plan(self) -> FactorPlan:
        """Factors and their engine, before ranks agree on it."""
        factors: dict[Tensor, list[Factor]] = {}
        described = []
        known: dict[Layout, Layout] = {}  # equal ones as one object
        first = 0
        for name, parameter in zip(self._names(), self._parameters(), strict=True):
            iteration = iteration_of(self.effective(self.group_of(parameter)))
            matrices = [known.setdefault(x, x) for x in self.matrix_layouts(parameter)]
            factors[parameter] = self._factors_of(parameter, matrices, first)
            first += len(factors[parameter])
            for factor in factors[parameter]:
                described.append(ParamSpec(name + factor.name, factor.dtype, factor.layout, WHOLE, iteration))
        return FactorPlan(factors, Engine(described, self._parameters()[0].device, self.tp_mode))

    def _factors_of(self, parameter: Tensor, matrices: Sequence[Layout], first: int = 0) -> list[Factor]:
        names = self.split_of(parameter).names(self.layout(parameter).shape[0])
        ends = self.key_ends(parameter)
        return low_rank.factors_of(parameter, first, matrices, names, ends, self.group_of(parameter))

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale rows of the first factors."""
        self.prepare()
        super().scale_rows(parameters, factors)
        for parameter, of_matrices in self._by_matrix(parameters, factors):
            for A in self._plan.factors[parameter][::2]:
                if A.in_state:
                    scale_rows(self._kept(A).value, of_matrices[A.number])

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Factors, momenta and singular vectors; without factors for pairs."""
        factors = self._factors_of(parameter, self.matrix_layouts(parameter))
        tensors = [StateTensor(PROJECTED, (), 0, factors[0].dtype, non_negative=True)] if factors[0].in_state else []
        for pair in batched(factors, 2):
            for both in zip(*(factor.state_tensors() for factor in pair), strict=True):
                tensors += both
        return tensors

    def _to_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for number, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            for key in ("rank", "pairs"):
                if saved.get(key, group[key]) != group[key]:
                    raise ValueError(
                        f"{type(self).__name__}: group {number} has {key}={group[key]}, but the state was saved with "
                        f"{saved[key]}: build the optimizer as it was"
                    )
        return state_dict

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        refuse_blockwise(self, "singular values of factors")
        parameters = []
        names = names_of_last(self.param_groups)
        indices = names_of_last(self.param_groups, shapes=False)
        for parameter, called, index in zip(group["params"], names, indices, strict=True):
            check_matrix(name, parameter, f"orthogonalizes matrices, but {index}")
            self._check_split(parameter)
            check_shard(parameter, self.pg_collection, called)
            layout = self.layout(parameter)
            if len(layout.cut_dims) > 1:
                raise ValueError(
                    f"{name} takes matrices that are cut along their rows or along their columns, but {called}, a "
                    f"matrix {layout.shape}, is cut along both: shard one dimension of it alone, or give it to "
                    "TensorParallelMuon"
                )
            check_placements(f"{name}: {called}", parameter, self.state_tensors(parameter), self.matrix_layouts)
            parameters.append((called, layout, self.split_of(parameter)))
        check = low_rank.check_pairs if group["pairs"] else low_rank.check_weights
        check(name, group["rank"], parameters)

    def _take(self, ok: Flag) -> None:
        parameters = self._parameters()
        active = list(compress(parameters, self._stepping))
        with fp32_products("highest"):
            waiting = [p for p in active if not self._is_projected(p)]
            if waiting:
                self._project(waiting, ok)
            self._session.changing = True
            chunks = self._chunks(set(active), ok)
            stacks = list[FactorStack]()
            for chunk in chunks:
                gradients_of_factors(chunk, self.engine)
                stacks += chain(*chunk.pairs)
            step_of_factors(low_rank.together(stacks), self._plan.engine, self.num_power_iterations)
            for chunk in chunks:
                if chunk.in_state:
                    write_weights(chunk, self.engine)

    def _shards(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        """This rank's shards of logical matrices, one at a time in the dtype of factors."""
        for index, parameter in zip(self._indices_of(parameters), parameters, strict=True):
            for shard in self.engine.split([index], [local(parameter)]):
                yield shard.to(self._plan.factors[parameter][0].dtype)

    def _chunks(self, active: set[Tensor], ok: Flag) -> list[FactorChunk]:
        index_of = {p: i for i, p in enumerate(self._parameters())}
        chunks = []
        for group in self.param_groups:
            units = []  # of parameters that step together
            for unit in batched(group["params"], 2 if group["pairs"] else 1):
                if active.issuperset(unit) and all(map(self._is_projected, unit)):
                    units.append(unit)
            for parameters in low_rank.in_chunks(units, self._plan.factors):
                factors = [factor for p in parameters for factor in self._plan.factors[p]]
                # a factor that is a parameter is a matrix of its own
                self.newton_schulz_calls += sum(len(self._plan.factors[p][::2]) for p in parameters)
                pairs = low_rank.stacked_pairs(factors, group, ok, self._kept)
                chunks.append(FactorChunk(parameters, [index_of[p] for p in parameters], pairs, not group["pairs"]))
        return chunks

    def _kept(self, factor: Factor) -> LocalFactor:
        state = self._states.of(factor.parameter, U + factor.end)
        value = state[FACTOR + factor.end] if factor.in_state else factor.parameter
        return LocalFactor(local(value), local(state[MOMENTUM_BUFFER + factor.end]), local(state[U + factor.end]))

    def _is_projected(self, parameter: Tensor) -> bool:
        """Whether a weight is the product of its factors; a factor itself is not projected."""
        return not self._plan.factors[parameter][0].in_state or self._has_begun(parameter, PROJECTED)

    def _project(self, waiting: Sequence[Tensor], ok: Flag) -> None:
        """Project weights in their first step; the host waits."""
        # also with lr=0: torch loads a checkpoint into what such a step makes
        kept = [self._states.of(p, PROJECTED)[PROJECTED] for p in waiting]
        begin = [torch.as_tensor(self.group_of(p)["lr"] > 0, device=kept[0].device) for p in waiting]
        done, begins = torch.stack([torch.stack(kept) > 0, where(ok, torch.stack(begin), False)]).tolist()
        for p in compress(waiting, done):
            self._note_begun(p, PROJECTED)
        new = [p for p in compress(waiting, begins) if not self._is_projected(p)]
        if not new:
            return
        factors = [factor for p in new for factor in self._plan.factors[p]]
        pairs = list(batched(factors, 2))
        projected = low_rank.project(self._shards(new), [A for A, _ in pairs])
        self._note_errors([A.parameter for A, _ in pairs], [x.error for x in projected])
        self._session.changing = True
        for (A, B), x in zip(pairs, projected, strict=True):
            for factor, rows in ((A, x.A), (B, x.B)):
                of_factor = self._kept(factor)
                of_factor.value.copy_(rows)
                # up to its norm its singular vector, whatever the order of rows, which may follow the ranks
                of_factor.u.copy_(rows[:, 0])
            self.state[A.parameter][PROJECTED].fill_(1)
        for p in new:
            self._note_begun(p, PROJECTED)

    def _note_errors(self, parameters: Sequence[Tensor], errors: Sequence[float]) -> None:
        """Keep and report what projections change; refuse matrices that have no factors."""
        names = dict(zip(self._parameters(), self._names(), strict=True))
        largest: dict[str, float] = {}
        for parameter, error in zip(parameters, errors, strict=True):
            name = names[parameter]
            if isnan(error):
                raise ValueError(
                    f"{type(self).__name__} cannot take factors from {name}: a matrix of it is zero, and factors of "
                    "zero never move, or is not finite. Initialize it otherwise, or give it to another optimizer"
                )
            largest[name] = max(error, largest.get(name, 0.0))
        self._errors = {**self._errors, **largest}
        worst = max(largest, key=largest.__getitem__)
        warn(
            f"{type(self).__name__} projects {len(largest)} weights to their rank, which changes them by "
            f"{min(largest.values()):.3g} to {largest[worst]:.3g} of their norm, most {worst}"
        )
