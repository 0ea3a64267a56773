"""Runs that evaluate, and may save as the model, an average of weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.dealing import dealt_parameters, share_dealt
from megatron_eopt.megatron.support.run import Run
from megatron_eopt.megatron.wrappers import model_parameters, optimizers_of, plain_wrappers, shard_of
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import local, parameters_in
from megatron_eopt.optimizers.weight_average import TRAINED, WeightAverage, average_in, average_of, swapped
from megatron_eopt.redirect import Original, around


def average_weights(optimizers: Sequence[Optimizer], run: Run) -> None:
    """Begin the run's average of weights, if it has one; ``tail`` ends with it."""
    if run.weight_average is None:
        return

    def remaining() -> int | None:
        last = getattr(run.args, "train_iters", None)
        now = getattr(releases.training_args(), "curr_iteration", None)
        return None if last is None or now is None else last - now - 1

    WeightAverage(run.weight_average, *optimizers, remaining=remaining)


@around
def averaged(
    evaluate: Original, forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``evaluate``: the model is at the average meanwhile."""
    averaging = [optimizer for optimizer in optimizers_of(model) if _averaging(optimizer)]
    if not averaging:
        return evaluate(forward_step_func, data_iterator, model, *args, **kwargs)
    try:
        with swapped(pair for optimizer in averaging for pair in _averages(optimizer)):
            for optimizer in averaging:
                share_dealt(optimizer)
            return evaluate(forward_step_func, data_iterator, model, *args, **kwargs)
    finally:
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # which may have kept the average, gathered, for the next step


def _averaging(optimizer: Any) -> list[Any]:
    """The wrappers of torch optimizers that have an average."""
    return [x for x in plain_wrappers(optimizer) if is_average(x) or average_of(x.optimizer) is not None]


def _averages(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Model parameters with averages, or, for other ranks', with themselves."""
    own = set[int]()
    for wrapper in plain_wrappers(optimizer):
        own.update(id(model) for _, model in _pairs(wrapper))
    for wrapper in _averaging(optimizer):
        yield from _exported(wrapper)
    for _, _, parameter in dealt_parameters(optimizer):
        if id(parameter) not in own:
            yield parameter, parameter.detach()


def is_average(wrapper: Any) -> bool:
    """Whether an optimizer's own weights are an average, as Schedule-Free's."""
    return isinstance(wrapper.optimizer, BaseOptimizer) and wrapper.optimizer.live_key is not None


def export(wrapper: Any, model_sharded_state_dict: Any) -> None:
    """Save the average as the model, in separate tensors."""
    exported: dict[int, Tensor] = {}
    for model, average in _exported(wrapper):
        exported[id(shard_of(model))] = local(average).to(model.dtype, copy=True)
    for tensor in nested_values(model_sharded_state_dict):
        if isinstance(tensor, ShardedTensor | ShardedTensorFactory) and id(tensor.data) in exported:
            tensor.data = exported[id(tensor.data)]


def trained(wrapper: Any) -> dict[int, tuple[str, Tensor]]:
    """Parameters to save as state where the model is an average, by index, with the key.

    Others have an fp32 copy, which is saved anyhow.
    """
    key = wrapper.optimizer.live_key if is_average(wrapper) else TRAINED
    found = {}
    for index, (own, model) in enumerate(_pairs(wrapper)):
        if own is model:
            found[index] = (key, own.detach())
    return found


def go_on_from(wrapper: Any, loaded: Mapping[int, Tensor]) -> None:
    """After a load, continue from ``loaded`` parameters or fp32 copies."""
    with torch.no_grad():
        for index, (own, model) in enumerate(_pairs(wrapper)):
            if index in loaded:
                local(own).copy_(loaded[index])
            else:
                model.copy_(own)


def _exported(wrapper: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Model parameters and their averages."""
    for own, model in _pairs(wrapper):
        if is_average(wrapper):
            yield model, wrapper.optimizer.exported(own)
        else:
            yield model, average_in(wrapper.optimizer.state.get(own, {}), own)


def _pairs(wrapper: Any) -> list[tuple[Tensor, Tensor]]:
    """Trained and model parameters, which in fp32 are the same."""
    return list(zip(parameters_in(wrapper.optimizer.param_groups), model_parameters(wrapper), strict=True))
