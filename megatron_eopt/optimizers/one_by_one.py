"""Calls of an ``orthogonalize`` that may be the user's: one parameter at a time, and without a trace if it fails."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers import bulk
from megatron_eopt.optimizers.batch import Batch, local

Orthogonalize = Callable[..., Tensor]


def decays(batch: Batch) -> bool:
    """Whether there is a weight decay; of one that is a tensor a device would have to be asked."""
    return isinstance(batch.weight_decay, Tensor) or batch.weight_decay != 0


def decay(batch: Batch, index: slice, accepted: Tensor) -> None:
    """Decay some parameters of a batch, where the method is one that changes parameters."""
    if decays(batch) and batch.decay_method != "l2":
        parameters = [local(p) for p in batch.parameters[index]]
        bulk.decay(parameters, batch.lr, batch.weight_decay, accepted[index], batch.decay_method)


def update_of(
    orthogonalize: Orthogonalize,
    taken: frozenset[str] | None,
    batch: Batch,
    index: int,
    accepted: Tensor,
    update: Tensor,
) -> Tensor:
    """What ``orthogonalize`` makes of one update. While it runs, the parameter is as it is after its weight decay.

    Args:
        orthogonalize: takes the parameter, the update, and settings of the group by name.
        taken: see :func:`settings_taken`.
        batch: what the parameter belongs to.
        index: of the parameter in it.
        accepted: for each parameter of the batch, whether it takes part in this step.
        update: the momentum, after the look-ahead.

    Returns:
        A copy, since what comes back may be memory that is written to again for the next parameter.

    Raises:
        ValueError: for a result that cannot be subtracted from the parameter.
    """
    parameter, settings = batch.parameters[index], batch.settings
    if taken is not None:
        settings = {key: settings[key] for key in taken & settings.keys()}
    before = local(parameter).clone() if decays(batch) and batch.decay_method != "l2" else None
    try:
        decay(batch, slice(index, index + 1), accepted)
        result = orthogonalize(parameter, update, **settings)
    finally:
        if before is not None:
            local(parameter).copy_(before)
            del before
    problem = _problem(result, update, parameter)
    if problem:
        raise ValueError(f"orthogonalize of a parameter of shape {tuple(parameter.shape)} must return {problem}")
    return local(result).clone()


def settings_taken(orthogonalize: Orthogonalize) -> frozenset[str] | None:
    """Names of the settings that an ``orthogonalize`` takes beside the parameter and the update; None for all."""
    parameters = list(inspect.signature(orthogonalize).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(each.name for each in parameters[2:] if each.kind in by_name)


def _problem(result: Any, update: Tensor, parameter: Tensor) -> str | None:
    """Why a result cannot be subtracted from the parameter, if it cannot."""
    if not isinstance(result, Tensor):
        return f"a tensor, got {result!r}"
    result = local(result)
    if result.shape != update.shape:
        return f"a tensor of the shape of grad, {tuple(update.shape)}, got {tuple(result.shape)}"
    if result.device != update.device or not torch.can_cast(result.dtype, parameter.dtype):
        wanted = f"on {update.device} that can be cast to {parameter.dtype}"
        return f"a tensor {wanted}, got {result.dtype} on {result.device}"
    return None
