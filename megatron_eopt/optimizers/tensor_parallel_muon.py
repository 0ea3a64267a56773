"""Muon for parameters that may be sharded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.choice import rule
from megatron_eopt.kernels.precision import MatmulPrecision, gram_dtype, product_dtype
from megatron_eopt.optimizers import muon_checks, second_moment
from megatron_eopt.optimizers.orthogonalized import (
    OF_PARAMETERS,
    OrthogonalizedOptimizer,
    check_given,
    refuse_blockwise,
)
from megatron_eopt.optimizers.second_moment import adaptive_muon
from megatron_eopt.optimizers.step_form import step_form
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor, predicted_update_rms
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, cut_over, shared_out
from megatron_eopt.parallel.plan_records import Matrix, TpMode
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.parallel.workspace import OF_ENTRY
from megatron_eopt.settings.groups import (
    DECOUPLED,
    METHOD,
    MOMENTUM_STEPS,
    decay_method,
    iteration_of,
    note_short_schedule,
    warn,
)
from megatron_eopt.settings.of_class import check_effect, settings_of
from megatron_eopt.settings.records import (
    MODIFIERS,
    MOMENTUM_DTYPES,
    SCALE,
    DecayMethod,
    Moment2Method,
    RelativeUpdate,
    WeightNorm,
    names_of,
)
from megatron_eopt.step import held_norms, modifiers
from megatron_eopt.step.base import BaseOptimizer, fixed
from megatron_eopt.step.cuda_graph import GraphedUpdate
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.offload import Streamed
from megatron_eopt.step.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_matrix,
    local,
    names_of_last,
)
from megatron_eopt.step.session import StepCache
from megatron_eopt.step.state import StateTensor, bytes_of_entry
from megatron_eopt.step.step import Batch, Step, cast_to_average, of_parameters, scaled
from megatron_eopt.step.step_kernels import StepKernels
from megatron_eopt.step.users_functions import factors_by_user, of_whole, scaled_by_user, scales_of


class Execution(TypedDict, total=False):
    """Settings of Muon that say where and how steps are computed, and modifiers of weights."""

    cautious_weight_decay: bool
    weight_norm: WeightNorm
    brake_outward: float
    brake_inward: float
    relative_update: RelativeUpdate
    update_ratio: float
    cuda_graphs: bool
    data_parallel_group: ProcessGroup | None
    symmetric_products: str | None
    workspace: int
    offload_fraction: float
    momentum_dtype: torch.dtype | None
    step_kernels: str | None


class Transport(Execution, total=False):
    """Also those for finding, orthogonalizing and exchanging matrices."""

    split_qkv: bool
    is_qkv_fn: Callable[[Tensor], bool] | None
    qkv_split_shapes: Sequence[int] | None
    fp32_matmul_prec: MatmulPrecision
    coefficient_type: str | Sequence[Coefficients]
    num_ns_steps: int
    pg_collection: TensorParallelGroups | None
    tp_mode: TpMode


class TensorParallelMuon(OrthogonalizedOptimizer):
    """Muon: orthogonalized momentum, scaled by the matrix's shape.

    The momentum is orthogonalized by Newton-Schulz iteration as a whole matrix of the model: with every ``tp_mode`` but
    ``blockwise`` the update at TP=k is the update at TP=1, scale factor and QKV split included. DTensors (FSDP2, HSDP,
    tensor parallelism under them) work in their own layouts. Query groups of fused projections are interleaved,
    ``(groups, q + k + v, hidden)``, as Megatron stores them. :func:`muon` is the step.

    A group may have its own ``num_ns_steps``, ``coefficient_type``, ``scale_mode`` and ``extra_scale_factor``, its own
    ``lr``, ``momentum``, ``nesterov``, ``weight_decay``, ``use_decoupled_weight_decay`` and ``weight_decay_method``,
    and its own modifiers, the arguments from ``cautious_weight_decay`` to ``align_rms``::

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
        data_parallel_group: ranks with the same parameters and gradients (as under DDP), which share the work on
            matrices. Those that ``tp`` cuts are shared only where ``pg_collection.tp_dp_cp`` has the ranks of both
            groups, with ``tp_mode`` ``owner`` or ``auto``. Matrices of experts are not shared.
        symmetric_products: the kernel of symmetric products: ``triton``, ``blocked`` (on a CPU) or ``torch``. By
            default that of :func:`~megatron_eopt.kernels.choice.rule`.
        cuda_graphs: capture the third step as a CUDA graph and replay it; only where no parameter is sharded.
        weight_decay_method: ``decoupled``, ``l2``, ``independent`` or ``palm``: see
            :data:`~megatron_eopt.settings.records.DecayMethod`; None for what ``use_decoupled_weight_decay``
            says.
        workspace: bytes of a step's temporaries on this rank, beside what one iteration of its largest matrix needs.
        offload_fraction: share, in [0, 1], of parameter-shaped state (momenta, above all) kept in host memory, pinned
            where there is a GPU: whole parameters, spread evenly, and at least so many bytes. A step fetches the state
            of one chunk while it works on another. Before other code than :meth:`state_dict` reads it, call
            ``torch.cuda.synchronize()``.
        momentum_dtype: of momenta: None for that of each parameter, or ``torch.bfloat16``. These are averaged and
            orthogonalized in fp32 and rounded at random, with the same bits at every layout: see
            :mod:`~megatron_eopt.step.rounding`.
        cautious_weight_decay: decay only entries whose signs do not differ from their update's. This modifier and the
            following ones are written out in :mod:`~megatron_eopt.step.modifiers`.
        weight_norm: ``hold`` keeps the norm that each logical matrix has before the first step, and updates have ``lr``
            times that norm; ``brake`` lets a part of what a step changes the norm by through; or ``none``.
        brake_outward: the part, in [0, 1], of what the norm would grow by.
        brake_inward: the part of what it would shrink by.
        relative_update: ``match``: before the rate, the norm of an update is ``update_ratio`` times that of its weight;
            or ``none``.
        update_ratio: above 0.
        moment2_method: ``adamuon``, ``normuon`` or ``namo`` divides factors by a second moment, as
            :mod:`~megatron_eopt.optimizers.second_moment` has it; or ``none``.
        beta2: of the second moment, in [0, 1).
        eps: above 0, bounds that division.
        align_rms: whether updates of ``adamuon`` have Muon's size.
        step_kernels: what does the elementwise work of a step: ``triton``, kernels for many parameters at once, or
            ``torch``. By default that of the checkpoint; else, on a GPU, ``triton`` where it serves.

    Attributes:
        newton_schulz: the iteration of groups that say nothing else of it.
        newton_schulz_calls: how many logical matrices the steps have orthogonalized: those of which this rank has a
            part, whichever rank computed them.

    Raises:
        ValueError: at construction, for a setting out of its range, an unknown name, a schedule that the coefficient
            set cannot serve, a parameter that is no matrix, a split that does not fit, or shards without a group.
        TypeError: for a flag that is no bool, as by a call in the positional order of emerging-optimizers.
    """

    group_keys: ClassVar[tuple[str, ...]] = ("lr", "momentum", "nesterov", "weight_decay", DECOUPLED, METHOD)
    persistent_group_keys = frozenset({MOMENTUM_STEPS})
    counters = frozenset({MOMENTUM_STEPS})
    split_lengths = (3, 4)
    momentum_key = "momentum"
    nesterov_key = "nesterov"
    size_rule: ClassVar[str | None] = None  # how large an update is, where the scale settings have no effect
    instead_of_decay: ClassVar[str] = ""  # what replaces weight decay, for messages
    measures: ClassVar[bool] = False  # whether each step measures global matrices for the size of updates
    copied: ClassVar[int] = 0  # bytes of each entry, by a program that has kernels, beside momenta that it keeps

    newton_schulz: NewtonSchulz = fixed("newton_schulz")
    scale_mode: ScaleMode = fixed("scale_mode", "spectral")
    extra_scale_factor: float = fixed("extra_scale_factor", 1.0)
    cuda_graphs: bool
    data_parallel_group: ProcessGroup | None
    step_kernels: str | None
    newton_schulz_calls: int = 0

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
        cuda_graphs: bool = False,
        data_parallel_group: ProcessGroup | None = None,
        symmetric_products: str | None = None,
        weight_decay_method: DecayMethod | None = None,
        workspace: int = 2**31,
        offload_fraction: float = 0.0,
        momentum_dtype: torch.dtype | None = None,
        step_kernels: str | None = None,
        cautious_weight_decay: bool = False,
        weight_norm: WeightNorm = "none",
        brake_outward: float = 0.5,
        brake_inward: float = 1.0,
        relative_update: RelativeUpdate = "none",
        update_ratio: float = 1.0,
        moment2_method: Moment2Method = "none",
        beta2: float = 0.95,
        eps: float = 1e-8,
        align_rms: bool = True,
    ) -> None:
        self._begin(params, locals())

    def _begin(self, params: ParamsT, arguments: Mapping[str, Any]) -> None:
        """Take a constructor's ``locals()``, this one's or a relative's."""
        BaseOptimizer.__init__(self, params, arguments)

    def _settle(self, values: dict[str, Any]) -> None:
        super()._settle(values)
        known = settings_of(type(self))
        # True by default, which does not contradict what is said of the method
        values[DECOUPLED] = values[METHOD] != "l2" and values[DECOUPLED]
        iteration = iteration_of(values)
        note_short_schedule(iteration)
        vars(self)["newton_schulz"] = iteration
        of_all = [key for key in names_of(MODIFIERS) if key not in self.group_keys]
        given = [key for key in of_all if values[key] != known[key].default]
        check_effect(known, given, values)
        if values["cuda_graphs"] and (values["offload_fraction"] or values["momentum_dtype"]):
            raise ValueError(
                "cuda_graphs cannot work with offload_fraction or momentum_dtype, by which steps differ: leave it off"
            )
        if muon_checks.size_of_updates(self, values):
            scale = {key: values[key] for key in names_of(SCALE) if values[key] != known[key].default}
            muon_checks.check_decided(self, scale, values)

    # The step, and the hooks of relatives.

    @property
    def keeps_momenta(self) -> bool:
        """Whether a group compares norms of momenta, as NAMO does."""
        return any(self.effective(group)["moment2_method"] == "namo" for group in self.param_groups)

    @property
    def streamed(self) -> Streamed:
        """Moves state between host memory and the device."""
        session = self._session
        session.streamed = session.streamed or Streamed(self.engine.device)
        return session.streamed

    def state_dict(self) -> dict[str, Any]:
        """As torch's; waits for state to reach host memory."""
        if self._session.streamed is not None:
            self._session.streamed.wait()
        return super().state_dict()

    def program(self, step: Step) -> Program:
        """One chunk's step, that of the class or :func:`adaptive_muon`."""
        adapts = any(batch.settings["moment2_method"] != "none" for batch in step.batches)
        return adaptive_muon(step) if adapts else self.of_step(step)

    def _copied(self, planned: Sequence[Mapping[str, Any]]) -> int:
        """Bytes of each entry that the program copies where kernels serve; if any, it may read gradients."""
        measures = any(each["moment2_method"] != "none" and modifiers.measures(each) for each in planned)
        return OF_ENTRY if measures or self._overridden("program") else self.copied

    def _take(self, ok: Flag) -> None:
        session = self._session
        held_norms.find_norms(self)
        if self._overridden(*OF_PARAMETERS):
            batches = self._take_users(ok)
        else:
            batches = self._batches(ok)
            run = self._run
            if self.cuda_graphs:
                graphed = session.settled.graphed = session.settled.graphed or GraphedUpdate(self._run)
                graphed.check(batches)
                run = graphed
            session.changing = True
            run(batches)
        scales = session.settled.scales or []
        for batch in batches:
            self.newton_schulz_calls += sum(len(scales[i]) for i in batch.indices)
        if self.momentum_dtype is not None:
            for group in self.param_groups:
                group[MOMENTUM_STEPS] += 1

    def _run(self, batches: Sequence[Batch]) -> None:
        indices = [i for batch in batches for i in batch.indices]
        engine = self._session.engine
        kernels = self._session.settled.kernels
        scales = self._session.settled.scales
        copied = self._copied(self._session.settled.planned)
        assert engine is not None, "prepare() made it"
        assert scales is not None, "prepare() found them"

        def on_device(step: Step) -> Program:
            if copied or kernels is None:  # kernels cast by themselves
                step = replace(step, batches=cast_to_average(step.batches))
            return self.program(step)

        def program(chunk: Sequence[int]) -> Program:
            scales_of_chunk = [scale for i in chunk for scale in scales[i]]
            step = Step(of_parameters(batches, chunk), chunk, scales_of_chunk, engine, kernels)
            return self.streamed.around(step, on_device) if offloads else on_device(step)

        offloads = self.offload_fraction > 0
        if offloads:
            self.streamed.begin(batches, engine.order(indices), self.on_host)
        engine.run(indices, program)
        if offloads:
            self.streamed.end()

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum, held norms of matrices, and second moments."""
        tensors = super().state_tensors(parameter)
        settings = self.effective(self.group_of(parameter))
        if modifiers.holds(settings):
            tensors += held_norms.radius_tensors(self.key_ends(parameter), optional=self._is_free("weight_norm"))
        method = settings["moment2_method"]
        if method != "none":
            ends = self.key_ends(parameter)
            layouts = self.matrix_layouts(parameter)
            tensors += second_moment.moment_tensors(method, ends, layouts, optional=self._is_free("moment2_method"))
        return tensors

    def _is_free(self, key: str) -> bool:
        """Whether groups may have several values of a setting; what is fixed, every state has."""
        return key in self.settings_of_groups()

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale the norms that matrices keep."""
        held = [p for p in parameters if modifiers.holds(self.effective(self.group_of(p)))]
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
            updates = scaled(self._factors(engine, index, shards), scales_of(self._scale(group), matrices))
        [update] = engine.merge([index], updates)
        return update

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
        group = dict(group_settings)
        index = next((i for i, parameter in enumerate(self._parameters()) if parameter is p), None)
        if index is None:
            self._check_parameter(p, "p")
            muon_checks.check_shards(self, p, "p")
        else:
            group = self.group_of(p) | group
            planned = iteration_of(self.effective(self.group_of(p)))
            if grad.dtype == p.dtype and iteration_of(self.effective(group)) == planned:
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
        return self.newton_schulz(matrix)

    def scale_factor_fn(self, rows: int, cols: int) -> float:
        """The scale of a matrix; users may replace it."""
        return scale_of(self.effective({}), rows, cols)

    # What is planned, and described.

    def layout(self, parameter: Tensor) -> Layout:
        """The layout of a parameter, with all sharing ranks."""
        layout = super().layout(parameter)
        sharers = self.data_parallel_group
        if sharers is None or is_expert(parameter) or (layout.ranks > 1 and isinstance(parameter, DTensor)):
            return layout
        joint = getattr(self.pg_collection, "tp_dp_cp", None) if self.tp_mode in ("owner", "auto") else None
        return shared_out(layout, sharers, joint)

    def _settled(self, engine: Engine) -> StepCache:
        """Also find scales, which a user's function may get wrong, and kernels."""
        settled = super()._settled(engine)
        settled.planned = list(map(self.effective, self.param_groups))
        matrices = zip(self._parameters(), engine.matrices, strict=True)
        settled.scales = [scales_of(self._scale(self.group_of(p)), of_p) for p, of_p in matrices]
        form, _ = step_form(self, engine.device)
        if form == "triton":
            settled.kernels = StepKernels(engine)
            engine.slice_chunks(self._copied(settled.planned))
        return settled

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> float | None:
        """RMS of first updates before ``lr``; None where gradients or a user's function decide."""
        settings = self.effective(group or {})
        users = self._overridden(*OF_PARAMETERS, "scale_factor_fn", "program")
        if self.measures or users or modifiers.needs_norm(settings):
            return None
        muon_rms = predicted_update_rms(rows, cols, settings["scale_mode"], settings["extra_scale_factor"])
        if settings["moment2_method"] == "none":
            return muon_rms
        return second_moment.first_rms(settings, muon_rms, scale_of(settings, rows, cols))

    def explain(self) -> str:
        """The plan of a step, a table, and its kernels; all ranks ask."""
        return f"{self.prepare().explain()}\n{self.kernels()}"

    def kernels(self) -> str:
        """Which kernels serve, and why."""
        device = self.proposed().device
        products = self.symmetric_products
        why = "named"
        if products is None:
            dtype = product_dtype(local(self._parameters()[0]).dtype, self.fp32_matmul_prec)
            products, why = rule(device, gram_dtype(dtype, device) or dtype)
        form, reason = step_form(self, device)
        return f"Symmetric products by {products} ({why}), elementwise work by {form} ({reason})."

    def engine_to_explain(self) -> Engine:
        """The engine of :meth:`explain`, before ranks agree on it."""
        return self.proposed()

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
            for matrix, scale in zip(matrices, scales_of(self._scale(group), matrices), strict=True):
                name = matrix.name.partition("[")[2].rstrip("]")
                rms = self.predicted_rms(*matrix.shape, group)
                described[parameter].append(DescribedMatrix(name, matrix.shape, schemes[number], scale, rms))
                number += 1
        return described

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint describes."""
        of_all = self.settings_of_groups()
        settings = super().settings() | {
            "coefficients": [list(coefficients) for coefficients in self.newton_schulz.schedule],
            "fp32_matmul_prec": self.fp32_matmul_prec,
        }
        for key in names_of(SCALE):
            if key in of_all:
                settings[key] = of_all[key]
        settings[METHOD] = decay_method(type(self).__name__, self.defaults)
        settings["split_qkv"] = self.split_qkv
        settings["tp_mode"] = self.tp_mode
        settings |= self.given_modifiers()
        for name, dtype in MOMENTUM_DTYPES.items():
            if dtype is not None and dtype == self.momentum_dtype:
                settings["momentum_dtype"] = name
        of_groups = {}
        for number, (group, own) in enumerate(zip(self.param_groups, self.planned_in_groups(), strict=True)):
            for key in (self.nesterov_key, DECOUPLED, METHOD):
                if group[key] != self.defaults[key]:
                    own[key] = group[key]
            if own:
                of_groups[number] = own
        if of_groups:
            settings["of_groups"] = of_groups
        return settings

    def given_modifiers(self) -> dict[str, Any]:
        """Modifiers of all groups that are not the default, for checkpoints."""
        known = settings_of(type(self))
        of_groups = self.settings_of_groups()
        free = [key for key in names_of(MODIFIERS) if key in of_groups and key not in self.defaults]
        return {key: of_groups[key] for key in free if of_groups[key] != known[key].default}

    def settings_of_groups(self) -> dict[str, Any]:
        """Without settings in whose place something else decides."""
        settings = super().settings_of_groups()
        no_place: set[str] = set()
        if not self.decays_weights:
            no_place |= {DECOUPLED, METHOD}
        if self.size_rule or self._overridden("scale_factor_fn"):
            no_place |= set(names_of(SCALE))
        return {key: value for key, value in settings.items() if key not in no_place}

    def _described(self, name: str, parameter: Tensor, group: Mapping[str, Any] | None = None) -> ParamSpec:
        settings = self.effective(self.group_of(parameter) if group is None else group)
        dtype = local(parameter).dtype
        layout = self.layout(parameter)
        split = self.split_of(parameter)
        offloaded = 0
        if self.on_host(parameter):
            offloaded = parameter.numel() * bytes_of_entry(parameter, self.state_tensors(parameter))
        return ParamSpec(name, dtype, layout, split, iteration_of(settings), offloaded=offloaded)

    def _scale(self, group: Mapping[str, Any]) -> Callable[[int, int], float] | None:
        """The scale of a group's matrices; None for 1."""
        if self._overridden("scale_factor_fn"):
            return self.scale_factor_fn
        settings = self.effective(group)
        if self.measures or modifiers.sizes(settings):
            return None
        return partial(scale_of, settings)

    # Checks.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices."""
        super().add_param_group(param_group)
        if self.momentum_dtype is not None:
            self.param_groups[-1].setdefault(MOMENTUM_STEPS, 0)

    def _loaded(self) -> None:
        dropped = held_norms.drop_unused(self)
        if dropped:
            warn(f"{type(self).__name__}: the state has {' and '.join(dropped)}, which no modifier here keeps: dropped")

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        settings = self.effective(group)
        iteration = iteration_of(settings)
        if iteration != self.newton_schulz:
            note_short_schedule(iteration)
        # unlike a loaded group, which may have settings of another optimizer
        check_effect(settings_of(type(self)), group.keys() - self.defaults.keys(), settings)
        for parameter, called in zip(group["params"], names_of_last(self.param_groups), strict=True):
            muon_checks.check_parameter(self, parameter)
            muon_checks.check_shards(self, parameter, f"a parameter of shape {tuple(parameter.shape)}")
            if settings["moment2_method"] != "none":
                second_moment.check_moments(self, parameter, called, settings["moment2_method"])

    def _check_parameter(self, parameter: Tensor, called: str) -> None:
        check_matrix(type(self).__name__, parameter, f"orthogonalizes matrices, but {called}")
        self._check_split(parameter)

    def _check_together(self, group: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super()._check_together(group, settings)
        modifiers.check_modifiers(type(self).__name__, settings)
        iteration_of(settings)
        if self.measures or modifiers.measures(settings):
            refuse_blockwise(self, "norms")
        muon_checks.check_functions(self, settings)
        muon_checks.check_decided(self, group, settings)
        muon_checks.check_decay(self, group, settings)


def scale_of(settings: Mapping[str, Any], rows: int, cols: int) -> float:
    """Factor of a (rows x cols) matrix's orthogonal factor."""
    factor: float = settings["extra_scale_factor"]
    return factor * muon_scale_factor(rows, cols, settings["scale_mode"])
