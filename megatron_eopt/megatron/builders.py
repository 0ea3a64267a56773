"""What replaces Megatron's builders of optimizers."""

from typing import Any

from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.megatron import fsdp
from megatron_eopt.megatron.consensus import of_command_line, of_config, of_packages, refuse_different
from megatron_eopt.megatron.factory import OptimizerOfRun
from megatron_eopt.megatron.given import complete
from megatron_eopt.megatron.support.facts import primary_of, training_args
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer


@around
def wrap_emerging_builder(
    build: Original, config: Any, model_chunks: Any, config_overrides: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Replaces Megatron's builder of emerging optimizers by :class:`OptimizerOfRun`."""
    if kwargs.get("pg_collection") is None:
        kwargs["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    groups = kwargs["pg_collection"]
    parsed = training_args()
    if parsed is not None:
        refuse_different(of_command_line(parsed))
    complete(config, parsed)
    refuse_different(of_packages() | of_config(config))
    run = OptimizerOfRun(config, model_chunks, groups, kwargs.get("layer_wise_distributed_optimizer", False))
    if run.facts.megatron_fsdp:
        return run.built_by(lambda config, given: fsdp.build(config, model_chunks, given, groups), config_overrides)
    return run.built_by(lambda config, given: build(config, model_chunks, given, *args, **kwargs), config_overrides)


@around
def checked_elsewhere(check: Original, config: Any, config_overrides: Any) -> Any:
    """Skips Megatron's check of overrides, which :class:`OptimizerOfRun` replaces."""
    return primary_of(config) in EMERGING_OPTIMIZERS or check(config, config_overrides)


@around
def wrap_group_builder(build: Original, config: Any, model_chunks: Any, param_groups: list[Any], **kwargs: Any) -> Any:
    """Lets Megatron's builder of adam, sgd and lion build ours."""
    if config.optimizer not in EMERGING_OPTIMIZERS or config.optimizer in ("adam", "sgd", "lion"):
        return build(config, model_chunks, param_groups=param_groups, **kwargs)
    if config.use_distributed_optimizer:
        raise ValueError(
            f"{config.optimizer} beside another optimizer cannot have whole matrices where Megatron lays buffers "
            f"out for one: pass --no-use-layer-wise-param-layout, or leave --use-distributed-optimizer away"
        )
    groups = kwargs["pg_collection"]
    optimizer, init_state = create_emerging_optimizer(config, param_groups, config.optimizer, model_chunks, groups)
    if kwargs.get("skip_megatron_wrapping"):
        return optimizer, init_state
    if config.bf16:
        wrapped = Float16OptimizerWithFloat16Params(optimizer, config, None, init_state)
    else:
        wrapped = FP32Optimizer(optimizer, config, init_state)
    wrapped.grad_stats_parallel_group = kwargs["model_parallel_group"]
    wrapped.tp_group = groups.tp
    wrapped.expert_tp_group = groups.expt_tp
    return wrapped
