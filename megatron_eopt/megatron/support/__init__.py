"""What works with which release of Megatron-Core, and what is refused at start: the facts of a run that decide it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_eopt.family import LIKE_MUON
from megatron_eopt.megatron import releases
from megatron_eopt.registry import EMERGING_OPTIMIZERS, get_optimizer_entry, is_nonlinear_or_embedding, takes_matrices


@dataclass(frozen=True)
class Run:
    """The facts of a run.

    Attributes:
        optimizer: its name in the registry.
        release: of Megatron-Core.
        config: Megatron's ``OptimizerConfig``.
        ddp: its ``DistributedDataParallelConfig``; None for a model that is not wrapped.
        model: its ``TransformerConfig``; None if unknown.
        args: the arguments of ``megatron.training``; None without it.
        layer_wise: whether Megatron's layer-wise distributed optimizer is requested, under any of its names.
        leaves_scalars: whether the optimizer leaves what is no matrix to a scalar optimizer.
        scalar_optimizers: what ``muon_scalar_optimizer`` may name in this release.
        data_parallel: number of data-parallel ranks, those of context parallelism among them.
        expert_data_parallel: number of those of expert-parallel parameters; None where there are no such parameters.
        wrapper: name of the class that wraps the model.
        whole_matrices: whether Megatron laid the gradient buffers out so that no matrix is cut over their shards.
        weight_shards: ranks over which ``--tensor-parallel-num-weight-shards`` cuts, or the one of experts.
        cut_twice: name of the first parameter that is cut by it.
        grouped_experts: name of the first parameter that holds the weights, or the biases, of several experts.
        expert_vector: name of the first expert-parallel parameter that goes to the scalar optimizer.
        routes_optimizers: whether overrides give parameters another optimizer than the default routing does.
        excludes: whether overrides exclude parameters from every optimizer.
        assigned: names of the optimizers that have parameters; none where that is not known yet.
    """

    optimizer: str
    release: str
    config: Any
    ddp: Any = None
    model: Any = None
    args: Any = None
    layer_wise: bool = False
    leaves_scalars: bool = True
    scalar_optimizers: tuple[str, ...] = ("adam", "lion")
    data_parallel: int = 1
    expert_data_parallel: int | None = None
    wrapper: str = ""
    whole_matrices: bool = False
    weight_shards: int = 1
    cut_twice: str | None = None
    grouped_experts: str | None = None
    expert_vector: str | None = None
    routes_optimizers: bool = False
    excludes: bool = False
    assigned: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Any, model_chunks: Sequence[Any], pg_collection: Any, *, layer_wise: bool = False) -> "Run":
        """The facts of a run in this process.

        Args:
            config: Megatron's ``OptimizerConfig``.
            model_chunks: the model, one module per virtual pipeline stage.
            pg_collection: Megatron's ``ProcessGroupCollection``.
            layer_wise: what the caller of Megatron-Core 0.17 passes; later releases have it in ``config``.

        Raises:
            ValueError: for an unknown optimizer.
        """
        name = config.optimizer.removeprefix("dist_")
        entry = get_optimizer_entry(name)
        parameters = [(n, p) for chunk in model_chunks for n, p in chunk.named_parameters() if p.requires_grad]
        experts = [(n, p) for n, p in parameters if not getattr(p, "allreduce", True)]
        # Whose axis it is cannot be told here: Megatron marks the parameters of experts only later.
        shards = [getattr(pg_collection, group, None) for group in ("gtp_remat", "expt_gtp_remat")]
        return cls(
            optimizer=name,
            release=releases.version(),
            config=config,
            ddp=getattr(model_chunks[0], "ddp_config", None),
            model=getattr(model_chunks[0], "config", None),
            args=releases.training_args(),
            layer_wise=layer_wise or name != config.optimizer or on(config, "use_layer_wise_distributed_optimizer"),
            leaves_scalars=bool(entry.default_param_overrides),
            scalar_optimizers=releases.scalar_optimizers(),
            data_parallel=_size(getattr(pg_collection, "dp_cp", None)),
            expert_data_parallel=_size(getattr(pg_collection, "expt_dp", None)) if experts else None,
            wrapper=type(model_chunks[0]).__name__,
            whole_matrices=any(on(p, "is_managed_by_layer_wise_optimizer") for _, p in parameters),
            weight_shards=max(map(_size, shards)),
            cut_twice=next((n for n, p in parameters if on(p, "is_gtp_weight_remat")), None),
            grouped_experts=_grouped_experts(model_chunks),
            expert_vector=next((n for n, p in experts if is_nonlinear_or_embedding(p)), None),
        )

    @property
    def takes_matrices(self) -> bool:
        """Whether the optimizer takes parameters for matrices."""
        return takes_matrices(self.optimizer)

    @property
    def has_registry(self) -> bool:
        """Whether this release knows emerging optimizers by their names: from 0.18 on."""
        return releases.knows_names(self.release)

    @property
    def scatters(self) -> bool:
        """Whether each data-parallel rank is left with a shard of the summed gradients."""
        return on(self.ddp, "use_distributed_optimizer") and self.data_parallel > 1

    @property
    def scalar(self) -> str | None:
        """Name of the scalar optimizer; None where there is none, or none to choose."""
        return getattr(self.config, "muon_scalar_optimizer", None) if self.optimizer in LIKE_MUON else None

    @property
    def averages(self) -> bool:
        """Whether an optimizer of the run trains at another point than is evaluated and saved as the model."""
        entries = (EMERGING_OPTIMIZERS.get(name) for name in (self.optimizer, *self.assigned))
        return any(getattr(getattr(entry, "optimizer_cls", None), "live_key", None) is not None for entry in entries)

    @property
    def scalars(self) -> str:
        """The scalar optimizers there are, for messages."""
        return ", ".join(self.scalar_optimizers)


def on(settings: Any, name: str) -> bool:
    """Whether a config has a field of this name that is set; configs may be None, and of any release."""
    return bool(getattr(settings, name, False))


def _grouped_experts(model_chunks: Sequence[Any]) -> str | None:
    """Name of the first parameter of Transformer Engine's that holds the weights, or the biases, of several experts."""
    named_modules = (each for chunk in model_chunks for each in chunk.named_modules())
    return next(
        (
            f"{path}.{name}"
            for path, module in named_modules
            for name in ("weight", "bias")
            if on(module, f"single_grouped_{name}") and on(getattr(module, name, None), "requires_grad")
        ),
        None,
    )


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())
