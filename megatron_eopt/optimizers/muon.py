"""Muon for parameters that may be sharded over a tensor-parallel group."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import check_split_shapes
from megatron_eopt.optimizers.batch import Batch, local
from megatron_eopt.optimizers.bulk import DecayMethod
from megatron_eopt.optimizers.graphs import GraphedUpdate
from megatron_eopt.optimizers.group_settings import note_short_schedule
from megatron_eopt.optimizers.logical import check_declared, check_query_groups
from megatron_eopt.optimizers.momentum_groups import DECOUPLED, METHOD, check_flag, decay_method
from megatron_eopt.optimizers.planning import PlannedOptimizer
from megatron_eopt.optimizers.sharded import TensorParallelGroups
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.kernels import KERNELS
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates
from megatron_eopt.parallel.layout import Layout, is_sharded, shared_out
from megatron_eopt.parallel.plan import TpMode, validate_tp_mode
from megatron_eopt.parallel.sharing import Parameter


class TensorParallelMuon(PlannedOptimizer):
    """Muon: the update is the orthogonal factor of the momentum, scaled by the shape of the matrix.

    The momentum is orthogonalized by Newton-Schulz iteration as a matrix of the model, wherever it lies: with every
    ``tp_mode`` but ``blockwise`` the update at TP=k is the update at TP=1, scale factor and QKV split included.
    DTensors (FSDP2, HSDP, tensor parallelism under them) are taken as they lie. Query groups of fused projections are
    interleaved, ``(groups, q + k + v, hidden)``, as Megatron stores them.

    A group may have its own ``num_ns_steps``, ``coefficient_type``, ``scale_mode`` and ``extra_scale_factor``, as it
    may have its own ``lr``, ``momentum``, ``nesterov``, ``weight_decay``, ``use_decoupled_weight_decay`` and
    ``weight_decay_method``; what it does not say is as given here::

        TensorParallelMuon([{"params": a, "num_ns_steps": 10}, {"params": b, "extra_scale_factor": 0.5}])

    The values travel with ``state_dict``. A changed one is in force in the next step, which all ranks plan anew; only a
    step that was captured as a graph refuses it. Parameters of different settings are planned apart, and their plans
    are executed one after another.

    Args:
        params: matrices, or groups of them; see :func:`megatron_eopt.parallel.layout.layout_of` for the attributes
            that say how they are sharded.
        lr: learning rate.
        momentum: of the exponential moving average, in [0, 1).
        nesterov: whether to look ahead.
        weight_decay: weight decay.
        use_decoupled_weight_decay: decay the parameter (as AdamW does), or add to the gradient.
        split_qkv: orthogonalize and scale the parts of fused projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute
            ``qkv_split_shapes`` of a parameter wins.
        fp32_matmul_prec: ``low``, ``medium`` (bf16), ``high`` (TF32) or ``highest`` (fp32).
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: ``spectral``, ``unit_rms_norm`` or ``shape_scaling``.
        extra_scale_factor: multiplies the update; 0.2 with ``spectral`` gives updates the size of AdamW's.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.
        tp_mode: ``auto``, ``owner``, ``gram``, ``duplicated`` or ``distributed``, all exact: see
            :mod:`~megatron_eopt.parallel.plan`; or ``blockwise``, an approximation: each shard by itself.
        data_parallel_group: ranks that all hold the same parameters and gradients (as under DDP): each orthogonalizes
            its share of those matrices that no other group cuts, and an all-gather hands the results out.
        plan_rates: of the cost model of ``auto``; ``measure`` measures them at start, and a checkpoint keeps them.
        symmetric_products: what computes them: ``triton``, ``blocked`` (on a CPU) or ``torch``. By default what the
            checkpoint says, else the fastest that serves here.
        cuda_graphs: capture the step as a CUDA graph and replay it; only where no parameter is sharded.
        weight_decay_method: ``decoupled``, ``l2``, ``independent`` or ``palm``: see
            :data:`~megatron_eopt.optimizers.bulk.DecayMethod`; None for what ``use_decoupled_weight_decay`` says.

    Raises:
        ValueError: at construction, for a setting out of its range, an unknown name, a schedule that the coefficient
            set cannot serve, a parameter that is no matrix, a split that does not fit, or shards without a group.
        TypeError: for a flag that is no bool, as by a call in the positional order of emerging-optimizers.
    """

    momentum_key, nesterov_key = "momentum", "nesterov"

    # On the class, because it is left out of pickles and copies.
    _graphed: GraphedUpdate | None = None

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
        plan_rates: Rates | Literal["measure"] = DEFAULT_RATES,
        symmetric_products: str | None = None,
        weight_decay_method: DecayMethod | None = None,
    ) -> None:
        for key, flag in (("nesterov", nesterov), ("split_qkv", split_qkv), ("cuda_graphs", cuda_graphs)):
            check_flag(type(self).__name__, key, flag)
        validate_tp_mode(tp_mode)
        if symmetric_products is not None:
            check_choice("symmetric_products", symmetric_products, tuple(KERNELS))
        if not isinstance(plan_rates, Rates) and plan_rates != "measure":
            raise ValueError(f"plan_rates are Rates or 'measure', got {plan_rates!r}")
        self.newton_schulz = NewtonSchulz(
            steps=num_ns_steps, coefficient_type=coefficient_type, fp32_matmul_prec=fp32_matmul_prec
        )
        self.scale_mode: ScaleMode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.pg_collection = pg_collection
        self.tp_mode = tp_mode
        self.data_parallel_group = data_parallel_group
        self.plan_rates = plan_rates
        self.symmetric_products = symmetric_products
        note_short_schedule(self.newton_schulz)
        super().__init__(
            params,
            lr,
            momentum,
            nesterov,
            weight_decay,
            # True by default, which does not contradict what is said of the method
            False if weight_decay_method == "l2" else use_decoupled_weight_decay,
            split_qkv,
            is_qkv_fn,
            qkv_split_shapes,
            fp32_matmul_prec,
            orthogonalize_fn=self.newton_schulz,
            scale_factor_fn=self.update_settings({}).scale,
            weight_decay_method=weight_decay_method,
            **self._further_settings(),
        )
        self.cuda_graphs = cuda_graphs
        if cuda_graphs:
            self._check_graphs()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Raises:
            ValueError: for a parameter that is not a matrix, or a setting out of its range.
        """
        super().add_param_group(param_group)
        self._planned = None
        own = self.update_settings(param_group).newton_schulz
        if own != self.newton_schulz:
            note_short_schedule(own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, and with it what computed the symmetric products when it was saved.

        Raises:
            ValueError: also if a group of it has a setting out of its range; nothing is changed then.
        """
        for number, group in enumerate(state_dict["param_groups"]):
            self._check_update_settings(group, number)
        super().load_state_dict(state_dict)
        self._planned = None
        self._graphed = None  # the momenta that it was captured with are gone

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it."""
        settings = self.newton_schulz
        keys = (self.nesterov_key, DECOUPLED, METHOD)
        own = {
            number: said | {key: group[key] for key in keys if group[key] != self.defaults[key]}
            for number, (said, group) in enumerate(zip(self._own_settings(), self.param_groups, strict=True))
        }
        return super().settings() | {
            "coefficients": [list(each) for each in settings.schedule],
            "fp32_matmul_prec": settings.fp32_matmul_prec,
            "scale_mode": self.scale_mode,
            "extra_scale_factor": self.extra_scale_factor,
            "weight_decay_method": decay_method(type(self).__name__, self.defaults),
            "split_qkv": self.split_qkv,
            "tp_mode": self.tp_mode,
            **({"of_groups": {number: each for number, each in own.items() if each}} if any(own.values()) else {}),
        }

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """The update of one parameter, before the learning rate; sharded as the parameter is.

        A step calls it for every parameter where a subclass overrides it. Otherwise it does the same for all at once.
        Where the tensor is sharded, all ranks that share it call together.

        Args:
            p: a parameter, or any tensor that lies as one does and has its attributes, such as a copy in fp32.
            grad: what is orthogonalized, of the shape of ``p``.
            **group_settings: ``num_ns_steps`` and the like; what is not given is as in the group of the parameter, of
                any other tensor as in the constructor.

        Raises:
            ValueError: for a tensor or a setting that the constructor would refuse, and for a ``grad`` of another
                shape.
        """
        if grad.shape not in (p.shape, local(p).shape):
            raise ValueError(
                f"{type(self).__name__}: grad must have the shape of p, {tuple(p.shape)}, got {tuple(grad.shape)}"
            )
        index = next((i for i, parameter in enumerate(self._parameters()) if parameter is p), None)
        if index is not None:
            group = self.group_of(p)
            if self.update_settings({**group, **group_settings}) == self.update_settings(group):
                return self.planned.orthogonalize([local(grad)], [index])[0]
            group_settings = {**group, **group_settings}
        else:
            self._check_parameter(p, "p")
            if self.tp_mode != "blockwise":
                self._check_ranks(p, "p", _APPROXIMATION)
        described = Parameter("p", self.layout(p), self.split_of(p), grad.dtype)
        return self._planned_alone(described, grad.device, group_settings).orthogonalize([local(grad)], [0])[0]

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies, and who shares the work on it."""
        layout, sharers = super().layout(parameter), self.data_parallel_group
        return layout if layout.ranks > 1 or sharers is None else shared_out(layout, sharers)

    def _orthogonalize(
        self, batches: Sequence[Batch], updates: list[Tensor], accepted: Sequence[Tensor]
    ) -> list[Tensor]:
        if self._steps_one_by_one:
            return super()._orthogonalize(batches, updates, accepted)
        return self.planned.orthogonalize(updates, [place for batch in batches for place in batch.places])

    @property
    def _steps_one_by_one(self) -> bool:
        """Whether :meth:`orthogonalize` is the user's."""
        return self._overrides(TensorParallelMuon)

    def _run(self, batches: Sequence[Batch], accepted: Tensor) -> None:
        if self.cuda_graphs:
            self._graphed = self._graphed or GraphedUpdate(self._update)
            self._graphed(batches, accepted)
        else:
            self._update(batches, accepted)
        self._count([place for batch in batches for place in batch.places])

    def _check_graphs(self) -> None:
        devices = {parameter.device.type for parameter in self._parameters()}
        refused = None
        if devices != {"cuda"}:
            refused = f"the parameters are on {' and '.join(sorted(devices))}, not on a CUDA device"
        elif self._steps_one_by_one:
            refused = f"{type(self).__name__} has an orthogonalize of its own, which may wait for the device"
        elif any(self.layout(parameter).ranks > 1 for parameter in self._parameters()):
            refused = "parameters are shared with other ranks, and a replayed exchange could not be counted or end"
        if refused:
            raise ValueError(f"cuda_graphs cannot work here: {refused}. Leave it off")

    def _further_settings(self) -> dict[str, Any]:
        """Settings of a subclass that each group may have a value of its own for."""
        return {}

    def _is_cut(self, parameter: Tensor) -> bool:
        """Whether a rank has a part of a parameter only, also where ``blockwise`` is told of no groups."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        layout = self.layout(parameter)
        return layout.sharded or (self.pg_collection is None and is_sharded(parameter) and not alone)

    def _check_qkv(self, parameter: Tensor) -> None:
        shapes = check_split_shapes(self.split_shapes(parameter), self.split_lengths)
        check_query_groups(shapes, self.layout(parameter), self.tp_mode == "blockwise")

    def _check_declared(self, parameter: Tensor) -> None:
        check_declared(parameter.shape, self.split_of(parameter), self.layout(parameter), self.tp_mode == "blockwise")

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        self._check_update_settings(group, len(self.param_groups) - 1)
        if self.tp_mode != "blockwise":
            for parameter in group["params"]:
                self._check_ranks(parameter, f"a parameter of shape {tuple(parameter.shape)}", _APPROXIMATION)


_APPROXIMATION = ", or tp_mode='blockwise' for the approximation that treats each shard as a matrix"
