"""Building an optimizer for a Megatron model: what is checked before, what is printed after."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import megatron.core.optimizer as core_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.family import SplitName
from megatron_eopt.manifest import to_json
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.averaging import remember
from megatron_eopt.megatron.checking import refuse_bad_values, refuse_unread
from megatron_eopt.megatron.checkpoints import layers
from megatron_eopt.megatron.checkpoints.attach import attach
from megatron_eopt.megatron.checkpoints.replicas import check_before_first_step
from megatron_eopt.megatron.collecting import collect
from megatron_eopt.megatron.declaring import declare, prove_in_first_step
from megatron_eopt.megatron.fused import tag
from megatron_eopt.megatron.overriding import (
    excluded,
    for_megatron,
    on_all_ranks,
    owners,
    refuse_other_buffers,
    routed,
    splits,
    without_defaults,
)
from megatron_eopt.megatron.parameters import frozen_names, trainable
from megatron_eopt.megatron.presets import with_preset
from megatron_eopt.megatron.summary import print_summary, torch_optimizers
from megatron_eopt.megatron.support.facts import Run
from megatron_eopt.megatron.support.rules import refuse_unsupported
from megatron_eopt.megatron.tagging import tag_fused_projections
from megatron_eopt.optimizers.elementwise import ElementwiseOptimizer
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer, takes_matrices

_MEGATRONS_OWN = ("adam", "sgd", "lion")


def checked(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's builder of emerging optimizers: errors come before it changes anything, a summary comes after.

    Args:
        build: takes ``(config, model_chunks, ..., pg_collection=...)``.
    """

    def build_checked(
        config: Any, model_chunks: Sequence[Any], config_overrides: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("pg_collection") is None:
            kwargs["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
        name = config.optimizer.removeprefix("dist_")
        layer_wise = kwargs.get("layer_wise_distributed_optimizer", False)
        run = Run.of(config, model_chunks, kwargs["pg_collection"], layer_wise=layer_wise)
        refuse_unsupported(run)
        config = with_preset(config)
        owned = owners(trainable(model_chunks, kwargs["pg_collection"]), config, config_overrides)
        of_run: SplitName = getattr(config, "muon_split", "default")

        def decide() -> tuple[Any, Any]:
            excludes = any(each.owner is None for each in owned)
            names = frozenset(each.owner for each in owned if each.owner is not None)
            refuse_unsupported(replace(run, routes_optimizers=routed(owned), excludes=excludes, owners=names))
            refuse_other_buffers(owned)
            refuse_bad_values(owned, config, model_chunks, kwargs["pg_collection"])
            return splits(owned, of_run), for_megatron(owned, config)

        split, overrides = on_all_ranks(decide)
        tag(split)
        if takes_matrices(name) and getattr(config, "muon_split_qkv", False):
            tag_fused_projections(model_chunks, kwargs["pg_collection"])
        with without_defaults(name), excluded(owned), releases.package_not_needed():
            optimizer = build(config, model_chunks, overrides, *args, **kwargs)
        on_all_ranks(lambda: refuse_unread(optimizer, owned))
        _complete(optimizer, kwargs["pg_collection"])
        manifest = collect(optimizer, owned, config, kwargs["pg_collection"])
        declare(manifest, name, config)
        layers.settle(manifest.families, frozen_names(model_chunks))
        attach(optimizer, to_json(manifest.families))
        remember(optimizer, model_chunks)
        prove_in_first_step(optimizer, manifest.matrices_here)
        if getattr(config, "check_replicas", True):
            groups = (getattr(kwargs["pg_collection"], name, None) for name in ("dp_cp", "expt_dp"))
            check_before_first_step(optimizer, model_chunks, *groups)
        print_summary(optimizer)
        return optimizer

    return build_checked


def _complete(optimizer: Any, pg_collection: Any) -> None:
    """Tell the ranks of a scalar optimizer, which Megatron builds without them, whom to agree with."""
    for each in torch_optimizers(optimizer):
        if isinstance(each, ElementwiseOptimizer):
            each.pg_collection = pg_collection


def allowing_owners(check: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's check of overrides, which takes an optimizer of a parameter's own for a mistake."""

    @functools.wraps(check)
    def check_rest(config: Any, config_overrides: Any) -> Any:
        if config_overrides is None or config.optimizer.removeprefix("dist_") not in EMERGING_OPTIMIZERS:
            return check(config, config_overrides)
        rest = {
            key: {name: value for name, value in settings.items() if name != "optimizer"}
            for key, settings in config_overrides.items()
            if isinstance(settings, Mapping)  # what is none is refused with the rest, by its place
        }
        return check(config, rest)

    return check_rest


def with_registered(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's builder of adam, sgd and lion: it builds every registered optimizer, too.

    Args:
        build: takes ``(config, model_chunks, param_groups, ...)``.
    """

    @functools.wraps(build)
    def build_registered(config: Any, model_chunks: Sequence[Any], param_groups: list[Any], **kwargs: Any) -> Any:
        if config.optimizer not in EMERGING_OPTIMIZERS or config.optimizer in _MEGATRONS_OWN:
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
        wrapped = (
            Float16OptimizerWithFloat16Params(optimizer, config, None, init_state)
            if config.bf16
            else FP32Optimizer(optimizer, config, init_state)
        )
        wrapped.grad_stats_parallel_group = kwargs["model_parallel_group"]
        wrapped.tp_group, wrapped.expert_tp_group = groups.tp, groups.expt_tp
        return wrapped

    return build_registered


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
