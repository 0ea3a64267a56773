"""Runs of Schedule-Free: evaluated, and saved as the model, at the average of its weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_eopt.megatron.wrappers import model_parameters, optimizers_of, plain_wrappers, shard_of
from megatron_eopt.redirect import Original, around
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import local, parameters_in


@around
def evaluated_at_average(
    evaluate: Original, forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``evaluate``: the model is at the average meanwhile."""
    averaging = [x for optimizer in optimizers_of(model) for x in plain_wrappers(optimizer) if has_average(x)]
    if not averaging:
        return evaluate(forward_step_func, data_iterator, model, *args, **kwargs)
    trained: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for wrapper in averaging:
                for parameter, average in _averages(wrapper):
                    trained.append((parameter, parameter.detach().clone()))
                    parameter.copy_(average)
        return evaluate(forward_step_func, data_iterator, model, *args, **kwargs)
    finally:
        with torch.no_grad():
            for parameter, own in trained:
                parameter.copy_(own)
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # which may have kept the average, gathered, for the next step


def has_average(wrapper: Any) -> bool:
    """Whether the model of an optimizer is an average of what it trains."""
    return isinstance(wrapper.optimizer, BaseOptimizer) and wrapper.optimizer.train_weight_key is not None


def save_average(wrapper: Any, model_sharded_state_dict: Any) -> None:
    """Save the average as the model, in separate tensors."""
    averages = {id(shard_of(model)): local(average).to(model.dtype, copy=True) for model, average in _averages(wrapper)}
    for tensor in nested_values(model_sharded_state_dict):
        if isinstance(tensor, ShardedTensor | ShardedTensorFactory) and id(tensor.data) in averages:
            tensor.data = averages[id(tensor.data)]


def trained_parameters(wrapper: Any) -> dict[int, tuple[str, Tensor]]:
    """Parameters to save as state where the model is an average, by index, with the key.

    Others have an fp32 copy, which is saved anyhow.
    """
    found = {}
    for index, (own, model) in enumerate(_pairs(wrapper)):
        if own is model:
            found[index] = (wrapper.optimizer.train_weight_key, own.detach())
    return found


def restore_training_weights(wrapper: Any, loaded: Mapping[int, Tensor]) -> None:
    """After a load, continue from ``loaded`` parameters or fp32 copies."""
    with torch.no_grad():
        for index, (own, model) in enumerate(_pairs(wrapper)):
            if index in loaded:
                local(own).copy_(loaded[index])
            else:
                model.copy_(own)


def _averages(wrapper: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Model parameters and their averages."""
    for own, model in _pairs(wrapper):
        yield model, wrapper.optimizer.exported(own)


def _pairs(wrapper: Any) -> list[tuple[Tensor, Tensor]]:
    """Trained and model parameters, which in fp32 are the same."""
    return list(zip(parameters_in(wrapper.optimizer.param_groups), model_parameters(wrapper), strict=True))
