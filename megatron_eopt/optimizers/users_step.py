"""A step whose updates a user's method makes."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.step import Batch, Step, cast_to_average
from megatron_eopt.optimizers.users_functions import checked
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program, resume


def users_step(
    batches: Sequence[Batch],
    engine: Engine,
    program: Callable[[Step], Program],
    orthogonalize: Callable[..., Tensor],
    waited_for: Callable[[int], bool],
    accept: Callable[[Mapping[int, Tensor]], Tensor],
) -> None:
    """Step by a user's ``orthogonalize(p, u, **settings)``.

    An update that is not finite counts as zero.

    Args:
        batches: all that the step works on.
        engine: of the parameters.
        program: of the optimizer, which gets updates where it asks for orthogonal factors.
        orthogonalize: the user's. While it runs, ``p`` is as it is after its weight decay.
        waited_for: whether other ranks wait for this one's part of a parameter, which may have no entries.
        accept: tells which of the updates, by the indices of their parameters, are finite on all ranks: a vector over
            all parameters of the optimizer.

    Raises:
        ValueError: for an update that cannot be subtracted from its parameter.
    """
    batches = cast_to_average(batches)
    indices = [i for batch in batches for i in batch.indices]
    if not indices:
        accept({})
        return
    step = Step(batches, indices, [], engine)
    scales = [1.0] * sum(sum(step.counts(batch)) for batch in batches)
    running = program(replace(step, scales=scales))
    shards = next(running)
    assert not callable(shards)  # a chunk without kernels
    momenta = engine.merge(indices, shards)
    updates = list(_updates(batches, momenta, orthogonalize, waited_for))
    finite = accept(dict(zip(indices, updates, strict=True)))
    if finite.device.type != "cpu" or not finite[indices].all():
        flags = finite.unbind()
        updates = foreach.masked(updates, 0.0, torch.stack([flags[i] for i in indices]))
    resume(running, engine.split(indices, updates))


def _updates(
    batches: Sequence[Batch],
    momenta: Sequence[Tensor],
    orthogonalize: Callable[..., Tensor],
    waited_for: Callable[[int], bool],
) -> Iterator[Tensor]:
    taken = list(inspect.signature(orthogonalize).parameters.values())
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in taken)
    by_name = {argument.name for argument in taken[2:]}
    of_parameters = iter(momenta)
    for batch in batches:
        settings = {key: value for key, value in batch.group_settings.items() if takes_all or key in by_name}
        for index, p in zip(batch.indices, batch.parameters, strict=True):
            momentum = next(of_parameters)
            if not momentum.numel() and not waited_for(index):
                yield momentum
                continue
            result = orthogonalize(p, momentum.clone(), **settings)
            yield checked("orthogonalize of a parameter", result, momentum, p.dtype).clone()
