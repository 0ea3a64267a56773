"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.optimizers.base import KERNEL, BaseOptimizer
from megatron_eopt.optimizers.foreach import decay_power, stacked
from megatron_eopt.optimizers.group_settings import Scalar, also_called, check_adam_settings
from megatron_eopt.optimizers.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_matrix,
    check_shard,
    checked_split,
    names_of_last,
)
from megatron_eopt.optimizers.soap_chunks import (
    EXP_AVG,
    EXP_AVG_SQ,
    MOST_BYTES,
    STEPS,
    Chunk,
    EqualMatrices,
    ParameterStep,
    Planned,
    chunks_of,
    factor_stacks,
    merge,
    split,
)
from megatron_eopt.optimizers.soap_math import CLOCK, BasisMethod, Preconditioned, Side, SortBases, update_of
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.traits import SPLIT_ATTRIBUTES, Traits
from megatron_eopt.orthogonalize.choices import check_choice, check_count
from megatron_eopt.orthogonalize.kernels import KERNELS, made
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products, validate_matmul_precision
from megatron_eopt.orthogonalize.products import Fp32Precision
from megatron_eopt.parallel.agreement import KernelProducts
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, is_expert, on_one_rank, shared_out
from megatron_eopt.parallel.scheduler import rounds

Gradients = Literal["previous", "current"]
Decay = Literal["decoupled", "independent", "palm"]


def soap(chunk: Chunk, engine: Engine) -> Generator[None, None, None]:
    """SOAP's step of a chunk, equal matrices as stacks.

    Each matrix ``p`` has a gradient ``g``, moments ``M`` and ``V``, factors ``L`` and ``R``, and bases ``Q_L`` and
    ``Q_R``. Cut ones are whole between the exchanges, on their compute rank.
    """
    matrices = split(chunk, engine)
    spread = [equal.spread for equal in matrices]
    stacks = [first_moment(equal) for equal in matrices]  # g;  M <- beta1 M + (1 - beta1) g;  V
    stacks = yield from engine.gather_whole(stacks, spread)
    for i, equal in enumerate(matrices):
        stacks[i] = updated(equal, *stacks[i])  # U = Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T;  V, L, R, Q_L, Q_R
    stacks = yield from engine.scatter_back(stacks, spread)
    for equal, stack in zip(matrices, stacks, strict=True):
        if equal.moves:
            subtract(equal, *stack)  # p <- (1 - lr weight_decay) p - lr U
    merge(matrices, engine)


class SOAP(BaseOptimizer):
    """Adam in the eigenbasis of Shampoo's factors [1].

    For a matrix ``p`` (m x n) with gradient ``g``, of which ``Q_L`` and ``Q_R`` are the bases so far:

    1. ``M <- beta1 M + (1 - beta1) g``; ``V <- beta2 V + (1 - beta2) (Q_L^T g Q_R)^2``, both corrected for their start;
       ``nesterov`` has ``beta1 M / (1 - beta1^(t+1)) + (1 - beta1) g / (1 - beta1^t)`` for ``M`` of step ``t``;
    2. ``p <- (1 - lr weight_decay) p - lr Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T``;
    3. ``L <- EMA(g g^T)``, ``R <- EMA(g^T g)`` by ``shampoo_beta``, corrected for their start;
    4. every ``precondition_frequency`` steps after the first (with 4 in steps 5, 9 and 13, as in the authors' code),
       the columns of each basis are sorted by their eigenvalues, ``V`` with them, and ``Q <- QR(L Q)``, or the
       eigenvectors. The first basis always is that of the eigenvectors. ``sort_bases="after"`` sorts the columns of
       the new basis instead, and leaves ``V`` as it lies.

    The first nonzero gradient makes the bases alone, and moves nothing: seen in a basis made of itself, it is diagonal,
    and Adam makes full steps of the rounding beside the diagonal. ``basis_of="current"`` puts 3 and 4 in front of 1, as
    all releases of emerging-optimizers and so Megatron's ``--optimizer soap`` do: most of its first update is rounding,
    whose tiny squares make the second far too large (18 times Adam's for 64 x 32 in fp32) unless the bases stay.
    With ``sort_bases="before"``, which is the authors', it is the order of emerging-optimizers up to 0.3, which
    Megatron pins; with ``"after"`` that of 0.4 and later.

    With ``use_kl_shampoo`` the factors minimize the Kullback-Leibler divergence of N(0, L x R) from the gradients'
    distribution [2]: ``L <- EMA(g R^-1 g^T / n)``, ``R <- EMA(g^T L^-1 g / m)``, of the factors so far and their bases,
    the identity before the first. With ``basis_of="current"`` it is ``eps`` times that, as in emerging-optimizers: the
    first gradient outweighs others for some 300 steps, and bases stay nearly as it made them.

    A side longer than ``max_dim`` has no factor and no basis. Matrices with neither, and all that are not matrices, get
    Adam. Everything is kept in fp32 (fp64 for fp64 parameters); ``M`` in the basis of the parameter.

    Fused or stacked parameters are split into logical matrices where ``logical_matrices`` is a
    :class:`~megatron_eopt.matrices.Split`, or by ``split_qkv``.

    A cut parameter takes the step of one rank. A matrix of Megatron's that has a factor gets a compute rank of its
    group, by costs from shapes alone. Shards of gradient, ``M`` and ``V`` go there, in one all-to-all for many
    matrices, and those of the update and ``V`` come back; only that rank has the factors and bases. With
    ``share_over_dp`` data-parallel ranks are among the compute ranks. Of DTensors each rank gathers matrices, and has
    factors and bases: torch's checkpoints know no tensor that only one rank has. A gradient that is not finite on one
    rank is left out on all that share it.

    The first step makes the eigenvectors of every factor, some 10 n^3 operations a side of n, many of them bound by
    memory. At 8192 that may take very long, and other ranks wait for a compute rank within the timeout of their group.
    The host waits for the device there, and in no later step with ``qr``.

    Args:
        params: vectors, matrices and declared stacks of matrices, or groups of them; see
            :func:`megatron_eopt.parallel.layout.layout_of` for the attributes that say how they are sharded.
        lr: learning rate, at least 0.
        betas: of ``M`` and ``V``, each in [0, 1).
        shampoo_beta: of the factors, in [0, 1).
        eps: added to the root of ``V``, above 0.
        weight_decay: at least 0.
        precondition_frequency: steps between refreshes of the bases, at least 1.
        basis_method: ``qr`` or ``eigh``; also as ``use_eigh``, False or True.
        basis_of: ``previous`` gradients, or ``current``, which is the last of them.
        sort_bases: ``before`` a refresh, the second moment with them, or ``after`` it.
        use_kl_shampoo: see above.
        max_dim: the longest side that has a factor, at least 0; also as ``max_precond_dim``.
        weight_decay_method: ``decoupled``; ``independent``, without ``lr`` in it; or ``palm``, with its square.
        nesterov: whether the first moment looks ahead.
        correct_bias: whether moments and factors are corrected for their start.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``.
        split_qkv: precondition the parts of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute of a parameter
            wins.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.
        share_over_dp: whether data-parallel ranks share work, factors and bases: those of ``pg_collection.dp_cp``, or
            ``expt_dp`` for experts, and of cut matrices those of ``tp_dp_cp``, or ``tp_expt_dp``, where it has these
            groups. Then the state of every rank has to be saved.
        symmetric_products: the kernel of ``g g^T`` and ``g^T g``, as in
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`; by default that of the
            checkpoint, else the fastest on a GPU, and torch, without a choice that is kept, on a CPU.

    Raises:
        ValueError: for a setting out of its range, a parameter of three or more dimensions that is not declared as a
            stack, a split that does not fit, a DTensor of which a rank holds several separate parts, or shards without
            a group.

    [1] Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321.
    [2] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    """

    traits = Traits(
        carried_settings=frozenset({CLOCK, KERNEL}), planned_by=SPLIT_ATTRIBUTES, pairs_rows=True, multiplies=True
    )

    _based: set[Tensor] | None = None  # parameters known to have a basis
    _plans: dict[Tensor, list[Planned]] | None = None
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
        sort_bases: SortBases = "before",
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
        symmetric_products: str | None = None,
    ) -> None:
        check_choice("symmetric_products", symmetric_products or "torch", KERNELS)
        split = split_qkv, is_qkv_fn, qkv_split_shapes
        vars(self).update(checked_split(type(self).__name__, *split, self.traits.split_lengths))
        self.pg_collection, self.share_over_dp = pg_collection, share_over_dp
        self.symmetric_products = symmetric_products
        adam = {"lr": lr, "betas": betas, "eps": eps, "nesterov": nesterov, "correct_bias": correct_bias}
        decay = {"weight_decay": weight_decay, "weight_decay_method": weight_decay_method}
        shampoo = {"shampoo_beta": shampoo_beta, "use_kl_shampoo": use_kl_shampoo, "max_dim": max_dim}
        bases = {"precondition_frequency": precondition_frequency, "basis_method": basis_method}
        bases |= {"basis_of": basis_of, "sort_bases": sort_bases}
        further = {"maximize": maximize, "fp32_matmul_prec": fp32_matmul_prec}
        super().__init__(params, {**adam, **decay, **shampoo, **bases, **further})

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint describes."""
        return super().settings() | {"split_qkv": self.split_qkv}

    @property
    def matrices_updated(self) -> int:
        """Also counts matrices without a factor, which get Adam."""
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
        """The layout of a parameter; a vector is a column."""
        if parameter.ndim == 0 or (parameter.ndim == 1 and not isinstance(parameter, DTensor)):
            return on_one_rank((parameter.numel(), 1))
        layout, name = super().layout(parameter), "expt_dp" if is_expert(parameter) else "dp_cp"
        if not self.share_over_dp or isinstance(parameter, DTensor):
            return layout
        group, joint = (getattr(self.pg_collection, group_name, None) for group_name in (name, f"tp_{name}"))
        return layout if group is None else shared_out(layout, group, joint, name)

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter; others are never split."""
        return WHOLE if parameter.ndim < 2 else super().split_of(parameter)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Adam's moments, the steps, and each matrix's factors and bases."""
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
        name = type(self).__name__
        check_adam_settings(name, group, "shampoo_beta")
        for key, least in (("precondition_frequency", 1), ("max_dim", 0)):
            check_count(f"{name}: {key}", group[key], least)
        named = {"weight_decay_method": Decay, "basis_method": BasisMethod, "basis_of": Gradients}
        for key, of_key in {**named, "sort_bases": SortBases}.items():
            check_choice(f"{key} of {name}", group[key], get_args(of_key))
        validate_matmul_precision(group["fp32_matmul_prec"])

    def _check_group(self, group: dict[str, Any]) -> None:
        name, indices = type(self).__name__, names_of_last(self.param_groups, shapes=False)
        for parameter, called, index in zip(group["params"], names_of_last(self.param_groups), indices, strict=True):
            try:
                self.layout(parameter)
            except ValueError as error:
                raise ValueError(f"{name} cannot lay {called} out: {error}") from error
            if parameter.ndim > 1:
                check_matrix(type(self).__name__, parameter, f"takes matrices and vectors, but {index}")
                self._check_split(parameter)
                check_shard(parameter, self.pg_collection, called)
        group.setdefault(CLOCK, 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        super().load_state_dict(state_dict)
        self._based = None

    def kernel_products(self) -> KernelProducts:
        """Those that update factors, in the strictest precision of a group."""
        parameters, used = self._parameters(), {group["fp32_matmul_prec"] for group in self.param_groups}
        dtypes = sorted({torch.promote_types(p.dtype, torch.float32) for p in parameters}, key=str)
        stacks = factor_stacks([plan for p in parameters for plan in self._planned(p)])
        strictest: MatmulPrecision = "highest" if "highest" in used else "high"
        return stacks, dtypes, parameters[0].device, _precision(strictest)

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        spec = super()._described(name, parameter)
        return replace(spec, layout=self.layout(parameter), split=self.split_of(parameter))

    def _planned(self, parameter: Tensor) -> list[Planned]:
        """Plan matrices; a new group changes no other's compute ranks."""
        if self._plans is None or parameter not in self._plans:
            planned: dict[Tensor, list[Planned]] = {}
            loads: dict[str, list[int]] = {}
            for group in self.param_groups:
                for p in group["params"]:
                    pairs = zip(self.key_ends(p), self.matrix_layouts(p), strict=True)
                    planned[p] = [Planned(*pair, group["max_dim"] if p.ndim > 1 else -1) for pair in pairs]
                plans = (planned[p] for p in group["params"] if not isinstance(p, DTensor))
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
        if not (parameters := self._parameter_steps(accepted)):
            return
        steps = [p.state[STEPS] for p in parameters]
        counted = torch.stack(steps) + torch.stack([p.accepted for p in parameters])
        torch._foreach_copy_(steps, list(counted.unbind()))
        for chunks in chunks_of(parameters, MOST_BYTES):
            for _ in rounds(soap(chunk, self.engine) for chunk in chunks):
                pass
        self._updated += sum(len(p.plans) for p in parameters if p.parameter.ndim > 1)

    def _parameter_steps(self, accepted: Tensor) -> list[ParameterStep]:
        based = self._based = set() if self._based is None else self._based
        grouped = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        steps, states = [], self._states
        for index, ((parameter, group), flag) in enumerate(zip(grouped, accepted.unbind(), strict=True)):
            plans = self._planned(parameter)
            # also without a gradient where others wait for this rank's part
            if parameter.grad is not None or any(plan.gathered for plan in plans):
                state = self.state.get(parameter, {}) if parameter.grad is None else states.of(parameter, STEPS)
                first = parameter not in based and any(plan.cost for plan in plans)
                steps.append(ParameterStep(index, parameter, state, group, flag, first, plans))
        # a device is waited for until all bases are known to be there, and no longer
        if starting := [p for p in steps if p.first]:
            has_bases, makes_them = _known(starting, self.engine)
            based |= {p.parameter for p, *known in zip(starting, has_bases, makes_them, strict=True) if any(known)}
            old = {p.index for p, has in zip(starting, has_bases, strict=True) if has}
            steps = [replace(p, first=False) if p.index in old else p for p in steps]
        return [p for p in steps if not p.first or p.parameter in based]


def _known(parameters: Sequence[ParameterStep], engine: Engine) -> list[list[bool]]:
    """Which parameters have bases, and which can make them now."""
    has_entries = []  # a basis of nothing would turn to that of the gradients to come only step by step
    for p in parameters:
        shards = zip(p.plans, engine.split([p.index], [p.gradient]), strict=True)
        has_entries.append(torch.stack([shard.any() for plan, shard in shards if plan.cost]).any().float())
    some = torch.stack(engine.sums(has_entries, [p.label for p in parameters])) > 0
    steps = torch.stack([p.state.get(STEPS, torch.zeros_like(has_entries[0])) for p in parameters])
    accepted = torch.stack([p.accepted for p in parameters])
    return torch.stack([steps > 0, accepted & some]).tolist()


def _precision(precision: MatmulPrecision) -> Fp32Precision:
    return "ieee" if precision == "highest" else "tf32"


def first_moment(equal: EqualMatrices) -> list[Tensor]:
    """Update first moments; returns stacked gradients and moments."""
    settings, momentum = equal.settings, stacked(equal.momenta)
    gradient = stacked(equal.gradients).to(momentum.dtype)
    gradient = torch.where(equal.accepted, -gradient if settings["maximize"] else gradient, 0.0)
    if equal.moves:
        taken = torch.where(equal.accepted, gradient, momentum)
        momentum = torch.lerp(momentum, taken, 1 - settings["betas"][0])
        torch._foreach_copy_(equal.momenta, list(momentum.unbind()))
    return [gradient, momentum, stacked(equal.squares)]


def updated(equal: EqualMatrices, gradient: Tensor, momentum: Tensor, squares: Tensor) -> list[Tensor]:
    """Update factors and bases; returns updates and second moments."""
    update: Tensor | None = squares if equal.moves else None
    if mine := equal.members[equal.own]:
        sides = [[[p.state[key] for key in p.plans[i].sides[dim]] for p, i in mine] for dim in (0, 1)]
        kept = [[list(of_all) for of_all in zip(*of_side, strict=True)] for of_side in sides]
        stacks = [[stacked(of_all) for of_all in of_side] for of_side in kept]
        left, right = (Side(*stack) if stack else None for stack in stacks)
        accepted = equal.accepted[equal.own]
        steps = torch.stack([p.state[STEPS] for p, _ in mine]).view(accepted.shape)

        def gram(x: Tensor) -> Tensor:
            precision = _precision(equal.settings["fp32_matmul_prec"])
            return made(equal.settings.get(KERNEL, "torch"), x.size(-2), precision).gram(x)

        matrices = Preconditioned(gradient, momentum, squares, steps, accepted, gram, (left, right))
        with fp32_products(equal.settings["fp32_matmul_prec"]):
            update = update_of(matrices, equal.settings, equal.first)
        for old, new in zip(chain(*kept), chain(*stacks), strict=True):
            torch._foreach_copy_(old, list(new.unbind()))
    return [] if update is None else [update, squares]


def subtract(equal: EqualMatrices, update: Tensor, squares: Tensor) -> None:
    """Subtract updates with weight decay, and write the second moments."""
    lr, weights = equal.settings["lr"], stacked(equal.weights)
    decay = decay_power(lr, equal.settings["weight_decay_method"]) * equal.settings["weight_decay"]
    moved = (weights.to(update.dtype) * (1 - decay) - update * lr).to(weights.dtype)
    torch._foreach_copy_(equal.weights, list(torch.where(equal.accepted, moved, weights).unbind()))
    torch._foreach_copy_(equal.squares, list(squares.unbind()))
