"""Spectron: low-rank weights with spectrally bounded steps of factors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.factors.low_rank import (
    Factors,
    Weight,
    is_wide,
    largest_singular_values,
    orthogonalized,
    projected,
    side_of,
    summed,
)
from megatron_eopt.factors.low_rank_checks import check_cut, check_factor, check_pairs, check_rank
from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.optimizers.orthogonalized import refuse_blockwise
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.spectral import start_vector
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.settings.groups import warn
from megatron_eopt.settings.iteration import iteration_of, note_short_schedule
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import BELOW_1, Scalar, count
from megatron_eopt.step import foreach
from megatron_eopt.step.foreach import where
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    local,
    names_of_last,
    scale_rows,
)
from megatron_eopt.step.session import StepCache
from megatron_eopt.step.stacked_optimizer import StackedOptimizer
from megatron_eopt.step.stacks import GRADIENT, WEIGHT, Chunk, Stack, wide
from megatron_eopt.step.state import MOMENTUM_BUFFER, SIDES, Dim, StateTensor, check_placements

# State of a weight. The last two, and the momentum, are of each factor: _A or _B follows, and the end of its matrix.
PROJECTED = "projected"  # 1 where the factors are those of the weight, 0 before the first step
FACTOR = "factor"
U = "u"  # the singular vector that the last step found
LETTERS = "AB"


def factor_pairs(pairs: Iterable[Sequence[Any]], **settings: Any) -> dict[str, Any]:
    """Group of parameters that are factors themselves::

        Spectron([factor_pairs([(layer.up, layer.down) for layer in layers], lr=0.01), {"params": dense_weights}])

    Args:
        pairs: the two factors of each weight, in any order and orientation (``A`` and ``B``, or ``A`` and ``B^T`` as
            two linear layers hold them), each a parameter or its name and it.
        **settings: of the group.
    """
    params = []
    for one, other in pairs:
        params += [one, other]
    return {"params": params, "pairs": True, **settings}


def step_of_factors(factors: Sequence[Factors], engine: Engine, power_steps: int) -> None:
    """Step factors, both of each matrix among them."""
    factors = summed(factors, engine)
    for some in factors:
        lr = some.group["lr"]
        # A -= lr * weight_decay * A; 1 - lr * weight_decay as one factor would be rounded alike in every step
        foreach.subtract(some.values, some.values, lr * some.group["weight_decay"], some.ok)
        # mA += (1 - beta) (gA - mA)
        foreach.average(some.momenta, list(some.gradients), some.group["momentum_beta"], False, some.ok)
        some.gradients = ()
    directions = orthogonalized(factors, engine)  # orth(mA)
    norms = largest_singular_values(factors, engine, power_steps)  # sA, sB
    norm_of = dict[int, Tensor]()
    for some, of_stack in zip(factors, norms, strict=True):
        norm_of |= zip(some.numbers, of_stack.unbind(), strict=True)
    for some, own in zip(factors, norms, strict=True):
        others = torch.stack([norm_of[number ^ 1] for number in some.numbers])
        bound = own + others + 1  # lr' = lr / (sA + sB + 1)
        updates = some.upright(torch.stack([directions.pop(number) for number in some.numbers]))
        updates = updates * (some.group["lr"] / bound).view(-1, 1, 1)
        foreach.subtract(some.values, updates.unbind(), 1.0, some.ok)  # A -= lr' orth(mA)


def write_weights(stack: Stack) -> None:
    """``W = A B^T``."""
    before = stack.state(WEIGHT)
    A, B = (stack.owned(f"{FACTOR}_{letter}") for letter in LETTERS)
    W = (A @ B.mT).to(before.dtype)
    changes = (stack.group["lr"] != 0) & (True if stack.ok is None else stack.ok)
    stack.keep(WEIGHT, torch.where(changes, W, before) if isinstance(changes, Tensor) else W if changes else before)


class FactorPlan(NamedTuple):
    """The number of each parameter's first factor, and the engine that orthogonalizes momenta of factors."""

    first: dict[Tensor, int]
    engine: Engine


class Spectron(StackedOptimizer):
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
    persistent_group_keys = frozenset({"pairs"})
    fixed_by_state = ("rank", "pairs")
    fp32_matmul_prec: MatmulPrecision
    num_power_iterations: int

    _factors: FactorPlan  # made by prepare()
    _errors: Mapping[str, float] = {}

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
        super().__init__(params, locals())

    def _iteration(self, group: Mapping[str, Any]) -> NewtonSchulz:
        return iteration_of(group, self.fp32_matmul_prec, self.execution.symmetric_products)

    @property
    def projection_errors(self) -> dict[str, float]:
        """Parameter -> ``||W - A B^T||_F / ||W||_F`` of its worst matrix."""
        return dict(self._errors)

    def explain(self) -> str:
        """The plan for factors, a table; all ranks ask."""
        self.prepare()
        return self._factors.engine.explain()

    def plan(self) -> str:
        """The table of :meth:`explain`, before ranks agree."""
        return self._proposed_plan().engine.explain()

    @property
    def newton_schulz_calls(self) -> int:
        """How many logical matrices all steps so far have updated."""
        return self._updated

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter."""
        if settled:
            self.prepare()
        plan = self._factors if settled else self._proposed_plan()
        schemes = {i: bucket.scheme for bucket in plan.engine.plan.buckets for i in bucket.matrices}
        described: dict[Tensor, list[DescribedMatrix]] = {}
        for parameter, number in plan.first.items():
            described[parameter] = []
            for name, layout in self.named_layouts(parameter):
                count = len(self._sides(parameter, layout))
                cut = [schemes[i] for i in range(number, number + count) if schemes[i] != "local"]
                scheme = cut[-1].replace("_", " ") if cut else "local"
                described[parameter].append(DescribedMatrix(name, layout.shape, scheme, 1.0, None))
                number += count
        return described

    def _settled(self, engine: Engine) -> StepCache:
        """Also settle the factors."""
        settled = super()._settled(engine)
        plan = self._proposed_plan()
        plan.engine.prepare()
        self._factors = plan
        return settled

    def _check_together(self, group: Mapping[str, Any]) -> None:
        self._iteration(group)

    def _proposed_plan(self) -> FactorPlan:
        """Factors and their engine, before ranks agree on it."""
        first = dict[Tensor, int]()
        described = list[ParamSpec]()
        for name, parameter in zip(self._names(), self._parameters(), strict=True):
            first[parameter] = len(described)
            iteration = self._iteration(self.group_of(parameter))
            for part, matrix in self.named_layouts(parameter):
                for end, layout in self._sides(parameter, matrix):
                    called = f"{name}[{f'{part} {end}'.strip()}]" if end else name
                    described.append(ParamSpec(called, wide(parameter), layout, iteration=iteration))
        return FactorPlan(first, Engine(described, self._parameters()[0].device, self.tp_mode))

    def _sides(self, parameter: Tensor, matrix: Layout) -> list[tuple[str, Layout]]:
        """Letters and layouts of the factors of a logical matrix, or of the one that a parameter is."""
        group = self.group_of(parameter)
        if group["pairs"]:
            return [("", side_of(matrix, is_wide(matrix), min(matrix.shape)))]
        return [(letter, side_of(matrix, dim, group["rank"])) for dim, letter in enumerate(LETTERS)]

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale rows of the first factors."""
        self.prepare()
        super().scale_rows(parameters, factors)
        for parameter, of_matrices in self._by_matrix(parameters, factors):
            if not self.group_of(parameter)["pairs"]:
                state = self._states.of(parameter)
                for end, of_rows in zip(self.key_ends(parameter), of_matrices, strict=True):
                    scale_rows(local(state[f"{FACTOR}_A{end}"]), of_rows)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Factors, momenta and singular vectors; without factors for pairs."""
        group = self.group_of(parameter)
        dtype = wide(parameter)
        if group["pairs"]:
            of_rows = (SIDES[is_wide(self.layout(parameter))],)
            momentum = StateTensor(MOMENTUM_BUFFER, dtype=dtype)
            return [momentum, StateTensor(U, of_rows, dtype=dtype, start=start_vector)]
        tensors = [StateTensor(PROJECTED, (), dtype=dtype, non_negative=True)]
        for number, end in enumerate(self.key_ends(parameter)):
            for key in (FACTOR, MOMENTUM_BUFFER, U):
                for dim, letter in enumerate(LETTERS):
                    side: Dim = SIDES[dim]
                    dims = (side,) if key == U else (side, group["rank"])
                    start = start_vector if key == U else None
                    tensors.append(StateTensor(f"{key}_{letter}{end}", dims, number, dtype, start=start))
        return tensors

    def _check_group(self, group: dict[str, Any]) -> None:
        group.setdefault("pairs", False)
        refuse_blockwise(self, "singular values of factors")
        super()._check_group(group)
        note_short_schedule(self._iteration(group), map(self._iteration, self.param_groups[:-1]))
        name = type(self).__name__
        names = names_of_last(self.param_groups)
        for parameter, called in zip(group["params"], names, strict=True):
            layout = self.layout(parameter)
            check_cut(name, called, layout)
            check_placements(f"{name}: {called}", parameter, self.state_tensors(parameter), self.matrix_layouts)
            if group["pairs"]:
                check_factor(name, called, layout, self.split_of(parameter))
            else:
                check_rank(name, called, group["rank"], self.named_layouts(parameter))
        if group["pairs"]:
            check_pairs(name, names, list(map(self.layout, group["params"])))

    def _steps_of(self, ok: Flag) -> dict[int, bool]:
        """Weights that have factors, after some are projected, and factors of which both of a pair step."""
        steps = super()._steps_of(ok)
        parameters = self._parameters()
        waiting = [parameters[i] for i in steps if not self._is_projected(parameters[i])]
        if waiting:
            self._project(waiting, ok)
            steps = {i: False for i in steps if self._is_projected(parameters[i])}
        first = 0
        for group in self.param_groups:
            end = first + len(group["params"])
            if group["pairs"]:
                for A in range(first, end, 2):
                    if not steps.keys() >= {A, A + 1}:
                        steps.pop(A, None)
                        steps.pop(A + 1, None)
            first = end
        return steps

    @fp32_products("highest")
    def _run(self, chunks: Sequence[Sequence[Chunk[Stack]]]) -> None:
        """All factors step together, between the products of weights, which are as large as these."""
        factors = list[Factors]()
        for chunk in chain(*chunks):
            for stack in chunk.stacks:
                factors += self._factors_of(stack)
            chunk.forget()
        if factors:
            step_of_factors(factors, self._factors.engine, self.num_power_iterations)
        for chunk in chain(*chunks):
            for stack in chunk.stacks:
                if not stack.group["pairs"]:
                    write_weights(stack)
            chunk.end()

    def _factors_of(self, stack: Stack) -> list[Factors]:
        """The factors of matrices, or those that parameters are, with their gradients."""
        numbers = [self._factors.first[member.parameter] + 2 * member.number for member in stack.members]
        if stack.group["pairs"]:
            gradients = [g.to(stack.dtype) for g in stack.shards(GRADIENT)]
            return [self._equal(stack, "", numbers, stack.shards(WEIGHT), gradients)]
        A, B = (stack.of_each(f"{FACTOR}_{letter}") for letter in LETTERS)
        G = stack.state(GRADIENT).to(stack.dtype)
        of_B = [number + 1 for number in numbers]
        return [
            self._equal(stack, "_A", numbers, A, G @ torch.stack(B)),  # gA
            self._equal(stack, "_B", of_B, B, G.mT @ torch.stack(A)),  # gB
        ]

    def _equal(
        self, stack: Stack, end: str, numbers: list[int], values: list[Tensor], gradients: Sequence[Tensor] | Tensor
    ) -> Factors:
        [matrix] = self._factors.engine.matrices[numbers[0]]
        [other] = self._factors.engine.matrices[numbers[0] ^ 1]
        return Factors(
            group=stack.group,
            ok=stack.ok,
            matrix=matrix,
            numbers=numbers,
            transposed=not end and stack.matrix.shape != matrix.shape,
            values=values,
            momenta=stack.of_each(MOMENTUM_BUFFER + end),
            us=stack.of_each(U + end),
            gradients=gradients,
            summed_over=other.group if end else "",
        )

    def _is_projected(self, parameter: Tensor) -> bool:
        """Whether a weight is the product of its factors; a factor itself is not projected."""
        return self.group_of(parameter)["pairs"] or self._has_begun(parameter, PROJECTED)

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
        weights = []
        owners = []  # of each of these: parameter and end of keys
        for index, p in zip(self._indices_of(new), new, strict=True):
            number = self._factors.first[p] // 2
            shards = self.engine.split([index], [local(p)])
            for end, layout, shard in zip(self.key_ends(p), self.matrix_layouts(p), shards, strict=True):
                turn = number % layout.ranks  # so that ranks share the work
                weights.append(Weight(shard.to(wide(p)), layout, self.group_of(p)["rank"], turn))
                owners.append((p, end))
                number += 1
        found = projected(weights)
        self._note_errors([p for p, _ in owners], torch.cat([each.error for each in found]).tolist())
        self._session.changing = True
        for (p, end), each in zip(owners, found, strict=True):
            state = self.state[p]
            for letter, rows in zip(LETTERS, (each.A, each.B), strict=True):
                local(state[f"{FACTOR}_{letter}{end}"]).copy_(rows)
                # up to its norm its singular vector, whatever the order of rows, which may follow the ranks
                local(state[f"{U}_{letter}{end}"]).copy_(rows[:, 0])
        for p in new:
            self.state[p][PROJECTED].fill_(1)
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
