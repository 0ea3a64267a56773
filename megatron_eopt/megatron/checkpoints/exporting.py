"""Checkpoints whose model is what is evaluated, of optimizers that train something else.

Each function takes one of Megatron's optimizers, around one torch optimizer of whole parameters. Where that evaluates
and exports what it trains, nothing is done.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_eopt.megatron.parameters import model_parameters
from megatron_eopt.optimizers.base import BaseOptimizer


def export(optimizer: Any, model_sharded_state_dict: Any) -> None:
    """Let the model's part of a checkpoint hold what is evaluated, in tensors of their own."""
    trains = optimizer.optimizer
    exported = {id(parameter): trains.exported(own).to(parameter.dtype) for own, parameter in _pairs(optimizer)}
    for tensor in nested_values(model_sharded_state_dict) if exported else ():
        if isinstance(tensor, ShardedTensor | ShardedTensorFactory) and id(tensor.data) in exported:
            tensor.data = exported[id(tensor.data)]


def trained(optimizer: Any) -> dict[int, tuple[str, Tensor]]:
    """The parameters that have to be saved as state, by their indices, and under which key.

    Where there is an fp32 copy of a parameter, Megatron saves that.
    """
    pairs = enumerate(_pairs(optimizer))
    return {i: (optimizer.optimizer.live_key, own.detach()) for i, (own, parameter) in pairs if own is parameter}


def go_on_from(optimizer: Any, loaded: Mapping[int, Tensor]) -> None:
    """After a load, make the parameters what is trained: what was ``loaded`` for :func:`trained`, or their copies."""
    with torch.no_grad():
        for index, (own, parameter) in enumerate(_pairs(optimizer)):
            if index in loaded:
                own.copy_(loaded[index])
            else:
                parameter.copy_(own)


def _pairs(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """What the torch optimizer trains, and the parameter of the model; empty where it exports what it trains."""
    trains = optimizer.optimizer
    if not isinstance(trains, BaseOptimizer) or trains.live_key is None:
        return []
    own = (parameter for group in trains.param_groups for parameter in group["params"])
    return list(zip(own, model_parameters(optimizer), strict=True))
