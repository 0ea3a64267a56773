"""Optimizers that evaluate and save an average of their path."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_eopt.megatron.parameters import model_parameters, optimizers_of, plain_wrappers, shard_of
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.redirect import around


@around
def averaged(evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``evaluate``: the model is at the average meanwhile."""
    model = inspect.signature(evaluate).bind(*args, **kwargs).arguments["model"]
    chunks = model if isinstance(model, list) else [model]
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for wrapper in (wrapper for optimizer in optimizers_of(chunks) for wrapper in plain_wrappers(optimizer)):
                for own, parameter in _pairs(wrapper):
                    average = wrapper.optimizer.exported(own)
                    before.append((parameter, parameter.detach().clone()))
                    parameter.copy_(average)
        return evaluate(*args, **kwargs)
    finally:
        with torch.no_grad():
            for parameter, trained_at in before:
                parameter.copy_(trained_at)
        for module in (module for chunk in chunks for module in chunk.modules()):
            if before and isinstance(module, FSDPModule):
                module.reshard()  # which may have kept the average, gathered, for the next step


def export(wrapper: Any, model_sharded_state_dict: Any) -> None:
    """Save the average as the model, in separate tensors."""
    averages = ((model, wrapper.optimizer.exported(own)) for own, model in _pairs(wrapper))
    exported = {id(shard_of(model)): local(average).to(model.dtype) for model, average in averages}
    for tensor in nested_values(model_sharded_state_dict) if exported else ():
        if isinstance(tensor, ShardedTensor | ShardedTensorFactory) and id(tensor.data) in exported:
            tensor.data = exported[id(tensor.data)]


def trained(wrapper: Any) -> dict[int, tuple[str, Tensor]]:
    """Parameters to save as state (others have an fp32 copy)."""
    pairs = enumerate(_pairs(wrapper))
    return {i: (wrapper.optimizer.traits.live_key, own.detach()) for i, (own, model) in pairs if own is model}


def go_on_from(wrapper: Any, loaded: Mapping[int, Tensor]) -> None:
    """After a load, continue from ``loaded`` parameters or fp32 copies."""
    with torch.no_grad():
        for index, (own, model) in enumerate(_pairs(wrapper)):
            if index in loaded:
                local(own).copy_(loaded[index])
            else:
                model.copy_(own)


def _pairs(wrapper: Any) -> list[tuple[Tensor, Tensor]]:
    """Trained and model parameters; none where they are the same."""
    if not isinstance(wrapper.optimizer, BaseOptimizer) or wrapper.optimizer.traits.live_key is None:
        return []
    trained = (parameter for group in wrapper.optimizer.param_groups for parameter in group["params"])
    return list(zip(trained, model_parameters(wrapper), strict=True))
