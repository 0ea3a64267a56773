"""Norms of weights that groups hold, or that size updates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

import torch
from torch import Tensor

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.modifiers import OPTIONAL, RADIUS
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.parallel.records import Matrix
from megatron_eopt.parallel.statistics import StatisticsRequest, norms_of


def radii(ends: Sequence[str], optional: bool) -> list[StateTensor]:
    """Each matrix's norm, zero until measured."""
    return [StateTensor(RADIUS + end, (), index, torch.float64, optional=optional) for index, end in enumerate(ends)]


def find_norms(optimizer: OrthogonalizedOptimizer) -> None:
    """Measure the norms to hold; refuse weights that would never move."""
    needing = list[Tensor]()
    for group in optimizer.param_groups:
        needing += group["params"] if optimizer.modifiers_of(group).needs_norm else []
    if not needing:
        return
    matrices, norms = norms_of_weights(optimizer, needing)
    kept = [radius for parameter in needing for radius in radii_of(optimizer, parameter)]
    begin_norms(type(optimizer).__name__, matrices, kept, norms)


def begin_norms(name: str, matrices: Sequence[Matrix], kept: Sequence[Tensor | None], norms: Tensor) -> None:
    """Let kept norms that were not measured begin as ``norms``; None is for one that is not kept.

    A weight without a norm would never move: it is a ``ValueError``, which ``name`` begins.
    """
    known = torch.stack([norms.new_zeros(()) if radius is None else radius for radius in kept])
    for matrix, radius, before, norm in zip(matrices, kept, known.tolist(), norms.tolist(), strict=True):
        # what is 0 was not measured yet, unless the matrix has no entries
        if 0 not in matrix.shape and not before and not 0 < norm < inf:
            does = "keeps the norm that a matrix starts with" if radius is not None else "sizes updates by norms"
            raise ValueError(
                f"{name} {does}, and that of {matrix.name} is {norm:g}: initialize it, or give it to another optimizer "
                f"(AdamW, say)"
            )
    found = zip(kept, torch.where(known == 0, norms, known).unbind(), strict=True)
    if held := [(radius, norm) for radius, norm in found if radius is not None]:
        torch._foreach_copy_([radius for radius, _ in held], [norm for _, norm in held])


def radii_of(optimizer: OrthogonalizedOptimizer, parameter: Tensor) -> Sequence[Tensor | None]:
    """The norm that each matrix of a parameter keeps, or None."""
    if optimizer.modifiers_of(optimizer.group_of(parameter)).weight_norm != "hold":
        return [None] * len(optimizer.key_ends(parameter))
    return kept_radii(optimizer, parameter)


def kept_radii(optimizer: BaseOptimizer, parameter: Tensor) -> list[Tensor]:
    """The norm that each matrix of a parameter keeps, where they are held."""
    ends = optimizer.key_ends(parameter)
    state = optimizer._states.of(parameter, RADIUS + ends[-1])
    return [local(state[RADIUS + end]) for end in ends]


@contextmanager
def followed(optimizer: BaseOptimizer, held: Sequence[Tensor]) -> Iterator[None]:
    """Let kept norms follow weights that are scaled meanwhile."""
    if not held:
        yield
        return
    optimizer.prepare()
    before = norms_of_weights(optimizer, held)[1]
    yield
    kept = [radius for parameter in held for radius in kept_radii(optimizer, parameter)]
    after = norms_of_weights(optimizer, held)[1]
    torch._foreach_mul_(kept, torch.where(before > 0, after / nonzero(before), 1.0).unbind())


def drop_unused(optimizer: OrthogonalizedOptimizer) -> list[str]:
    """Drop loaded state that no modifier keeps; returns its keys."""
    dropped = set()
    for parameter in optimizer._parameters():
        state, used = optimizer.state.get(parameter, {}), {x.key for x in optimizer.state_tensors(parameter)}
        for key in [key for key in state if key not in used and {key, key.rpartition("_")[0]} & {*OPTIONAL}]:
            del state[key]
            dropped.add(key if key in OPTIONAL else key.rpartition("_")[0])
    return sorted(dropped)


def norms_of_weights(optimizer: BaseOptimizer, parameters: Sequence[Tensor]) -> tuple[list[Matrix], Tensor]:
    """Logical matrices of parameters, and their norms in fp64."""
    index_of, engine = {parameter: i for i, parameter in enumerate(optimizer._parameters())}, optimizer.engine
    indices = [index_of[parameter] for parameter in parameters]
    matrices, shards = engine.flat(indices), engine.split(indices, [local(p.detach()) for p in parameters])
    wanted = [StatisticsRequest(matrix=W, x=x, squared_norm=True) for W, x in zip(matrices, shards, strict=True)]
    return matrices, norms_of(engine.statistics(wanted)).sqrt()
