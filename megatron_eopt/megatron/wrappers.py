"""Megatron's optimizers: wrappers in chains, the torch optimizers inside, and their parameters."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from megatron_eopt.step.parameters import parameters_in

_OPTIMIZER = "megatron_eopt_optimizer"  # attribute of a model chunk: a weak reference


@dataclass(frozen=True)
class OptimizerParameter:
    """A parameter in a torch optimizer inside Megatron's wrappers."""

    model: Tensor  # the model's
    optimizer: Optimizer
    group: dict[str, Any]
    main: Tensor | None  # in that group: the model's or its fp32 copy; None where the optimizer has shards of a buffer


def wrappers(optimizer: Any) -> Iterator[Any]:
    """The single ones of Megatron's optimizers, out of chains of chains."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
        return
    for link in chained:
        yield from wrappers(link)


def plain_wrappers(optimizer: Any) -> list[Any]:
    """The :func:`wrappers` of a torch optimizer of whole parameters."""
    kinds = ("FP32Optimizer", "Float16OptimizerWithFloat16Params")
    return [x for x in wrappers(optimizer) if type(x).__name__ in kinds and x.optimizer is not None]


def distributed_wrappers(optimizer: Any) -> list[Any]:
    """The :func:`wrappers` of a torch optimizer of shards of buffers."""
    return [x for x in wrappers(optimizer) if hasattr(x, "gbuf_ranges")]


def torch_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """The torch optimizers inside Megatron's wrappers, in their order."""
    for wrapper in wrappers(optimizer):
        if isinstance(wrapper, Optimizer):
            yield wrapper
        elif getattr(wrapper, "optimizer", None) is not None:
            yield from torch_optimizers(wrapper.optimizer)


def optimizer_parameters(megatron: Any) -> Iterator[OptimizerParameter]:
    """All that Megatron's optimizer updates here, by wrappers and groups."""
    for wrapper in wrappers(megatron):
        inner = getattr(wrapper, "optimizer", None)
        if inner is None:
            continue
        of_buffers = getattr(wrapper, "model_param_group_index_map", None)
        if of_buffers is not None:
            for model, (number, _) in of_buffers.items():
                yield OptimizerParameter(model, inner, inner.param_groups[number], None)
            continue
        models = iter(model_parameters(wrapper))
        for optimizer in torch_optimizers(inner):
            for group in optimizer.param_groups:
                for main in group["params"]:
                    yield OptimizerParameter(next(models), optimizer, group, main)


def model_parameters(wrapper: Any) -> list[Tensor]:
    """Parameters in the order of a wrapper's torch optimizer."""
    models: dict[int, Tensor] = {}  # identity of the fp32 copy -> the model's
    copied = zip(getattr(wrapper, "fp32_from_float16_groups", []), getattr(wrapper, "float16_groups", []), strict=True)
    for copies, of_group in copied:
        for copy, model in zip(copies, of_group, strict=True):
            models[id(copy)] = model
    return [models.get(id(parameter), parameter) for parameter in parameters_in(wrapper.optimizer.param_groups)]


def shard_of(parameter: Tensor) -> Tensor:
    """What Megatron saves: a DTensor's shard, or the parameter."""
    return getattr(parameter, "_local_tensor", parameter)


def remember(optimizer: Any, model_chunks: Sequence[nn.Module]) -> None:
    """Let :func:`optimizers_of` find Megatron's optimizer; the last built counts."""
    for chunk in model_chunks:
        setattr(chunk, _OPTIMIZER, weakref.ref(optimizer))


def optimizers_of(model_chunks: Sequence[nn.Module]) -> list[Any]:
    """The optimizers that this package has built for these chunks."""
    optimizers = dict.fromkeys(getattr(chunk, _OPTIMIZER)() for chunk in model_chunks if hasattr(chunk, _OPTIMIZER))
    return [optimizer for optimizer in optimizers if optimizer is not None]  # the others are gone
