"""Building an optimizer for a Megatron model: what is checked before, what is printed after."""

from collections.abc import Callable, Sequence
from typing import Any

import megatron.core.optimizer as core_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.checkpoints.attach import attach
from megatron_eopt.megatron.checkpoints.replicas import check_before_first_step
from megatron_eopt.megatron.summary import print_summary
from megatron_eopt.megatron.tagging import refuse_second_axis, tag_fused_projections
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.registry import get_optimizer_entry


def checked(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's builder of emerging optimizers: errors come before it changes anything, a summary comes after.

    Args:
        build: takes ``(config, model_chunks, ..., pg_collection=...)``.
    """

    def build_checked(config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pg_collection") is None:
            kwargs["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
        name = config.optimizer.removeprefix("dist_")
        orthogonalizes = issubclass(get_optimizer_entry(name).optimizer_cls, OrthogonalizedOptimizer)
        _check_config(name, config, kwargs.get("layer_wise_distributed_optimizer", False))
        if orthogonalizes:
            refuse_second_axis(model_chunks, kwargs["pg_collection"])
        if orthogonalizes and getattr(config, "muon_split_qkv", False):
            tag_fused_projections(model_chunks, kwargs["pg_collection"])
        optimizer = build(config, model_chunks, *args, **kwargs)
        attach(optimizer)
        if getattr(config, "check_replicas", True):
            groups = (getattr(kwargs["pg_collection"], name, None) for name in ("dp_cp", "expt_dp"))
            check_before_first_step(optimizer, model_chunks, *groups)
        print_summary(optimizer)
        return optimizer

    return build_checked


def _check_config(name: str, config: Any, layer_wise: bool) -> None:
    if name != "muon" and not releases.has_registry():
        raise ValueError(f"optimizer {name!r} needs megatron-core 0.18 or later, found {releases.version()}")
    if config.fp16:
        raise ValueError(f"optimizer {name!r} does not run with fp16: take --bf16, or fp32")
    # where Megatron puts what --use-distributed-optimizer and dist_muon ask for, from 0.18 on; before it is an argument
    layer_wise = layer_wise or getattr(config, "use_layer_wise_distributed_optimizer", False)
    if (layer_wise or config.optimizer.startswith("dist_")) and not config.bf16:
        raise ValueError(
            f"Megatron-Core's layer-wise distributed optimizer, which --use-distributed-optimizer means with {name!r}, "
            f"runs with --bf16 only: add it, or leave --use-distributed-optimizer away"
        )
    if name in ("muon", "adaptive_muon") and config.muon_scalar_optimizer not in releases.scalar_optimizers():
        raise ValueError(
            f"muon_scalar_optimizer {config.muon_scalar_optimizer!r} cannot be built with this Megatron-Core "
            f"({releases.version()}): expected one of {', '.join(releases.scalar_optimizers())}"
        )


def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Build the optimizer of a Megatron model, where our optimizers are activated.

    Takes and returns what Megatron-Core's function of this name does; with ``config.optimizer`` adam or sgd it is that
    function.

    Args:
        config: Megatron's ``OptimizerConfig``.
        model_chunks: the model, one module per virtual pipeline stage.
        *args: further arguments of Megatron-Core's function.
        **kwargs: the same by name: ``config_overrides``, ``use_gloo_process_groups``, ``pg_collection``.

    Raises:
        ValueError: for an unknown optimizer and for settings that it refuses, before anything is changed.
    """
    if releases.has_registry() or config.optimizer in ("adam", "sgd"):
        return core_optimizer.get_megatron_optimizer(config, model_chunks, *args, **kwargs)
    return releases.muon_factory_module().get_megatron_muon_optimizer(config, model_chunks, *args, **kwargs)
