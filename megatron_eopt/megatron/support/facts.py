"""Facts that decide whether a run works."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from megatron_eopt import registry
from megatron_eopt.megatron import releases


@dataclass(frozen=True)
class Run:
    """The facts that decide whether a run can work."""

    optimizer: str  # its name in the registry
    release: str  # of Megatron-Core
    config: Any  # Megatron's OptimizerConfig
    ddp: Any = None  # its DistributedDataParallelConfig; None for a model that is not wrapped
    model: Any = None  # its TransformerConfig; None if unknown
    args: Any = None  # of megatron.training; None without it
    layer_wise: bool = False  # whether its layer-wise distributed optimizer is requested, under any of its names
    leaves_scalars: bool = True  # whether the optimizer leaves what is no matrix to a scalar optimizer
    data_parallel: int = 1  # number of data-parallel ranks, those of context parallelism among them
    expert_data_parallel: int | None = None  # those of expert-parallel parameters; None where there are none
    wrapper: str = ""  # name of the class that wraps the model
    whole_matrices: bool = False  # whether Megatron laid its gradient buffers out for shards that cut no matrix
    cut_twice: str | None = None  # of the first that --tensor-parallel-num-weight-shards cuts, or the one of experts
    grouped_experts: str | None = None  # of the first that holds the weights, or the biases, of several experts
    expert_vector: str | None = None  # of the first expert-parallel one that goes to the scalar optimizer
    unsaved: str | None = None  # name of the first parameter that Megatron cannot save under torch FSDP2
    assigned: frozenset[str] = frozenset()  # optimizers that have parameters; none where that is not known yet

    @classmethod
    def of(cls, config: Any, model_chunks: Sequence[Any], pg_collection: Any, *, layer_wise: bool = False) -> "Run":
        """The facts of this process's run, from the builder's arguments."""
        name = primary_of(config)
        parameters = [(n, p) for chunk in model_chunks for n, p in chunk.named_parameters() if p.requires_grad]
        model = getattr(model_chunks[0], "config", None)
        # the parameters of Megatron-FSDP lack the mark of those that they were cut from
        experts = [(n, p) for n, p in parameters if not getattr(getattr(p, "orig_param", p), "allreduce", True)]
        grouped = []
        for chunk in model_chunks:
            for path, module in chunk.named_modules():
                for kind in ("weight", "bias"):  # Transformer Engine's
                    if on(module, f"single_grouped_{kind}") and on(getattr(module, kind, None), "requires_grad"):
                        grouped.append(f"{path}.{kind}")
        vectors = [n for n, p in experts if registry.is_nonlinear_or_embedding(p)]
        unsaved = [n for n, p in parameters if _unsaved(n, p, model)]

        def size(group: str) -> int:
            ranks = getattr(pg_collection, group, None)
            return 1 if ranks is None else int(ranks.size())

        # whose axis it is cannot be told here: Megatron marks the parameters of experts only later
        shards = max(size("gtp_remat"), size("expt_gtp_remat"))
        cut_twice = [n for n, p in parameters if shards > 1 and on(p, "is_gtp_weight_remat")]
        return cls(
            optimizer=name,
            release=releases.version(),
            config=config,
            ddp=getattr(model_chunks[0], "ddp_config", None),
            model=model,
            args=training_args(),
            layer_wise=layer_wise or name != config.optimizer or on(config, "use_layer_wise_distributed_optimizer"),
            leaves_scalars=bool(registry.get_optimizer_entry(name).default_param_overrides),
            data_parallel=size("dp_cp"),
            expert_data_parallel=size("expt_dp") if experts else None,
            wrapper=type(model_chunks[0]).__name__,
            whole_matrices=any(hasattr(p, "is_managed_by_layer_wise_optimizer") for _, p in parameters),
            cut_twice=_first(cut_twice),
            grouped_experts=_first(grouped),
            unsaved=_first(unsaved),
            expert_vector=_first(vectors),
        )

    @property
    def megatron_fsdp(self) -> bool:
        """Whether the model is sharded by Megatron-FSDP."""
        return on(self.ddp, "use_megatron_fsdp") or self.wrapper.startswith("FullyShardedDataParallel")

    @property
    def accumulates(self) -> bool:
        """Whether gradients sum several micro-batches, as far as known."""
        of_all = getattr(self.args, "global_batch_size", None)
        of_one = getattr(self.args, "micro_batch_size", None)
        ranks = getattr(self.args, "data_parallel_size", None)
        return of_all is None or of_one is None or ranks is None or of_all > of_one * ranks

    @property
    def hybrid_fsdp(self) -> bool:
        """Whether several instances of Megatron-FSDP each have the model."""
        return self.megatron_fsdp and getattr(self.ddp, "num_distributed_optimizer_instances", 1) > 1

    @property
    def laid_out(self) -> bool:
        """Whether whole matrices have gradient buffers apart from the rest."""
        return self.layer_wise and self.whole_matrices and on(self.ddp, "use_distributed_optimizer")

    @property
    def quantized(self) -> bool:
        """Whether parameters are in fp8 or fp4."""
        return on(self.ddp, "fp8_param_gather", "fp4_param_gather") or on(self.model, "fp8_param", "fp4_param")

    @property
    def scalar(self) -> str | None:
        """Name of the scalar optimizer; None without a choice."""
        takes_matrices = registry.takes_matrices(self.optimizer)
        return getattr(self.config, "muon_scalar_optimizer", None) if takes_matrices else None

    @property
    def names(self) -> list[str]:
        """The optimizers that have parameters, that of the run first."""
        return [self.optimizer, *sorted(self.assigned - {self.optimizer})]

    @property
    def without_momentum_dtype(self) -> str | None:
        """The first optimizer without a choice of momentum dtype."""
        for name in self.names:
            entry = registry.EMERGING_OPTIMIZERS.get(name)
            if entry is not None and "execution" not in signature(entry.optimizer_cls).parameters:
                return name
        return None

    @property
    def averages(self) -> bool:
        """Whether an optimizer evaluates and saves an average."""
        return any(registry.class_named(name).train_weight_key is not None for name in self.names)


def training_args() -> Any:
    """The arguments of ``megatron.training``; None where it is not running."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def primary_of(settings: Any) -> str:
    """The name of a run's optimizer, which Megatron may call ``dist_NAME``; empty where none is named."""
    return getattr(settings, "optimizer", "").removeprefix("dist_")


def on(settings: Any, *names: str) -> bool:
    """Whether a config, or None, has any of these set."""
    return any(getattr(settings, name, False) for name in names)


def _first(names: Sequence[str]) -> str | None:
    return names[0] if names else None


def _unsaved(name: str, parameter: Any, model: Any) -> bool:
    """Whether Megatron cannot save a parameter under torch FSDP2."""
    if not hasattr(parameter, "is_torch_fsdp2_param"):
        return False
    ranks = parameter.device_mesh.size()
    if ranks == 1:
        return False
    gate_up = on(model, "gated_linear_unit") and name.endswith("linear_fc1.weight")
    return ".experts." in name or parameter.shape[0] % ranks > 0 or (gate_up and ranks % 2 > 0)
