"""A step whose updates a user's method makes."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program, resume
from megatron_eopt.step import foreach
from megatron_eopt.step.state import settings_in
from megatron_eopt.step.step import Batch, Step, cast_to_average
from megatron_eopt.step.users_functions import checked


def users_step(
    batches: Sequence[Batch],
    engine: Engine,
    program: Callable[[Step], Program],
    orthogonalize: Callable[..., Tensor],
    accept: Callable[[Mapping[int, Tensor]], Tensor],
) -> None:
    """Step by a user's ``orthogonalize(p, u, **settings)``.

    If an update is not finite, all count as zero.

    Args:
        batches: all that the step works on.
        engine: of the parameters.
        program: of the optimizer, which gets updates where it asks for orthogonal factors.
        orthogonalize: the user's. While it runs, ``p`` is as it is after its weight decay.
        accept: tells whether all updates, by the indices of their parameters, are finite on all ranks.

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
    updates = list(_updates(batches, momenta, orthogonalize, engine))
    finite = accept(dict(zip(indices, updates, strict=True)))
    if finite.device.type != "cpu" or not finite:
        updates = foreach.where_each(finite, updates, 0.0)
    resume(running, engine.split(indices, updates))


def _updates(
    batches: Sequence[Batch],
    momenta: Sequence[Tensor],
    orthogonalize: Callable[..., Tensor],
    engine: Engine,
) -> Iterator[Tensor]:
    taken = list(inspect.signature(orthogonalize).parameters.values())
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in taken)
    by_name = {argument.name for argument in taken[2:]}
    of_parameters = iter(momenta)
    for batch in batches:
        settings = {key: x for key, x in settings_in(batch.group).items() if takes_all or key in by_name}
        for index, p in zip(batch.indices, batch.parameters, strict=True):
            momentum = next(of_parameters)
            if not momentum.numel() and not engine.shares(index):
                yield momentum
                continue
            result = orthogonalize(p, momentum.clone(), **settings)
            yield checked("orthogonalize of a parameter", result, momentum, p.dtype).clone()
