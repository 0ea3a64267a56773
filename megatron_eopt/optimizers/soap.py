"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.group_settings import Scalar, also_called, check_adam_settings, decay_power
from megatron_eopt.optimizers.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_completed,
    local,
    names_of_last,
)
from megatron_eopt.optimizers.soap_math import CLOCK, BasisMethod, Preconditioned, Side, update_of
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products, validate_matmul_precision
from megatron_eopt.parallel.engine import Engine, Parameter
from megatron_eopt.parallel.layout import Layout, is_expert, is_sharded, on_one_rank
from megatron_eopt.parallel.records import cut

Gradients = Literal["previous", "current"]

EXP_AVG, EXP_AVG_SQ, STEPS = "exp_avg", "exp_avg_sq", "steps"

SIDES = (("L", "Q_L"), ("R", "Q_R"))
"""Names of the factor and of the basis of the rows, and of the columns."""

MAX_DIM = "max_dim"
"""Setting of a group: the longest side that has a factor."""

MOST_BYTES = 2**28
"""Of the whole tensors that are gathered at once, where a single parameter does not take more."""


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
    rounding, whose tiny squares make the second far too large (18 times Adam's for 64 x 32 in fp32). A gradient that is
    zero makes no bases; until there is another, nothing is kept of the parameter, and it stays as it is.

    With ``use_kl_shampoo`` the factors are those that minimize the Kullback-Leibler divergence of N(0, L x R) from the
    gradients' distribution [2]: ``L <- EMA(g R^-1 g^T / n)``, ``R <- EMA(g^T L^-1 g / m)``, of the factors so far and
    their bases, the identity before the first.

    A side longer than ``max_dim`` has no factor and no basis. Matrices with neither, and all that are not matrices, get
    Adam. Everything is kept in fp32 (fp64 for fp64 parameters); ``M`` in the basis of the parameter.

    A parameter of several logical matrices gets the steps that these would get by themselves: one whose attribute
    ``logical_matrices`` is a :class:`~megatron_eopt.matrices.Split`, a stack of matrices among them, or that
    ``split_qkv`` tells to be fused.

    A parameter that is cut, by tensor parallelism or as a DTensor (FSDP2, HSDP), takes the step of one rank. Of its
    matrices that have a factor each rank gathers gradient, ``M`` and ``V``, in one all-gather for many of them, and
    computes the whole step; so factors and bases are whole on every rank, and at any number of ranks the same. What has
    no factor takes its step as it lies. A gradient that is not finite on one rank is left out on all that share it.

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

    Raises:
        ValueError: for a setting out of its range, a parameter of three or more dimensions that is not declared as a
            stack, a split that does not fit, a DTensor of which a rank holds several separate parts, or shards without
            a group.

    [1] Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321.
    [2] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    """

    carried_settings = frozenset({CLOCK})
    pairs_rows = True

    # Parameters known to have a basis.
    _based: set[Tensor] | None = None
    _updated: int = 0

    @also_called(use_eigh=("basis_method", {False: "qr", True: "eigh"}), max_precond_dim=MAX_DIM)
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
        weight_decay_method: Literal["decoupled", "independent", "palm"] = "decoupled",
        nesterov: bool = False,
        correct_bias: bool = True,
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        pg_collection: TensorParallelGroups | None = None,
    ) -> None:
        self._set_split(split_qkv, is_qkv_fn, qkv_split_shapes)
        self.pg_collection = pg_collection
        adam = {"lr": lr, "betas": betas, "eps": eps, "nesterov": nesterov, "correct_bias": correct_bias}
        decay = {"weight_decay": weight_decay, "weight_decay_method": weight_decay_method}
        shampoo = {"shampoo_beta": shampoo_beta, "use_kl_shampoo": use_kl_shampoo, MAX_DIM: max_dim}
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
        """The logical matrices of each parameter, of which every rank computes all that it has a part of."""
        described = {}
        for parameter in (p for p in self._parameters() if p.ndim > 1):
            names = self.split_of(parameter).names(self.layout(parameter).shape[0])
            described[parameter] = [
                DescribedMatrix(name, each.shape, "duplicated" if each.sharded else "local", 1.0, None)
                for name, each in zip(names, self.matrix_layouts(parameter), strict=True)
            ]
        return described

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies: of a stack each of its matrices, of one dimension as a column."""
        if parameter.ndim == 0:
            return on_one_rank((1, 1))
        if parameter.ndim > 1 or isinstance(parameter, DTensor):
            return super().layout(parameter)
        group = getattr(self.pg_collection, "expt_tp" if is_expert(parameter) else "tp", None)
        if not is_sharded(parameter) or group is None or group.size() == 1:
            return on_one_rank((parameter.numel(), 1))
        shape = (parameter.numel() * group.size(), 1)
        return Layout(shape, cut(shape, 0, group.size()), group, "expt_tp" if is_expert(parameter) else "tp")

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter; what is no matrix is dealt with elementwise, and so never split."""
        return WHOLE if parameter.ndim < 2 else super().split_of(parameter)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Adam's moments, the second in the eigenbases, the steps, and each matrix' factors and bases, whole."""
        group = self.group_of(parameter)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        layouts = self.matrix_layouts(parameter) if parameter.ndim > 1 else []
        return [
            StateTensor(EXP_AVG, dtype=wide),
            StateTensor(EXP_AVG_SQ, dtype=wide),
            StateTensor(STEPS, dims=(), dtype=torch.float64),
            *(
                StateTensor(key + end, (length, length), part, wide)
                for part, (layout, end) in enumerate(zip(layouts, self.key_ends(parameter), strict=False))
                for keys, length in zip(SIDES, layout.shape, strict=True)
                if length <= group[MAX_DIM] and 0 not in layout.shape
                for key in keys
            ),
        ]

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        check_adam_settings(name, group)
        if not 0 <= group["shampoo_beta"] < 1:
            raise ValueError(f"{name}: shampoo_beta must lie in [0, 1), got {group['shampoo_beta']}")
        for key, least in (("precondition_frequency", 1), (MAX_DIM, 0)):
            if not isinstance(group[key], int) or group[key] < least:
                raise ValueError(f"{name}: {key} must be a whole number of at least {least}, got {group[key]!r}")
        check_choice(
            f"weight_decay_method of {name}", group["weight_decay_method"], ("decoupled", "independent", "palm")
        )
        check_choice(f"basis_method of {name}", group["basis_method"], get_args(BasisMethod))
        check_choice(f"basis_of of {name}", group["basis_of"], get_args(Gradients))
        validate_matmul_precision(group["fp32_matmul_prec"])
        for parameter, called in zip(group["params"], names_of_last(self.param_groups), strict=True):
            if parameter.ndim > 1:
                self._check_matrix(parameter, f"takes matrices and vectors, but {called}")
                check_completed(parameter, self.pg_collection, called)
            try:
                self.matrix_layouts(parameter)
            except ValueError as error:
                raise ValueError(f"{name} cannot lay {called} out: {error}") from error
        group.setdefault(CLOCK, 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        super().load_state_dict(state_dict)
        self._based = None

    def _described(self, name: str, parameter: Tensor) -> Parameter:
        return Parameter(name, parameter.dtype, self.layout(parameter), self.split_of(parameter))

    def _take(self, accepted: Tensor) -> None:
        for group in self.param_groups:
            group[CLOCK] += 1
        tasks = list(self._tasks(accepted))
        soap(tasks, self.engine)
        self._updated += sum(len(task.sides) for task in tasks if task.parameter.ndim > 1)

    def _tasks(self, accepted: Tensor) -> Iterator["Task"]:
        """What is worked on in this step: the same on all ranks that share a parameter."""
        self._based = set() if self._based is None else self._based
        grouped = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for index, ((parameter, group), flag) in enumerate(zip(grouped, accepted.unbind(), strict=True)):
            state = self.state.get(parameter, {}) if parameter.grad is None else self._state_of(parameter)
            sides = [_sides(state, end) for end in self.key_ends(parameter)]
            factored = [i for i, of_matrix in enumerate(sides) if of_matrix != (None, None)]
            gathered = [i for i in factored if self.engine.matrices[index][i].sharded]
            # also without a gradient where others wait for this rank's part
            if parameter.grad is None and not gathered:
                continue
            # a device is waited for until a basis is known to be there, and no longer
            if factored and parameter not in self._based and state[STEPS] > 0:
                self._based.add(parameter)
            first = bool(factored) and parameter not in self._based
            if not first or flag:
                yield Task(index, parameter, state, group, flag, first, sides, gathered)


def _sides(state: Mapping[str, Tensor], end: str) -> tuple[Side | None, Side | None]:
    left, right = (
        Side(state[factor + end], state[basis + end]) if factor + end in state else None for factor, basis in SIDES
    )
    return left, right


@dataclass(frozen=True)
class Task:
    """A parameter that a step works on, with or without a gradient: the same on all ranks that share it."""

    index: int
    parameter: Tensor
    state: dict[str, Any]
    settings: Mapping[str, Any]
    accepted: Tensor  # if not, everything stays as it is
    first: bool  # whether it has no bases so far, but is to have some; only if accepted
    sides: list[tuple[Side | None, Side | None]]  # of each logical matrix
    gathered: list[int]  # the logical matrices that need what other ranks have: those cut that have a factor

    def shards(self, engine: Engine) -> list[Preconditioned]:
        """This rank's shards of the matrices, with the sides of the whole ones."""
        momentum, squares, gradient = _own(self.state[EXP_AVG]), _own(self.state[EXP_AVG_SQ]), self.parameter.grad
        gradient = torch.zeros_like(momentum) if gradient is None else _own(gradient).to(momentum.dtype)
        gradient = torch.where(self.accepted, -gradient if self.settings["maximize"] else gradient, 0.0)
        split = [engine.split(self.index, x) for x in (gradient, momentum, squares)]
        return [Preconditioned(*each) for each in zip(*split, self.sides, strict=True)]

    def bytes(self, engine: Engine) -> int:
        """Of the whole tensors that are gathered."""
        shapes = [engine.matrices[self.index][i].shape for i in self.gathered]
        return sum(3 * rows * cols for rows, cols in shapes) * int(self.state[EXP_AVG].element_size())


def soap(tasks: Sequence[Task], engine: Engine, most_bytes: int = MOST_BYTES) -> None:
    """One step of SOAP.

    Of parameters that are cut, gradient and moments of several at a time are gathered by every rank that shares them,
    which then computes the whole step: all make the same of the same numbers. All ranks name the same of those that
    are shared, in the same order.
    """
    for task in tasks:
        if not task.gathered:
            step(task, task.shards(engine), engine)
    gathers = ((bucket, _gather(bucket, engine)) for bucket in _buckets(tasks, engine, most_bytes))
    for (bucket, wait), _ in pairwise(chain(gathers, [([], list)])):  # the next one is on its way already
        for task, matrices in zip(bucket, wait(), strict=True):
            step(task, matrices, engine)


def step(task: Task, matrices: Sequence[Preconditioned], engine: Engine) -> None:
    """Make the step of a parameter, from its shards or, where they are gathered, its matrices: each rank its part."""
    # a basis of nothing would turn to that of the gradients to come only step by step
    if task.first and not any(bool(matrix.gradient.any()) for matrix in matrices if matrix.factored):
        return
    index, state, settings = task.index, task.state, task.settings
    state[STEPS] += task.accepted

    def own(x: Tensor, i: int) -> Tensor:
        return engine.scatter_back(x, engine.matrices[index][i]) if i in task.gathered else x

    p, momentum, squares = (_own(x) for x in (task.parameter, state[EXP_AVG], state[EXP_AVG_SQ]))
    flag, lr, shards = task.accepted.double(), settings["lr"], engine.split(index, p)
    decay = decay_power(lr, settings["weight_decay_method"]) * settings["weight_decay"] * flag
    with fp32_products(settings["fp32_matmul_prec"]):
        for i, matrix in enumerate(matrices):
            update = update_of(matrix, state[STEPS], task.accepted, settings, task.first)
            if update is not None:
                kept = shards[i].to(update.dtype) * (1 - decay)
                shards[i] = (kept - own(update, i) * (lr * flag)).to(p.dtype)
    p.copy_(engine.merge(index, shards))
    momentum.copy_(engine.merge(index, [own(matrix.momentum, i) for i, matrix in enumerate(matrices)]))
    squares.copy_(engine.merge(index, [own(matrix.squares, i) for i, matrix in enumerate(matrices)]))


def _buckets(tasks: Sequence[Task], engine: Engine, most_bytes: int) -> list[list[Task]]:
    """The parameters that are gathered at once: of one group of ranks, one dtype, and so many bytes at most."""
    found: dict[tuple[str, torch.dtype], list[list[Task]]] = {}
    for task in (task for task in tasks if task.gathered):
        alike = found.setdefault((engine.matrices[task.index][0].group, task.state[EXP_AVG].dtype), [[]])
        if alike[-1] and sum(each.bytes(engine) for each in alike[-1]) + task.bytes(engine) > most_bytes:
            alike.append([])
        alike[-1].append(task)
    return [bucket for alike in found.values() for bucket in alike]


def _gather(bucket: Sequence[Task], engine: Engine) -> Callable[[], list[list[Preconditioned]]]:
    """Start to gather the whole matrices of a bucket: one collective."""
    shards = [task.shards(engine) for task in bucket]
    wanted = [(number, task.index, i) for number, task in enumerate(bucket) for i in task.gathered]
    stacks = [torch.stack([x.gradient, x.momentum, x.squares]) for x in (shards[n][i] for n, _, i in wanted)]
    wait = engine.gather_whole(stacks, [engine.matrices[index][i] for _, index, i in wanted])

    def finish() -> list[list[Preconditioned]]:
        for (number, _, i), (gradient, momentum, squares) in zip(wanted, wait(), strict=True):
            shards[number][i] = replace(shards[number][i], gradient=gradient, momentum=momentum, squares=squares)
        return shards

    return finish


def _own(x: Tensor) -> Tensor:
    """This rank's part, sharing its memory; a scalar as a vector, for only that can be split."""
    return torch.atleast_1d(local(x))
