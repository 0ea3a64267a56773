"""A step whose updates a user's method makes."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from megatron_eopt.parallel.scheduler import Program, begin, resume
from megatron_eopt.step import foreach
from megatron_eopt.step.momenta.momentum_stack import MomentumStack
from megatron_eopt.step.stacks import Chunk
from megatron_eopt.step.state import settings_in
from megatron_eopt.step.users_functions import checked


def users_step(
    chunk: Chunk[MomentumStack],
    running: Program,
    orthogonalize: Callable[..., Tensor],
    accept: Callable[[Mapping[int, Tensor]], Tensor],
) -> None:
    """Step by a user's ``orthogonalize(p, u, **settings)``.

    If an update is not finite, all count as zero.

    Args:
        chunk: all that the step works on.
        running: its step, which gets updates where it asks for orthogonal factors.
        orthogonalize: the user's. While it runs, ``p`` is as it is after its weight decay.
        accept: tells whether all updates, by the indices of their parameters, are finite on all ranks.

    Raises:
        ValueError: for an update that cannot be subtracted from its parameter.
    """
    indices = chunk.indices
    if not indices:
        accept({})
        return
    shards = begin(running)
    assert not callable(shards)  # a chunk without kernels
    momenta = chunk.engine.merge(indices, shards)
    updates = list(_updates(chunk, momenta, orthogonalize))
    finite = accept(dict(zip(indices, updates, strict=True)))
    if finite.device.type != "cpu" or not finite:
        updates = foreach.where_each(finite, updates, 0.0)
    resume(running, chunk.engine.split(indices, updates))


def _updates(
    chunk: Chunk[MomentumStack], momenta: Sequence[Tensor], orthogonalize: Callable[..., Tensor]
) -> Iterator[Tensor]:
    taken = list(inspect.signature(orthogonalize).parameters.values())
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in taken)
    by_name = {argument.name for argument in taken[2:]}
    group_of = {member.index: stack.group for stack in chunk.stacks for member in stack.members}
    for (index, p), momentum in zip(chunk.parameters.items(), momenta, strict=True):
        if not momentum.numel() and not chunk.engine.shares(index):
            yield momentum
            continue
        settings = {key: x for key, x in settings_in(group_of[index]).items() if takes_all or key in by_name}
        result = orthogonalize(p, momentum.clone(), **settings)
        yield checked("orthogonalize of a parameter", result, momentum, p.dtype).clone()
