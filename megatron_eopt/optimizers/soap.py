"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, repeat
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.foreach import stacked
from megatron_eopt.optimizers.group_settings import Scalar, also_called, check_adam_settings
from megatron_eopt.optimizers.parameters import DescribedMatrix, TensorParallelGroups, check_shard, local, names_of_last
from megatron_eopt.optimizers.soap_math import CLOCK, BasisMethod, Preconditioned, Side, update_of
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.orthogonalize.choices import check_choice, check_count
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products, validate_matmul_precision
from megatron_eopt.parallel.engine import Engine, Parameter
from megatron_eopt.parallel.layout import Layout, is_expert, on_one_rank, shared_out

Gradients = Literal["previous", "current"]
Decay = Literal["decoupled", "independent", "palm"]

EXP_AVG, EXP_AVG_SQ, STEPS = "exp_avg", "exp_avg_sq", "steps"

SIDES = (("L", "Q_L"), ("R", "Q_R"))
"""Names of the factor and of the basis of the rows, and of the columns."""

MOST_BYTES = 2**28
"""Of the equal matrices that are worked on as one stack, and of what is gathered at once, where one is not larger."""


class SOAP(BaseOptimizer):
    """Adam in the eigenbasis of Shampoo's factors [1].

    For a matrix ``p`` (m x n) with gradient ``g``, of which ``Q_L`` and ``Q_R`` are the bases so far:

    1. ``M <- beta1 M + (1 - beta1) g``; ``V <- beta2 V + (1 - beta2) (Q_L^T g Q_R)^2``, both corrected for their start;
       ``nesterov`` has ``beta1 M / (1 - beta1^(t+1)) + (1 - beta1) g / (1 - beta1^t)`` for ``M`` of step ``t``;
    2. ``p <- (1 - lr weight_decay) p - lr Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T``;
    3. ``L <- EMA(g g^T)``, ``R <- EMA(g^T g)`` by ``shampoo_beta``, corrected for their start;
    4. every ``precondition_frequency`` steps after the first, so with 4 in steps 5, 9 and 13, as in the authors' code,
       the columns of each basis are sorted by their eigenvalues, ``V`` with them, and ``Q <- QR(L Q)``, or the
       eigenvectors. The first basis always is that of the eigenvectors.

    The first gradient makes the bases alone, and moves nothing: seen in a basis made of itself, it is diagonal, and
    Adam makes full steps of the rounding beside the diagonal. ``basis_of="current"`` puts 3 and 4 in front of 1, as
    emerging-optimizers and so Megatron's ``--optimizer soap`` do, and has no such rest: most of its first update is
    rounding, whose tiny squares make the second far too large (18 times Adam's for 64 x 32 in fp32) unless the bases
    stay. A gradient that is zero makes no bases; until there is another, nothing is kept of the parameter, and it stays
    as it is.

    With ``use_kl_shampoo`` the factors are those that minimize the Kullback-Leibler divergence of N(0, L x R) from the
    gradients' distribution [2]: ``L <- EMA(g R^-1 g^T / n)``, ``R <- EMA(g^T L^-1 g / m)``, of the factors so far and
    their bases, the identity before the first. With ``basis_of="current"`` it is ``eps`` times that, as in
    emerging-optimizers: the first gradient outweighs others for some 300 steps, and bases stay nearly as it made them.

    A side longer than ``max_dim`` has no factor and no basis. Matrices with neither, and all that are not matrices, get
    Adam. Everything is kept in fp32 (fp64 for fp64 parameters); ``M`` in the basis of the parameter.

    A parameter of several logical matrices gets the steps that these would get by themselves: one whose attribute
    ``logical_matrices`` is a :class:`~megatron_eopt.matrices.Split`, a stack of matrices among them, or that
    ``split_qkv`` tells to be fused.

    A parameter that is cut, by tensor parallelism or as a DTensor (FSDP2, HSDP), takes the step of one rank. A matrix
    of Megatron's that has a factor gets a compute rank of its group, by the costs of steps and from shapes alone.
    Shards of gradient, ``M`` and ``V`` go there, in one all-to-all for many matrices, and those of the update and ``V``
    come back; factors and bases are there alone, and empty on the other ranks. With ``share_over_dp`` the data-parallel
    ranks, which have the same gradients, are among those that get matrices, and others keep their copies. Of DTensors
    each rank gathers matrices, and has factors and bases: torch's checkpoints know no tensor that one rank of several
    has. What has no factor takes its step as it lies. A gradient that is not finite on one rank is left out on all that
    share it.

    The first step makes the eigenvectors of every factor, as refreshing by ``eigh`` does: some 10 n^3 operations a side
    of n, many of them bound by memory. At 8192 that may take very long, and other ranks wait for a compute rank within
    the timeout of their group. The device is waited for there, and in no later step with ``qr``.

    Args:
        params: vectors, matrices and declared stacks of matrices, or groups of them; see
            :func:`megatron_eopt.parallel.layout.layout_of` for the attributes that say how they are sharded.
        lr: learning rate, at least 0.
        betas: of ``M`` and ``V``, each in [0, 1).
        shampoo_beta: of the factors, in [0, 1).
        eps: added to the root of ``V``, above 0.
        weight_decay: at least 0.
        precondition_frequency: steps of the optimizer from one refreshing of the bases to the next, at least 1.
        basis_method: ``qr`` or ``eigh``; also as ``use_eigh``, False or True.
        basis_of: ``previous`` gradients, or ``current``, which is the last of them.
        use_kl_shampoo: see above.
        max_dim: the longest side that has a factor, at least 0; also as ``max_precond_dim``.
        weight_decay_method: ``decoupled``; ``independent``, without ``lr`` in it; or ``palm``, with its square.
        nesterov: whether the first moment looks ahead.
        correct_bias: whether moments and factors are corrected for their start.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``.
        split_qkv: precondition the parts of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute
            ``qkv_split_shapes`` of a parameter wins.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.
        share_over_dp: whether data-parallel ranks share the work, the factors and the bases: those of the group
            ``dp_cp`` of ``pg_collection``, if it has one, or ``expt_dp`` for experts. What is cut they share if it has
            ``tp_dp_cp``, or ``tp_expt_dp``, too. Each rank's state has to be saved then, not that of one of them.

    Raises:
        ValueError: for a setting out of its range, a parameter of three or more dimensions that is not declared as a
            stack, a split that does not fit, a DTensor of which a rank holds several separate parts, or shards without
            a group.

    [1] Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321.
    [2] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    """

    carried_settings = frozenset({CLOCK})
    pairs_rows = True

    _based: set[Tensor] | None = None  # parameters known to have a basis
    _plans: dict[Tensor, list["Planned"]] | None = None
    _updated: int = 0

    @also_called(use_eigh=("basis_method", {False: "qr", True: "eigh"}), max_precond_dim="max_dim")
    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        *,
        basis_method: BasisMethod = "qr",
        basis_of: Gradients = "previous",
        use_kl_shampoo: bool = False,
        max_dim: int = 10000,
        weight_decay_method: Decay = "decoupled",
        nesterov: bool = False,
        correct_bias: bool = True,
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        pg_collection: TensorParallelGroups | None = None,
        share_over_dp: bool = False,
    ) -> None:
        self._set_split(split_qkv, is_qkv_fn, qkv_split_shapes)
        self.pg_collection, self.share_over_dp = pg_collection, share_over_dp
        adam = {"lr": lr, "betas": betas, "eps": eps, "nesterov": nesterov, "correct_bias": correct_bias}
        decay = {"weight_decay": weight_decay, "weight_decay_method": weight_decay_method}
        shampoo = {"shampoo_beta": shampoo_beta, "use_kl_shampoo": use_kl_shampoo, "max_dim": max_dim}
        bases = {"precondition_frequency": precondition_frequency, "basis_method": basis_method, "basis_of": basis_of}
        further = {"maximize": maximize, "fp32_matmul_prec": fp32_matmul_prec}
        super().__init__(params, {**adam, **decay, **shampoo, **bases, **further})

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it."""
        return super().settings() | {"split_qkv": self.split_qkv}

    @property
    def matrices_updated(self) -> int:
        """Those that were worked on: matrices without a factor as well, which get Adam."""
        return self._updated

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter."""
        described: dict[Tensor, list[DescribedMatrix]] = {}
        for parameter in (p for p in self._parameters() if p.ndim > 1):
            names = self.split_of(parameter).names(self.layout(parameter).shape[0])
            described[parameter] = []
            for name, plan in zip(names, self._planned(parameter), strict=True):
                dealt, alone = ("owner", "duplicated") if plan.layout.sharded else ("share", "local")
                scheme = alone if plan.compute_rank is None else dealt
                described[parameter].append(DescribedMatrix(name, plan.layout.shape, scheme, 1.0, None))
        return described

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies: of a stack each of its matrices, of fewer dimensions this rank's part as a column."""
        if parameter.ndim == 0 or (parameter.ndim == 1 and not isinstance(parameter, DTensor)):
            return on_one_rank((parameter.numel(), 1))
        layout, name = super().layout(parameter), "expt_dp" if is_expert(parameter) else "dp_cp"
        if not self.share_over_dp or isinstance(parameter, DTensor):
            return layout
        group, joint = (getattr(self.pg_collection, each, None) for each in (name, f"tp_{name}"))
        return layout if group is None else shared_out(layout, group, joint, name)

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter; what is no matrix is dealt with elementwise, and so never split."""
        return WHOLE if parameter.ndim < 2 else super().split_of(parameter)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Adam's moments, the second in the eigenbases, the steps, and each matrix' factors and bases, whole."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return [
            StateTensor(EXP_AVG, dtype=wide),
            StateTensor(EXP_AVG_SQ, dtype=wide),
            StateTensor(STEPS, dims=(), dtype=torch.float64),
            *(
                StateTensor(key, (length, length), part, wide, plan.compute_rank)
                for part, plan in enumerate(self._planned(parameter))
                for keys, length in zip(plan.sides, plan.layout.shape, strict=True)
                for key in keys
            ),
        ]

    def _check_ranges(self, group: Mapping[str, Any]) -> None:
        check_adam_settings(type(self).__name__, group, "shampoo_beta")

    def _check_group(self, group: dict[str, Any]) -> None:
        name, indices = type(self).__name__, names_of_last(self.param_groups, shapes=False)
        for key, least in (("precondition_frequency", 1), ("max_dim", 0)):
            check_count(f"{name}: {key}", group[key], least)
        for key, of_key in (("weight_decay_method", Decay), ("basis_method", BasisMethod), ("basis_of", Gradients)):
            check_choice(f"{key} of {name}", group[key], get_args(of_key))
        validate_matmul_precision(group["fp32_matmul_prec"])
        for parameter, called, index in zip(group["params"], names_of_last(self.param_groups), indices, strict=True):
            try:
                self.layout(parameter)
            except ValueError as error:
                raise ValueError(f"{name} cannot lay {called} out: {error}") from error
            if parameter.ndim > 1:
                self._check_matrix(parameter, f"takes matrices and vectors, but {index}")
                check_shard(parameter, self.pg_collection, called)
        group.setdefault(CLOCK, 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        super().load_state_dict(state_dict)
        self._based = None

    def _described(self, name: str, parameter: Tensor) -> Parameter:
        found = super()._described(name, parameter)
        return replace(found, layout=self.layout(parameter), split=self.split_of(parameter))

    def _planned(self, parameter: Tensor) -> list["Planned"]:
        """How each logical matrix of a parameter is worked on: the same on all ranks that share it.

        What is cut is dealt to compute ranks, the costliest first, each to the rank that has the least so far. Group by
        group, so that a further one leaves the state of those before it where it is.
        """
        if self._plans is None or parameter not in self._plans:
            planned: dict[Tensor, list[Planned]] = {}
            loads: dict[str, list[int]] = {}
            for group in self.param_groups:
                for each in group["params"]:
                    pairs = zip(self.key_ends(each), self.matrix_layouts(each), strict=True)
                    planned[each] = [Planned(*pair, group["max_dim"] if each.ndim > 1 else -1) for pair in pairs]
                plans = (planned[each] for each in group["params"] if not isinstance(each, DTensor))
                dealt = (plan for of_one in plans for plan in of_one if plan.gathered)
                for plan in sorted(dealt, key=lambda plan: -plan.cost):
                    load = loads.setdefault(plan.layout.label, [0] * plan.layout.ranks)
                    plan.compute_rank = load.index(min(load))
                    load[plan.compute_rank] += plan.cost
            self._plans = planned
        return self._plans[parameter]

    def _take(self, accepted: Tensor) -> None:
        self._session.changing = True
        for group in self.param_groups:
            group[CLOCK] += 1
        if tasks := self._tasks(accepted):
            soap(tasks, self.engine)
        self._updated += sum(len(task.plans) for task in tasks if task.parameter.ndim > 1)

    def _tasks(self, accepted: Tensor) -> list["Task"]:
        """What is worked on in this step: the same on all ranks that share a parameter."""
        self._based = set() if self._based is None else self._based
        grouped = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        tasks = []
        for index, ((parameter, group), flag) in enumerate(zip(grouped, accepted.unbind(), strict=True)):
            plans = self._planned(parameter)
            # also without a gradient where others wait for this rank's part
            if parameter.grad is not None or any(plan.gathered for plan in plans):
                state = self.state.get(parameter, {}) if parameter.grad is None else self._state_of(parameter, STEPS)
                first = parameter not in self._based and any(plan.cost for plan in plans)
                tasks.append(Task(index, parameter, state, group, flag, first, plans, self.engine))
        # a device is waited for until all bases are known to be there, and no longer
        if starting := [task for task in tasks if task.first]:
            for task, has_bases, makes_them in zip(starting, *_known(starting, self.engine), strict=True):
                task.first = not has_bases
                self._based |= {task.parameter} if has_bases or makes_them else set()
        return [task for task in tasks if not task.first or task.parameter in self._based]


class Planned:
    """How the steps of a logical matrix are made."""

    def __init__(self, end: str, layout: Layout, longest: int) -> None:
        (rows, cols), self.layout = layout.shape, layout
        has_factor = [min(rows, cols) > 0 and length <= longest for length in (rows, cols)]
        # keys of factor and basis of the rows, and of the columns; none of a side without
        self.sides = [[f"{key}{end}" for key in keys if has] for keys, has in zip(SIDES, has_factor, strict=True)]
        # of a step, up to a factor that is the same for all: cubes of sides, and products with them
        self.cost = sum(n * (n**2 + rows * cols) for n in compress((rows, cols), has_factor))
        self.gathered = any(has_factor) and layout.ranks > 1  # whether a rank needs what others have of it
        self.compute_rank: int | None = None  # the one of its group that alone needs it


@dataclass(eq=False)
class Task:
    """A parameter that a step works on, with or without a gradient: the same on all ranks that share it."""

    index: int
    parameter: Tensor
    state: dict[str, Any]
    settings: Mapping[str, Any]
    accepted: Tensor  # if not, everything stays as it is
    first: bool  # whether it has no bases so far, but is to have some; only if accepted
    plans: list[Planned]  # of each logical matrix
    engine: Engine

    @property
    def label(self) -> str:
        """Of the ranks that exchange matrices of it; empty where none is exchanged."""
        return next((plan.layout.label for plan in self.plans if plan.gathered), "")

    @cached_property
    def kinds(self) -> list[Hashable]:
        """Of each logical matrix what equal ones have in common."""
        ours = id(self.settings), self.first, self.parameter.dtype, min(self.parameter.ndim, 2)
        return [(*ours, *map(bool, plan.sides), plan.layout.shape, plan.layout.rectangles) for plan in self.plans]

    @cached_property
    def shards(self) -> list[list[Tensor]]:
        """This rank's shards of the logical matrices: of weights, first and second moments, and gradients."""
        return [self.engine.split([self.index], [x]) for x in (*self._written(), self.gradient())]

    def gradient(self) -> Tensor:
        """This rank's part of the gradient; zeros where there is none."""
        x = self.parameter
        return torch.atleast_1d(local(torch.zeros_like(x) if x.grad is None else x.grad))

    def put_back(self) -> None:
        """End with :attr:`shards`, which were written to and may be copies."""
        for x, shards in zip(self._written(), self.shards, strict=False):
            memory = {each.untyped_storage().data_ptr() for each in shards if each.numel()}
            if memory - {x.untyped_storage().data_ptr()}:
                x.copy_(self.engine.merge([self.index], shards)[0])
        del self.shards

    def _written(self) -> list[Tensor]:
        # this rank's part, sharing its memory; a scalar as a vector, for only that can be split
        return [torch.atleast_1d(local(x)) for x in (self.parameter, self.state[EXP_AVG], self.state[EXP_AVG_SQ])]


def _known(tasks: Sequence[Task], engine: Engine) -> list[list[bool]]:
    """Which parameters have bases, and which others can make them: of a gradient that is accepted and not zero.

    A basis of nothing would turn to that of the gradients to come only step by step.
    """
    found = []
    for task in tasks:
        shards = zip(task.plans, engine.split([task.index], [task.gradient()]), strict=True)
        found.append(torch.stack([shard.any() for plan, shard in shards if plan.cost]).any().float())
    some = torch.stack(engine.sums(found, [task.label for task in tasks])) > 0
    steps = torch.stack([task.state.get(STEPS, torch.zeros_like(found[0])) for task in tasks])
    accepted = torch.stack([task.accepted for task in tasks])
    return torch.stack([steps > 0, accepted & some]).tolist()


def soap(tasks: Sequence[Task], engine: Engine, most_bytes: int = MOST_BYTES) -> None:
    """One step of SOAP.

    Equal matrices of a bucket are worked on as stacks. Of those that are cut, shards of gradient and moments go to a
    compute rank, and those of update and second moment come back; DTensors are gathered by every rank that shares them,
    and all make the same of the same numbers. All ranks name the same of those that are shared, in the same order.
    """
    steps = [task.state[STEPS] for task in tasks]
    counted = torch.stack(steps) + torch.stack([task.accepted for task in tasks])
    torch._foreach_copy_(steps, list(counted.unbind()))
    for buckets in _buckets(tasks, most_bytes):
        # of three at work, shards of one arrive, one is computed, and results of one leave
        at_work: deque[Iterator[None]] = deque(maxlen=3)
        for run in chain((_run(bucket, engine) for bucket in buckets), repeat(iter(()), 2)):
            at_work.appendleft(run)
            for each in at_work:
                next(each, None)


Piece = tuple[Task, int]  # a logical matrix of a parameter


def _buckets(tasks: Sequence[Task], most_bytes: int) -> Iterator[list[list[Piece]]]:
    """The matrices that are worked on at once, equal ones together where they can be, of so many bytes on any rank.

    Those of one group of ranks and one dtype, which are exchanged, follow one another.
    """
    found: dict[tuple[str, str], dict[tuple[Hashable, ...], list[Task]]] = {}
    for task in tasks:
        found.setdefault((task.label, str(task.parameter.dtype)), {}).setdefault(tuple(task.kinds), []).append(task)
    for _, alike in sorted(found.items()):
        buckets: list[list[Piece]] = [[]]
        loads: Counter[int | None] = Counter()
        for task, i, plan in ((each, *of_one) for each in chain(*alike.values()) for of_one in enumerate(each.plans)):
            # gradient and moments come together; a factor may be larger
            most = max([3 * math.prod(plan.layout.shape), *(n**2 for n in compress(plan.layout.shape, plan.sides))])
            size = most * task.state[EXP_AVG].element_size()
            if buckets[-1] and loads[plan.compute_rank] + size > most_bytes:
                buckets.append([])
                loads.clear()
            loads[plan.compute_rank] += size
            buckets[-1].append((task, i))
        yield buckets


def _run(bucket: Sequence[Piece], engine: Engine) -> Iterator[None]:
    """Work on a bucket: start to bring matrices together, yield, compute and start the way back, yield, and write."""
    kinds: dict[Hashable, list[Piece]] = {}
    for task, i in sorted(bucket, key=lambda piece: piece[0].plans[piece[1]].compute_rank or 0):
        kinds.setdefault(task.kinds[i], []).append((task, i))
    stacks = [Stack(pieces, engine) for pieces in kinds.values()]
    yield from _exchange(stacks, engine.gather_whole)
    for stack in stacks:
        stack.compute()
    yield from _exchange(stacks, engine.scatter_back)
    for stack in stacks:
        stack.apply()
    for task, i in bucket:
        if i == len(task.plans) - 1:
            task.put_back()


def _exchange(stacks: Sequence["Stack"], verb: Callable[..., Callable[[], list[Tensor]]]) -> Iterator[None]:
    """Send the tensors of what is cut, yield, and put what arrives in their place; only if there are some."""
    cut = [stack for stack in stacks if stack.plan.gathered and stack.tensors]
    if not cut:
        return
    sent = [(x, stack.matrix, stack.numbers) for stack in cut for x in stack.tensors]
    tensors, matrices, numbers = zip(*sent, strict=True)
    wait = verb(tensors, matrices, [each for each in numbers if each])
    yield
    arrived = iter(wait())
    for stack in cut:
        stack.tensors = [next(arrived) for _ in stack.tensors]


class Stack:
    """Equal matrices of parameters of one group, at work in a step, in the order of their compute ranks."""

    def __init__(self, pieces: Sequence[Piece], engine: Engine) -> None:
        task, i = pieces[0]
        self.plan, self.matrix = task.plans[i], engine.matrices[task.index][i]
        self.settings, self.first = task.settings, task.first
        self.states = [(each.state, each.plans[j].sides) for each, j in pieces]
        ranks, rank = [each.plans[j].compute_rank for each, j in pieces], self.plan.layout.rank
        self.numbers = [] if ranks[0] is None else [ranks.count(each) for each in range(self.plan.layout.ranks)]
        self.own = slice(sum(self.numbers[:rank]), sum(self.numbers[: rank + 1]) if self.numbers else None)
        shards = zip(*([of_all[j] for of_all in each.shards] for each, j in pieces), strict=True)
        self.weights, momenta, self.squares, gradients = (list(of_pieces) for of_pieces in shards)
        column = (-1, *[1] * momenta[0].ndim)
        self.accepted = torch.stack([each.accepted for each, _ in pieces]).view(column)
        self.steps = torch.stack([state[STEPS] for state, _ in self.states]).view(column)
        self.moves = not (self.first and self.plan.cost and self.settings["basis_of"] == "previous")
        gradient, momentum = stacked(gradients).to(momenta[0].dtype), stacked(momenta)
        gradient = torch.where(self.accepted, -gradient if self.settings["maximize"] else gradient, 0.0)
        if self.moves:
            # elementwise, so each rank does it with its shards
            taken = torch.where(self.accepted, gradient, momentum)
            momentum = torch.lerp(momentum, taken, 1 - self.settings["betas"][0])
            torch._foreach_copy_(momenta, list(momentum.unbind()))
        self.tensors = [gradient, momentum, stacked(self.squares)]  # which are handed on

    def compute(self) -> None:
        """Make the updates of the matrices that this rank has whole, and let gradients into their factors and bases."""
        gradient, momentum, squares = self.tensors
        update: Tensor | None = squares
        if states := self.states[self.own]:
            kept = [[[state[key] for key in sides[dim]] for state, sides in states] for dim in (0, 1)]
            stacks = [[stacked(of_all) for of_all in zip(*of_side, strict=True)] for of_side in kept]
            left, right = (Side(*each) if each else None for each in stacks)
            steps, accepted = self.steps[self.own], self.accepted[self.own]
            matrices = Preconditioned(gradient, momentum, squares, steps, accepted, (left, right))
            with fp32_products(self.settings["fp32_matmul_prec"]):
                update = update_of(matrices, self.settings, self.first)
            for of_side, new in zip(kept, stacks, strict=True):
                for old, of_all in zip(zip(*of_side, strict=True), new, strict=True):
                    torch._foreach_copy_(list(old), list(of_all.unbind()))
        self.tensors = [update, squares] if self.moves and update is not None else []

    def apply(self) -> None:
        """Subtract the updates, and write the second moments."""
        if not self.moves:
            return
        update, squares = self.tensors
        lr, weights = self.settings["lr"], stacked(self.weights)
        decay = foreach.decay_power(lr, self.settings["weight_decay_method"]) * self.settings["weight_decay"]
        moved = (weights.to(update.dtype) * (1 - decay) - update * lr).to(weights.dtype)
        torch._foreach_copy_(self.weights, list(torch.where(self.accepted, moved, weights).unbind()))
        torch._foreach_copy_(self.squares, list(squares.unbind()))
