"""Evaluation at the average of the path, for optimizers that train at another point."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megatron_eopt.megatron.checkpoints.attach import plain_wrappers
from megatron_eopt.megatron.held import model_parameters
from megatron_eopt.optimizers.base import BaseOptimizer as BaseOptimizer

_EXPORTING: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""Model chunk -> those of Megatron's optimizers that evaluate and export something else than its parameters."""


def remember(optimizer: Any, model_chunks: Sequence[nn.Module]) -> None:
    """Let :func:`averaged` find what trains a model, where it trains at another point than is evaluated.

    Args:
        optimizer: Megatron's.
        model_chunks: of this rank.
    """
    exporting = [each for each in plain_wrappers(optimizer) if _exports(each.optimizer)]
    for chunk in model_chunks if exporting else ():
        _EXPORTING[chunk] = exporting


def averaged(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``evaluate``: the model is at the average while it runs, and back where it was after it."""
    parameters = inspect.signature(evaluate)

    @functools.wraps(evaluate)
    def evaluate_averaged(*args: Any, **kwargs: Any) -> Any:
        model = parameters.bind(*args, **kwargs).arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        wrappers = {id(each): each for chunk in chunks for each in _EXPORTING.get(chunk, ())}
        with _exported(list(wrappers.values())):
            return evaluate(*args, **kwargs)

    return evaluate_averaged


@contextmanager
def _exported(wrappers: Sequence[Any]) -> Iterator[None]:
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for wrapper in wrappers:
                own = [p for group in wrapper.optimizer.param_groups for p in group["params"]]
                for main, parameter in zip(own, model_parameters(wrapper), strict=True):
                    average = wrapper.optimizer.exported(main)
                    kept.append((parameter, parameter.detach().clone()))
                    parameter.copy_(average)
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(before)


def _exports(optimizer: Any) -> bool:
    return isinstance(optimizer, BaseOptimizer) and optimizer.live_key is not None
