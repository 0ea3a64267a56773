"""A step whose updates a user's method makes."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.batches import Batch, repeated
from megatron_eopt.optimizers.foreach import Mask
from megatron_eopt.optimizers.muon import Chunk, chosen, counts_of
from megatron_eopt.optimizers.users_functions import checked
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program, resume


def users_step(
    batches: Sequence[Batch],
    engine: Engine,
    program: Callable[[Chunk, Engine], Program],
    orthogonalize: Callable[..., Tensor],
    waited_for: Callable[[int], bool],
    accept: Callable[[Mapping[int, Tensor]], Tensor],
    changing: Callable[[bool], None],
) -> None:
    """Step by a user's ``orthogonalize(p, u, **settings)``.

    Args:
        batches: all that the step works on.
        engine: of the parameters.
        program: of the optimizer, which gets updates where it asks for orthogonal factors.
        orthogonalize: the user's. While it runs, ``p`` is as it is after its weight decay.
        waited_for: whether other ranks wait for this one's part of a parameter, which may have no entries.
        accept: tells which of the updates, by the indices of their parameters, are finite on all ranks: a vector over
            all parameters of the optimizer.
        changing: is told when weights or state begin to be changed, and when they are again as they were.

    Raises:
        ValueError: for an update that cannot be subtracted from its parameter.
    """
    batches = chosen(batches)
    indices = [i for batch in batches for i in batch.indices]
    if not indices:
        accept({})
        return
    copies = [_copied(batch) for batch in batches]
    scales = [1.0] * sum(sum(counts_of(engine, batch)) for batch in copies)
    running = program(Chunk(copies, indices, scales), engine)
    shards = next(running)
    assert not callable(shards)  # a chunk without kernels
    momenta = engine.merge(indices, shards)
    updates = list(_updates(batches, copies, momenta, orthogonalize, waited_for, changing))
    finite = accept(dict(zip(indices, updates, strict=True)))
    masks: list[Mask] = [None] * len(batches)
    if finite.device.type != "cpu" or not finite[indices].all():
        flags = finite.unbind()
        of_batches = [torch.stack([flags[i] for i in batch.indices]) for batch in batches]
        updates, masks = foreach.masked(updates, 0.0, torch.cat(of_batches)), [*of_batches]
    resume(running, engine.split(indices, updates))
    changing(True)
    for batch, copy, mask in zip(batches, copies, masks, strict=True):
        old, new = list(chain(*batch.changed)), list(chain(*copy.changed))
        of_each = None if mask is None else repeated(mask, list(map(len, batch.changed)))
        torch._foreach_copy_(old, foreach.masked(new, old, of_each))


def _copied(batch: Batch) -> Batch:
    def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.clone() for x in tensors]

    further = [{key: x.clone() for key, x in kept.items()} for kept in batch.further]
    return replace(batch, weights=copies(batch.weights), momenta=copies(batch.momenta), further=further)


def _updates(
    batches: Sequence[Batch],
    copies: Sequence[Batch],
    momenta: Sequence[Tensor],
    orthogonalize: Callable[..., Tensor],
    waited_for: Callable[[int], bool],
    changing: Callable[[bool], None],
) -> Iterator[Tensor]:
    taken = list(inspect.signature(orthogonalize).parameters.values())
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in taken)
    by_name = {
        argument.name
        for argument in taken[2:]
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    }
    of_parameters = iter(momenta)
    for batch, copy in zip(batches, copies, strict=True):
        settings = {key: value for key, value in batch.settings.items() if takes_all or key in by_name}
        decayed = batch.decays and batch.decay_method != "l2"
        several = zip(batch.indices, batch.parameters, batch.weights, copy.weights, strict=True)
        for index, p, weight, after_decay in several:
            momentum = next(of_parameters)
            if not momentum.numel() and not waited_for(index):
                yield momentum
                continue
            before = weight.clone() if decayed else None
            try:
                if before is not None:
                    changing(True)
                    weight.copy_(after_decay)
                result = orthogonalize(p, momentum.clone(), **settings)
            finally:
                if before is not None:
                    weight.copy_(before)
                    changing(False)
            yield checked("orthogonalize of a parameter", result, momentum, p.dtype).clone()
