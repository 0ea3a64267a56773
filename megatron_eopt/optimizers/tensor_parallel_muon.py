"""Muon for parameters that may be sharded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any, ClassVar, TypedDict, Unpack

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.choice import rule
from megatron_eopt.kernels.precision import MatmulPrecision, gram_dtype, product_dtype
from megatron_eopt.optimizers import muon_checks
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer, check_given, refuse_blockwise
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, cut_over, shared_out
from megatron_eopt.parallel.plan_records import Matrix, TpMode
from megatron_eopt.settings.execution import Execution
from megatron_eopt.settings.groups import DECOUPLED, METHOD, MOMENTUM_STEPS, warn
from megatron_eopt.settings.iteration import iteration_of, note_short_schedule
from megatron_eopt.settings.modifiers import MOMENT2_BUFFER, RADIUS, GroupModifiers, optional_states
from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.settings.records import DecayMethod, Moment2Method, RelativeUpdate, WeightNorm
from megatron_eopt.step import held_norms
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.momenta.momentum_optimizer import OF_PARAMETERS
from megatron_eopt.step.momenta.momentum_stack import Update, Updates, scaled
from megatron_eopt.step.momenta.step_form import step_form
from megatron_eopt.step.parameters import (
    DescribedMatrix,
    Matrices,
    TensorParallelGroups,
    check_matrix,
    local,
    names_of_last,
)
from megatron_eopt.step.state import StateTensor, bytes_of_entry
from megatron_eopt.step.users_functions import factors_by_user, of_whole, scaled_by_user, scales_of
from megatron_eopt.transforms import second_moment


class Modifiers(TypedDict, total=False):
    """Settings of modifiers, which :mod:`~megatron_eopt.settings.modifiers` writes out.

    Attributes:
        cautious_weight_decay: decay only entries whose signs do not differ from their update's; False.
        weight_norm: ``hold`` keeps the norm that each logical matrix has before the first step, and updates have ``lr``
            times that norm; ``brake`` lets a part of what a step changes the norm by through; ``none``.
        brake_outward: the part, in [0, 1], of what the norm would grow by; 0.5.
        brake_inward: the part of what it would shrink by; 1.
        relative_update: ``match``: before the rate, the norm of an update is ``update_ratio`` times that of its weight;
            ``none``.
        update_ratio: above 0; 1.
        max_update_rms: the largest RMS of an update, before the rate, at least 0; 0 for no bound.
    """

    cautious_weight_decay: bool
    weight_norm: WeightNorm
    brake_outward: float
    brake_inward: float
    relative_update: RelativeUpdate
    update_ratio: float
    max_update_rms: float


class Transforms(Modifiers, total=False):
    """Settings of all that may change an update, with their defaults.

    Attributes:
        moment2_method: ``adamuon``, ``normuon`` or ``namo`` divides factors by a second moment, as
            :mod:`~megatron_eopt.transforms.second_moment` has it; ``none``.
        beta2: of the second moment, in [0, 1); 0.95.
        eps: above 0, bounds that division; 1e-8.
        align_rms: whether updates of ``adamuon`` have Muon's size; True.
    """

    moment2_method: Moment2Method
    beta2: float
    eps: float
    align_rms: bool


class Transport(Matrices, total=False):
    """Also those for exchanging and orthogonalizing them."""

    execution: Execution
    tp_mode: TpMode
    fp32_matmul_prec: MatmulPrecision
    coefficient_type: str | Sequence[Coefficients]
    num_ns_steps: int


class TensorParallelMuon(OrthogonalizedOptimizer):
    """Muon: orthogonalized momentum, scaled by the matrix's shape.

    Its updates are Megatron's, five times as large as AdamW's; ``extra_scale_factor=0.2`` makes them as large.

    The momentum is orthogonalized by Newton-Schulz iteration as a whole matrix of the model: with every ``tp_mode`` but
    ``blockwise`` the update at TP=k is the update at TP=1, scale factor and QKV split included. DTensors (FSDP2, HSDP,
    tensor parallelism under them) work in their own layouts. Query groups of fused projections are interleaved,
    ``(groups, q + k + v, hidden)``, as Megatron stores them. :meth:`update` has the formula.

    A group may have its own ``num_ns_steps``, ``coefficient_type``, ``scale_mode`` and ``extra_scale_factor``, its own
    ``lr``, ``momentum``, ``nesterov``, ``weight_decay``, ``use_decoupled_weight_decay`` and ``weight_decay_method``,
    and its own :class:`Transforms`::

        TensorParallelMuon([{"params": a, "num_ns_steps": 10}, {"params": b, "extra_scale_factor": 0.5}])

    The values travel with ``state_dict``. A changed one is in force in the next step, which all ranks plan anew; only a
    step captured as a graph refuses it.

    Args:
        params: matrices, or groups of them; see :func:`megatron_eopt.parallel.attributes.layout_of` for the attributes
            that say how they are sharded.
        lr: learning rate.
        momentum: of the exponential moving average, in [0, 1).
        nesterov: whether to look ahead.
        weight_decay: weight decay.
        use_decoupled_weight_decay: decay the parameter (as AdamW does), or add to the gradient.
        split_qkv: orthogonalize and scale the logical matrices of fused projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute of a parameter
            wins.
        fp32_matmul_prec: ``low``, ``medium`` (bf16), ``high`` (TF32) or ``highest`` (fp32).
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: ``spectral``, ``unit_rms_norm`` or ``shape_scaling``.
        extra_scale_factor: multiplies the update; 0.2 with ``spectral`` gives updates the size of AdamW's.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.
        tp_mode: ``auto``, ``owner``, ``gram``, ``duplicated`` or ``distributed``, all exact: see
            :mod:`~megatron_eopt.parallel.plan`; or ``blockwise``, an approximation: each shard by itself.
        weight_decay_method: ``decoupled``, ``l2``, ``independent`` or ``palm``: see
            :data:`~megatron_eopt.settings.records.DecayMethod`; None for what ``use_decoupled_weight_decay``
            says.
        execution: where and how steps are computed: see :class:`~megatron_eopt.settings.execution.Execution`.
        **settings: transforms of an update: see :class:`Transforms`.

    Attributes:
        newton_schulz_calls: how many logical matrices the steps have orthogonalized: those of which this rank has a
            part, whichever rank computed them.

    Raises:
        ValueError: at construction, for a setting out of its range, an unknown name, a schedule that the coefficient
            set cannot serve, a parameter that is no matrix, a split that does not fit, or shards without a group.
        TypeError: for a flag that is no bool, as by a call in the positional order of emerging-optimizers.
    """

    persistent_group_keys = frozenset({MOMENTUM_STEPS})
    counters = frozenset({MOMENTUM_STEPS})
    split_lengths = (3, 4)
    by_users_alone = False
    momentum_key = "momentum"
    nesterov_key = "nesterov"
    size_rule: ClassVar[str | None] = None  # how large an update is, where the scale settings have no effect
    instead_of_decay: ClassVar[str] = ""  # what replaces weight decay, for messages
    measures: ClassVar[bool] = False  # whether each step measures global matrices for the size of updates

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        fp32_matmul_prec: MatmulPrecision = "medium",
        coefficient_type: str | Sequence[Coefficients] = "quintic",
        num_ns_steps: int = 5,
        scale_mode: ScaleMode = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: TensorParallelGroups | None = None,
        tp_mode: TpMode = "duplicated",
        weight_decay_method: DecayMethod | None = None,
        execution: Execution = Execution(),
        **settings: Unpack[Transforms],
    ) -> None:
        BaseOptimizer.__init__(self, params, locals())

    def _settle(self, values: dict[str, Any]) -> None:
        super()._settle(values)
        if METHOD in values:
            # True by default, which does not contradict what is said of the method
            values[DECOUPLED] = values[METHOD] != "l2" and values[DECOUPLED]
        known = settings_of(type(self))
        modifiers = GroupModifiers.of(values, known)
        muon_checks.check_scale(modifiers, values, {key: setting.default for key, setting in known.items()})

    # The step.

    def _divided(self, updates: Updates, engine: Engine) -> Updates:
        return second_moment.divided(updates, engine)

    @property
    def keeps_momenta(self) -> bool:
        """Whether a group compares norms of momenta, as NAMO does."""
        return any(self.modifiers_of(group).moment2_method == "namo" for group in self.param_groups)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum, held norms of matrices, and second moments."""
        tensors = super().state_tensors(parameter)
        modifiers = self.modifiers_of(self.group_of(parameter))
        if modifiers.holds:
            tensors += held_norms.radius_tensors(self.key_ends(parameter), optional=self._may_lack(RADIUS))
        method = modifiers.moment2_method
        if method != "none":
            ends = self.key_ends(parameter)
            layouts = self.matrix_layouts(parameter)
            tensors += second_moment.moment_tensors(method, ends, layouts, optional=self._may_lack(MOMENT2_BUFFER))
        return tensors

    def _may_lack(self, key: str) -> bool:
        return key in optional_states(settings_of(type(self)))

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale the norms that matrices keep."""
        held = [p for p in parameters if self.modifiers_of(self.group_of(p)).holds]
        with held_norms.followed(self, held):
            super().scale_rows(parameters, factors)

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """One parameter's update, before the learning rate and sharded alike.

        A step calls it for every parameter if a subclass overrides it. All ranks that share a sharded tensor call it
        together.

        Args:
            p: a parameter, or any tensor with its layout and attributes, such as a copy in fp32.
            grad: what is orthogonalized, of the shape of ``p``.
            **group_settings: ``num_ns_steps`` and the like, by default those of the parameter's group; for other
                tensors the constructor's.

        Raises:
            ValueError: for what the constructor would refuse, and for a ``grad`` of another shape.
        """
        engine, index, group = self._engine_for(p, grad, group_settings)
        shards = engine.split([index], [local(grad)])
        matrices = engine.matrices[index]
        if self._overridden("scaled_orthogonalize_fn"):
            tp = getattr(self.pg_collection, "expt_tp" if is_expert(p) else "tp", None)
            updates = scaled_by_user(self.scaled_orthogonalize_fn, tp, engine, index, shards)
        else:
            scales = scales_of(self._scale_of(group), matrices)
            pairs = zip(self._factors(engine, index, shards), scales, strict=True)
            updates = scaled(Update([factor], scale) for factor, scale in pairs)
        [update] = engine.merge([index], updates)
        return update.view(local(grad).shape)

    def _engine_for(
        self, p: Tensor, grad: Tensor, group_settings: Mapping[str, Any]
    ) -> tuple[Engine, int, dict[str, Any]]:
        """Engine for ``grad``, index of ``p``, and all settings."""
        check_given(self, group_settings)
        if grad.shape not in (p.shape, local(p).shape):
            raise ValueError(
                f"{type(self).__name__}: grad must have the shape of p, {tuple(p.shape)}, got {tuple(grad.shape)}"
            )
        engine = self.prepare()
        index = next((i for i, parameter in enumerate(self._parameters()) if parameter is p), None)
        if index is None:
            group = {**self.defaults, **group_settings}
            self._check_parameter(p, "p")
            muon_checks.check_shards(self, p, "p")
        else:
            group = {**self.group_of(p), **group_settings}
            if grad.dtype == p.dtype and self._iteration(group) == self._iteration(self.group_of(p)):
                return engine, index, group
        described = replace(self._described("p", p, group), dtype=grad.dtype)
        of_p = Engine([described], grad.device, self.tp_mode)
        of_p.prepare()
        return of_p, 0, group

    def _factors(self, engine: Engine, index: int, shards: list[Tensor]) -> list[Tensor]:
        if self._overridden("orthogonalize_fn"):
            return factors_by_user(self.orthogonalize_fn, engine, index, shards)
        return engine.factors([index], shards)

    def scaled_orthogonalize_fn(
        self, grad: Tensor, tp_group: ProcessGroup | None = None, partition_dim: int | None = None
    ) -> Tensor:
        """One matrix's scaled update, to override as in Megatron.

        A replacement that takes ``grad`` alone gets whole matrices. One with Megatron's arguments gets this rank's
        shard, the tensor-parallel group and the cut dimension; None and the whole matrix where that group does not cut
        it.
        """
        layout = cut_over((grad.shape[0], grad.shape[1]), partition_dim, tp_group)
        matrix = Matrix("grad", layout.shape, layout.rectangles)
        return of_whole(super().scaled_orthogonalize_fn, "scaled_orthogonalize_fn", grad, matrix, layout.group)

    def orthogonalize_fn(self, matrix: Tensor) -> Tensor:
        """A whole matrix's orthogonal factor; users may replace it."""
        return self._iteration(self.defaults)(matrix)

    def scale_factor_fn(self, rows: int, cols: int) -> float:
        """The scale of a matrix; users may replace it."""
        return self._scale(self.defaults, rows, cols)

    # What is planned, and described.

    def layout(self, parameter: Tensor) -> Layout:
        """The layout of a parameter, with all sharing ranks."""
        layout = super().layout(parameter)
        sharers = self.execution.data_parallel_group
        if sharers is None or is_expert(parameter) or (layout.ranks > 1 and isinstance(parameter, DTensor)):
            return layout
        joint = getattr(self.pg_collection, "tp_dp_cp", None) if self.tp_mode in ("owner", "auto") else None
        return shared_out(layout, sharers, joint)

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> float | None:
        """RMS of first updates before ``lr``; None where gradients or a user's function decide."""
        group = group or self.defaults
        modifiers = self.modifiers_of(group)
        users = self._overridden(*OF_PARAMETERS, "scale_factor_fn", "update")
        if self.measures or users or modifiers.needs_norm:
            return None
        if 0 in (rows, cols):
            return 0.0
        scale = self._scale(group, rows, cols)
        muon_rms = scale / sqrt(max(rows, cols))
        rms = muon_rms
        if modifiers.moment2_method != "none":
            rms = second_moment.first_rms(group, modifiers, muon_rms, scale)
        bound = modifiers.max_update_rms
        return min(rms, bound) if bound else rms

    def explain(self) -> str:
        """The plan of a step, a table, and its kernels; all ranks ask."""
        return f"{self.prepare().explain()}\n{self.kernels()}"

    def kernels(self) -> str:
        """Which kernels serve, and why."""
        device = self.proposed().device
        products = self.execution.symmetric_products
        why = "named"
        if products is None:
            dtype = product_dtype(local(self._parameters()[0]).dtype, self.fp32_matmul_prec)
            products, why = rule(device, gram_dtype(dtype, device) or dtype)
        form, reason = step_form(self, device)
        return f"Symmetric products by {products} ({why}), elementwise work by {form} ({reason})."

    def plan(self) -> str:
        """The table of :meth:`explain`, before ranks agree."""
        return self.proposed().explain()

    @property
    def matrices_updated(self) -> int:
        """How many were orthogonalized."""
        return self.newton_schulz_calls

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter, by the plan."""
        engine = self.prepare() if settled else self.proposed()
        schemes = {i: bucket.scheme.replace("_", " ") for bucket in engine.plan.buckets for i in bucket.matrices}
        described: dict[Tensor, list[DescribedMatrix]] = {}
        number = 0
        for parameter, matrices in zip(self._parameters(), engine.matrices, strict=True):
            group = self.group_of(parameter)
            described[parameter] = []
            for matrix, scale in zip(matrices, scales_of(self._scale_of(group), matrices), strict=True):
                name = matrix.name.partition("[")[2].rstrip("]")
                rms = self.predicted_rms(*matrix.shape, group)
                described[parameter].append(DescribedMatrix(name, matrix.shape, schemes[number], scale, rms))
                number += 1
        return described

    def _described(self, name: str, parameter: Tensor, group: Mapping[str, Any] | None = None) -> ParamSpec:
        iteration = self._iteration(self.group_of(parameter) if group is None else group)
        dtype = local(parameter).dtype
        layout = self.layout(parameter)
        split = self.split_of(parameter)
        offloaded = 0
        if self.on_host(parameter):
            offloaded = parameter.numel() * bytes_of_entry(parameter, self.state_tensors(parameter))
        return ParamSpec(name, dtype, layout, split, iteration, offloaded=offloaded)

    def _iteration(self, group: Mapping[str, Any]) -> NewtonSchulz:
        """The iteration of a group's matrices."""
        return iteration_of(group, self.fp32_matmul_prec, self.execution.symmetric_products)

    def _scale(self, group: Mapping[str, Any], rows: int, cols: int) -> float:
        """The factor of a (rows x cols) matrix's orthogonal factor."""
        factor: float = group["extra_scale_factor"]
        return factor * muon_scale_factor(rows, cols, group["scale_mode"])

    def _scale_of(self, group: Mapping[str, Any]) -> Callable[[int, int], float] | None:
        """The scale of a group's matrices; None for 1."""
        if self._overridden("scale_factor_fn"):
            return self.scale_factor_fn
        if self.measures or self.modifiers_of(group).size:
            return None
        return partial(self._scale, group)

    # Checks.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices."""
        super().add_param_group(param_group)
        if self.execution.momentum_dtype is not None:
            self.param_groups[-1].setdefault(MOMENTUM_STEPS, 0)

    def _loaded(self) -> None:
        dropped = held_norms.drop_unused(self)
        if dropped:
            warn(f"{type(self).__name__}: the state has {' and '.join(dropped)}, which no modifier here keeps: dropped")

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        note_short_schedule(self._iteration(group), map(self._iteration, self.param_groups[:-1]))
        method = self.modifiers_of(group).moment2_method
        for parameter, called in zip(group["params"], names_of_last(self.param_groups), strict=True):
            muon_checks.check_parameter(self, parameter)
            muon_checks.check_shards(self, parameter, f"a parameter of shape {tuple(parameter.shape)}")
            if method != "none":
                second_moment.check_moments(self, parameter, called, method)

    def _check_parameter(self, parameter: Tensor, called: str) -> None:
        check_matrix(type(self).__name__, parameter, f"orthogonalizes matrices, but {called}")
        self._check_split(parameter)

    def _check_second_moment(self, group: Mapping[str, Any]) -> None:
        muon_checks.check_second_moment(self, group)

    def _check_together(self, group: Mapping[str, Any]) -> None:
        super()._check_together(group)
        modifiers = self.modifiers_of(group)
        modifiers.check(type(self).__name__)
        self._iteration(group)
        if self.measures or modifiers.measured:
            refuse_blockwise(self, "norms")
        method = modifiers.moment2_method
        if method in ("normuon", "namo"):
            refuse_blockwise(self, f"statistics of {method}", ", or adamuon")
        muon_checks.check_functions(self, group)
        muon_checks.check_decided(self, group)
        self._check_second_moment(group)
        muon_checks.check_decay(self, group)
