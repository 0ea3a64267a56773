"""Evaluation at the average of the path, for optimizers that train at another point."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_eopt.megatron.parameters import model_parameters, plain_wrappers
from megatron_eopt.optimizers.base import BaseOptimizer

_AVERAGING = "averaging_optimizers"  # attribute of a model chunk: weak references to Megatron's optimizers


def remember(optimizer: Any, model_chunks: Sequence[nn.Module]) -> None:
    """Let :func:`averaged` find what trains a model at another point than is evaluated; of several, the last one built.

    Args:
        optimizer: Megatron's.
        model_chunks: of this rank.
    """
    averaging = [weakref.ref(each) for each in plain_wrappers(optimizer) if _averages(each.optimizer)]
    for chunk in model_chunks:
        if averaging or hasattr(chunk, _AVERAGING):
            setattr(chunk, _AVERAGING, averaging)


def averaged(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``evaluate``: the model is at the average while it runs, and back where it was after it."""
    parameters = inspect.signature(evaluate)

    @functools.wraps(evaluate)
    def evaluate_averaged(*args: Any, **kwargs: Any) -> Any:
        model = parameters.bind(*args, **kwargs).arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        found = dict.fromkeys(each() for chunk in chunks for each in getattr(chunk, _AVERAGING, ()))
        with _exported(each for each in found if each is not None):
            return evaluate(*args, **kwargs)

    return evaluate_averaged


@contextmanager
def _exported(wrappers: Iterable[Any]) -> Iterator[None]:
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


def _averages(optimizer: Any) -> bool:
    return isinstance(optimizer, BaseOptimizer) and optimizer.live_key is not None
