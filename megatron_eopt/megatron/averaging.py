"""Optimizers that train a model at another point than the one that is evaluated and saved: the average of the path.

Functions that take a ``wrapper`` take one of Megatron's optimizers, around one torch optimizer of whole parameters.
Where that trains what it evaluates, they do nothing.
"""

import functools
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


def averaged(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``evaluate``: the model is at the average while it runs, and back where it was after it."""
    parameters = inspect.signature(evaluate)

    @functools.wraps(evaluate)
    def evaluate_averaged(*args: Any, **kwargs: Any) -> Any:
        model = parameters.bind(*args, **kwargs).arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        before: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for wrapper in (each for optimizer in optimizers_of(chunks) for each in plain_wrappers(optimizer)):
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

    return evaluate_averaged


def export(wrapper: Any, model_sharded_state_dict: Any) -> None:
    """Let the model in a checkpoint be the one that is evaluated, in tensors of its own."""
    averages = ((model, wrapper.optimizer.exported(own)) for own, model in _pairs(wrapper))
    exported = {id(shard_of(model)): local(average).to(model.dtype) for model, average in averages}
    for tensor in nested_values(model_sharded_state_dict) if exported else ():
        if isinstance(tensor, ShardedTensor | ShardedTensorFactory) and id(tensor.data) in exported:
            tensor.data = exported[id(tensor.data)]


def trained(wrapper: Any) -> dict[int, tuple[str, Tensor]]:
    """The parameters that have to be saved as state, by their indices, and under which key.

    Where there is an fp32 copy of a parameter, Megatron saves that.
    """
    pairs = enumerate(_pairs(wrapper))
    return {i: (wrapper.optimizer.live_key, own.detach()) for i, (own, model) in pairs if own is model}


def go_on_from(wrapper: Any, loaded: Mapping[int, Tensor]) -> None:
    """After a load, make the parameters what is trained: what was ``loaded`` for :func:`trained`, or their copies."""
    with torch.no_grad():
        for index, (own, model) in enumerate(_pairs(wrapper)):
            if index in loaded:
                local(own).copy_(loaded[index])
            else:
                model.copy_(own)


def _pairs(wrapper: Any) -> list[tuple[Tensor, Tensor]]:
    """What the torch optimizer trains, and the parameter of the model; none where it evaluates what it trains."""
    if not isinstance(wrapper.optimizer, BaseOptimizer) or wrapper.optimizer.live_key is None:
        return []
    own = (parameter for group in wrapper.optimizer.param_groups for parameter in group["params"])
    return list(zip(own, model_parameters(wrapper), strict=True))
