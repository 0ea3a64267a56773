"""Spectron: low-rank weights with spectrally bounded steps of factors."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import batched
from math import isnan
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import WHOLE
from megatron_eopt.optimizers import foreach, low_rank
from megatron_eopt.optimizers.base import KERNEL, BaseOptimizer
from megatron_eopt.optimizers.low_rank import FACTOR, PROJECTED, Factor, Factored, FactorStack
from megatron_eopt.optimizers.low_rank import factor_pairs as factor_pairs
from megatron_eopt.optimizers.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_matrix,
    check_shard,
    comparable,
    local,
    names_of_last,
    scale_rows,
)
from megatron_eopt.optimizers.state import StateTensor, check_placements, check_writer
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.spectral import power_iterations
from megatron_eopt.parallel.agreement import KernelProducts
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.records import TpMode
from megatron_eopt.settings.groups import also_called, iteration_of, note_short_schedule
from megatron_eopt.settings.records import SCALE, Setting, names_of
from megatron_eopt.settings.values import BELOW_1, Scalar, count

logger = logging.getLogger(__name__)

# Yields factors with their gradients, and goes on when those of all programs have stepped together.
Program = Iterator[list[FactorStack]]


def of_weights(weights: list[Tensor], indices: list[int], factors: list[FactorStack], engine: Engine) -> Program:
    """Step weights ``W = A B^T`` whose factors are state."""
    shards = engine.split(indices, [local(torch.zeros_like(p) if p.grad is None else p.grad) for p in weights])
    for A, B in batched(factors, 2):
        G = torch.stack([shards[i] for i in A.pairs]).to(A.values[0].dtype)
        A.gradients, A.summed_over = G @ B.stack(), B.label  # gA = G B
        B.gradients, B.summed_over = G.mT @ A.stack(), A.label  # gB = G^T A
    del shards, G
    yield factors  # step_of_factors
    tensors = [local(p) for p in weights]
    shards = engine.split(indices, list(tensors))
    for A, B in batched(factors, 2):
        before = torch.stack([shards[i] for i in A.pairs])
        changed = (A.accepted & (A.settings["lr"] != 0)).view(-1, 1, 1)
        W = torch.where(changed, (A.stack() @ B.stack().mT).to(before.dtype), before)  # W = A B^T
        for i, shard in zip(A.pairs, W.unbind(), strict=True):
            shards[i] = shard
    torch._foreach_copy_(tensors, engine.merge(indices, shards))


def of_pairs(parameters: list[Tensor], indices: list[int], factors: list[FactorStack], engine: Engine) -> Program:
    """Step parameters that are ``A`` and ``B`` themselves."""
    for some in factors:
        of_some = zip(some.parameters, some.momenta, strict=True)  # averaged with itself a momentum stays as it is
        some.gradients = [m if p.grad is None else local(p.grad) for p, m in of_some]
    yield factors  # step_of_factors


def step_of_factors(factors: Sequence[FactorStack], engine: Engine, power_steps: int) -> None:
    """Step first factors of equal pairs, then their second ones."""
    cut = [some for some in factors if some.summed_over]
    sums = engine.sums([some.gradients for some in cut], [some.summed_over for some in cut])
    for some in cut:
        some.gradients = sums.pop(0)
    for some in factors:
        lr, weight_decay, beta = (some.settings[key] for key in ("lr", "weight_decay", "momentum_beta"))
        # A -= lr * weight_decay * A; 1 - lr * weight_decay as one factor would be rounded alike in every step
        foreach.subtract(some.values, some.values, lr * weight_decay, some.accepted)
        foreach.average(some.momenta, list(some.gradients), beta, False, some.accepted)  # mA += (1 - beta) (gA - mA)
        some.gradients = []
    momenta = {i: some.upright(m) for some in factors for i, m in zip(some.indices, some.momenta, strict=True)}
    indices = sorted(momenta)
    directions = dict(zip(indices, engine.factors(indices, [momenta[i] for i in indices]), strict=True))  # orth(mA)
    summed = partial(engine.sums, labels=[some.label for some in factors])
    vectors = power_iterations([x.stack for x in factors], [torch.stack(x.us) for x in factors], power_steps, summed)
    norms = summed([(u * image).sum(-1) for u, _, image in vectors])  # sA, sB
    bounds = [sA + sB + 1 for sA, sB in batched(norms, 2) for _ in "AB"]  # lr' = lr / (sA + sB + 1)
    for some, (u, _, _), bound in zip(factors, vectors, bounds, strict=True):
        torch._foreach_copy_(some.us, foreach.masked(u.unbind(), some.us, some.accepted))
        updates = [some.upright(directions.pop(i)) for i in some.indices]
        foreach.subtract(some.values, updates, some.settings["lr"] / bound, some.accepted)  # A -= lr' orth(mA)


class Kind(NamedTuple):
    """What the parameters of a group are."""

    unit: int  # parameters that step together
    program: Callable[..., Program]
    factors: Callable[..., list[Factor]]
    check: Callable[..., None]


KINDS = {  # by the setting "pairs" of a group
    False: Kind(1, of_weights, low_rank.factors_of_weight, low_rank.check_weights),
    True: Kind(2, of_pairs, low_rank.factor_of_pair, low_rank.check_pairs),
}


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
        Setting("rank", "Rank of the two factors of every weight.", count(1)),
        Setting("momentum_beta", "Decay rate of the factors' momenta, in [0, 1); the paper has 0.95.", BELOW_1),
        Setting("num_power_iterations", "Power iterations of a step, for the spectral norms.", count(1), whole=True),
    )
    group_keys = ("lr", "rank", "momentum_beta", "weight_decay")
    carried_settings = frozenset({KERNEL})
    newton_schulz: NewtonSchulz
    num_power_iterations: int
    newton_schulz_calls: int = 0

    _factors: Engine  # made by prepare(), as is _factored
    _factored: dict[Tensor, Factored]
    _prepared: Engine | None = None  # the engine of the parameters then
    _done: frozenset[Tensor] = frozenset()  # that are not to be projected, or no more
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
        coefficients = list(map(list, self.newton_schulz.schedule))
        precision = self.newton_schulz.fp32_matmul_prec
        further = {key: getattr(self, key) for key in ("num_power_iterations", "split_qkv", "tp_mode")}
        return super().settings() | {"coefficients": coefficients, "fp32_matmul_prec": precision} | further

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
        return self._factors.explain()

    def engine_to_explain(self) -> Engine:
        """The engine of :meth:`explain`, before ranks agree on it."""
        return self._proposed_factors()[0]

    @property
    def matrices_updated(self) -> int:
        """Counts all matrices."""
        return self.newton_schulz_calls

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter."""
        if settled:
            self.prepare()
        engine, factored = (self._factors, self._factored) if settled else self._proposed_factors()
        schemes = {i: b.scheme.replace("_", " ") for b in engine.plan.buckets for i in b.matrices}
        described = {}
        for parameter, w in factored.items():
            names = self.split_of(parameter).names(self.layout(parameter).shape[0])
            cut = {factor.number: schemes[i] for i, factor in enumerate(w.factors, w.first) if schemes[i] != "local"}
            described[parameter] = [
                DescribedMatrix(name, A.matrix.shape, cut.get(A.number, "local"), 1.0, None)
                for name, A in zip(names, w.factors[::2], strict=True)
            ]
        return described

    def prepare(self) -> Engine:
        """Also settle the factors; returns the engine of the parameters."""
        engine = super().prepare()
        if self._prepared is not engine:
            for parameter in self._parameters():
                state = self.state.get(parameter, {})
                kept = next((x.shape[1] for key, x in state.items() if key.startswith(f"{FACTOR}_A")), None)
                rank = self.group_of(parameter)["rank"]
                if kept not in (None, rank):
                    raise ValueError(
                        f"{type(self).__name__} keeps factors of rank {kept} for the parameter of shape "
                        f"{tuple(parameter.shape)}, whose group now has rank {rank}: set it back, it cannot change"
                    )
            factors, self._factored = self._proposed_factors()
            kernel = factors.prepare(self.symmetric_products, self.param_groups[0].get(KERNEL), comparable(self))
            self._factors = factors
            self._prepared = engine
            self._done |= {p for p, w in self._factored.items() if not w.factors[0].in_state}
            for group in self.param_groups:
                group[KERNEL] = kernel
        return engine

    def kernel_products(self) -> KernelProducts:
        """Those of the factors."""
        return self._proposed_factors()[0].stacks()

    def _iteration(self, group: Mapping[str, Any]) -> NewtonSchulz:
        return iteration_of(self.effective(group))

    def _planned_settings(self) -> object:
        return self.planned_in_groups(), [group["rank"] for group in self.param_groups]

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return ParamSpec(name, dtype, self.layout(parameter), self.split_of(parameter))

    def _proposed_factors(self) -> tuple[Engine, dict[Tensor, Factored]]:
        factored: dict[Tensor, Factored] = {}
        described: list[ParamSpec] = []
        known: dict[Layout, Layout] = {}
        for index, (name, parameter) in enumerate(zip(self._names(), self._parameters(), strict=True)):
            iteration = self._iteration(self.group_of(parameter))
            matrices = [known.setdefault(x, x) for x in self.matrix_layouts(parameter)]
            factors = self._factors_of(parameter, matrices)
            nbytes = factors[0].dtype.itemsize * max(rectangle.numel for x in matrices for rectangle in x.rectangles)
            factored[parameter] = Factored(index, len(described), factors, nbytes)
            described += [
                ParamSpec(name + factor.name, factor.dtype, factor.layout, WHOLE, iteration) for factor in factors
            ]
        return Engine(described, self._parameters()[0].device, self.tp_mode), factored

    def _factors_of(self, parameter: Tensor, matrices: Sequence[Layout]) -> list[Factor]:
        group = self.group_of(parameter)
        names = self.split_of(parameter).names(self.layout(parameter).shape[0])
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        kind = KINDS[group["pairs"]]
        numbered = enumerate(zip(matrices, names, self.key_ends(parameter), strict=True))
        return [x for i, (matrix, *name) in numbered for x in kind.factors(matrix, i, *name, group["rank"], dtype)]

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale rows of the first factors."""
        self.prepare()
        super().scale_rows(parameters, factors)
        for parameter, factor in zip(parameters, factors, strict=True):
            w = self._factored[parameter]
            of_entries = factor[:, None].expand(local(parameter).shape)
            of_matrices = self.engine.split([w.index], [of_entries])
            for A in (factor for factor in w.factors[::2] if factor.in_state):
                scale_rows(self._tensors(parameter, A)[0], of_matrices[A.number][:, 0])

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Factors, momenta and singular vectors; without factors for pairs."""
        factors = self._factors_of(parameter, self.matrix_layouts(parameter))
        projected = [StateTensor(PROJECTED, (), 0, factors[0].dtype)] if factors[0].in_state else []
        pairs = (zip(*(factor.kept for factor in pair), strict=True) for pair in batched(factors, 2))
        return [*projected, *(tensor for pair in pairs for both in pair for tensor in both)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; projected weights keep its factors."""
        check_writer(type(self), state_dict)
        for number, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            for key in [key for key in ("rank", "pairs") if saved.get(key, group[key]) != group[key]]:
                raise ValueError(
                    f"{type(self).__name__}: group {number} has {key}={group[key]}, but the state was saved with "
                    f"{saved[key]}: build the optimizer as it was"
                )
        super().load_state_dict(state_dict)
        self._done = frozenset()

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        number = len(self.param_groups) - 1
        if self.tp_mode == "blockwise":
            raise ValueError("Spectron has no tp_mode blockwise: take duplicated, owner, distributed, gram or auto")
        for key in names_of(SCALE):
            if key in group:
                raise ValueError(f"{name}: group {number} has {key}, but the size of an update follows from lr alone")
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
                    f"TensorParallelMuon"
                )
            check_placements(f"{name}: {called}", parameter, self.state_tensors(parameter), self.matrix_layouts)
            parameters.append((called, layout, self.split_of(parameter)))
        KINDS[group["pairs"]].check(name, group["rank"], parameters)
        try:
            self._iteration(group)
        except ValueError as error:
            raise ValueError(f"{name}: group {number}: {error}") from error

    def _take(self, accepted: Tensor) -> None:
        flags = dict(zip(self._parameters(), accepted.unbind(), strict=True))
        # also without a gradient where others wait for this rank's part
        active = {p for i, p in enumerate(self._parameters()) if p.grad is not None or self.engine.shares(i)}
        with fp32_products("highest"):
            waiting = [p for p in self._parameters() if p in active and p not in self._done]
            if waiting:
                self._project(waiting, flags)
            self._session.changing = True
            programs = list(self._programs(active, flags))
            factors = [some for program in programs for some in next(program)]
            step_of_factors(factors, self._factors, self.num_power_iterations)
            for program in programs:
                next(program, None)

    def _programs(self, active: set[Tensor], flags: Mapping[Tensor, Tensor]) -> Iterator[Program]:
        for group in self.param_groups:
            kind = KINDS[group["pairs"]]
            units = (unit for unit in batched(group["params"], kind.unit) if not active.isdisjoint(unit))
            for factored in low_rank.chunks(filter(self._done.issuperset, units), self._factored):
                factors = list(low_rank.stacks(factored, group, flags, self._tensors))
                # a factor that is a parameter is a matrix of its own
                self.newton_schulz_calls += sum(len(w.factors[::2]) for w in factored.values())
                yield kind.program(list(factored), [w.index for w in factored.values()], factors, self.engine)

    def _tensors(self, parameter: Tensor, factor: Factor) -> list[Tensor]:
        state = self._states.of(parameter, factor.kept[-1].key)
        value = [] if factor.in_state else [parameter]
        return [local(x) for x in (*value, *(state[tensor.key] for tensor in factor.kept))]

    def _project(self, waiting: Sequence[Tensor], flags: Mapping[Tensor, Tensor]) -> None:
        """Project weights in their first step; the host waits."""
        # also with lr=0: torch loads a checkpoint into what such a step makes
        kept = [self._states.of(p, PROJECTED)[PROJECTED] for p in waiting]
        begin = [flags[p] & (self.group_of(p)["lr"] > 0) for p in waiting]
        read = list(zip(waiting, *torch.stack([*kept, *begin]).view(2, -1).tolist(), strict=True))
        self._done |= {p for p, done, _ in read if done}
        new = {p: self._factored[p] for p, done, begins in read if begins and not done}
        if not new:
            return
        pairs = [(p, *pair) for p, w in new.items() for pair in batched(w.factors, 2)]
        shards = (x.to(w.factors[0].dtype) for p, w in new.items() for x in self.engine.split([w.index], [local(p)]))
        turns = [new[p].first // 2 + A.number for p, A, _ in pairs]
        projected = low_rank.project(shards, [A for _, A, _ in pairs], turns)
        names = dict(zip(self._parameters(), self._names(), strict=True))
        largest: dict[str, float] = {}
        for (p, *_), (_, _, error) in zip(pairs, projected, strict=True):
            if isnan(error):
                raise ValueError(
                    f"{type(self).__name__} cannot take factors from {names[p]}: a matrix of it is zero, and factors "
                    f"of zero never move, or is not finite. Initialize it otherwise, or give it to another optimizer"
                )
            largest[names[p]] = max(error, largest.get(names[p], 0.0))
        self._errors = {**self._errors, **largest}
        if not dist.is_initialized() or dist.get_rank() == 0:
            worst = max(largest, key=largest.__getitem__)
            logger.warning(
                f"{type(self).__name__} projects {len(largest)} weights to their rank, which changes them by "
                f"{min(largest.values()):.3g} to {largest[worst]:.3g} of their norm, most {worst}"
            )
        self._session.changing = True
        for (p, *pair), (*of_pair, _) in zip(pairs, projected, strict=True):
            for factor, rows in zip(pair, of_pair, strict=True):
                value, _, u = self._tensors(p, factor)
                value.copy_(rows)
                # up to its norm its singular vector, whatever the order of rows, which may follow the ranks
                u.copy_(rows[:, 0])
            self.state[p][PROJECTED].fill_(1)
        self._done |= new.keys()
