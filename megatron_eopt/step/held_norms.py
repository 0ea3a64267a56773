"""Norms of weights that groups hold, or that size updates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.settings.modifiers import OPTIONAL, RADIUS, without_matrix
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import local
from megatron_eopt.step.state import StateTensor
from megatron_eopt.step.weight_step import squares_of_shards


def radius_tensors(ends: Sequence[str], optional: bool) -> list[StateTensor]:
    """Each matrix's norm, zero until measured."""
    tensors = []
    for index, end in enumerate(ends):
        tensors.append(StateTensor(RADIUS + end, (), index, torch.float64, optional=optional, non_negative=True))
    return tensors


def find_norms(optimizer: BaseOptimizer) -> None:
    """Measure the norms to hold; refuse weights that would never move."""
    settled = optimizer._session.settled
    needing = list[Tensor]()
    held = set[Tensor]()
    for group, modifiers in zip(optimizer.param_groups, settled.modifiers, strict=True):
        if modifiers.holds:
            held.update(group["params"])
        if modifiers.holds or (modifiers.needs_norm and not settled.norms_checked):
            needing += group["params"]
    if needing:
        begin_norms(optimizer, type(optimizer).__name__, needing, held)
    settled.norms_checked = True


def begin_norms(optimizer: BaseOptimizer, name: str, needing: Sequence[Tensor], held: set[Tensor]) -> None:
    """Let norms that were not measured yet begin as those of the weights.

    A weight without a norm would never move: it is a ``ValueError``, which ``name`` begins. Of parameters ``needing``
    a norm those that are ``held`` keep it.
    """
    keys = {p: RADIUS + optimizer.key_ends(p)[-1] for p in held}
    needing = [p for p in needing if p not in held or not optimizer._has_begun(p, keys[p])]
    if not needing:
        return
    matrices, norms = norms_of_weights(optimizer, needing)
    radii = list[Tensor | None]()  # of each matrix that keeps its norm
    for parameter in needing:
        of_matrices = kept_radii(optimizer, parameter) if parameter in held else []
        radii += of_matrices or [None] * len(optimizer.key_ends(parameter))
    known = torch.stack([norms.new_zeros(()) if radius is None else radius for radius in radii])
    for matrix, radius, before, norm in zip(matrices, radii, known.tolist(), norms.tolist(), strict=True):
        # what is 0 was not measured yet, unless the matrix has no entries
        if 0 not in matrix.shape and not before and not 0 < norm < inf:
            does = "sizes updates by norms" if radius is None else "keeps the norm that a matrix starts with"
            raise ValueError(
                f"{name} {does}, and that of {matrix.name} is {norm:g}: initialize it, or give it to another optimizer "
                f"(AdamW, say)"
            )
    for radius, norm in zip(radii, torch.where(known == 0, norms, known).unbind(), strict=True):
        if radius is not None:
            radius.copy_(norm)
    for parameter in held.intersection(needing):
        optimizer._note_begun(parameter, keys[parameter])


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
    _, before = norms_of_weights(optimizer, held)
    yield
    _, after = norms_of_weights(optimizer, held)
    ratios = torch.where(before > 0, after / nonzero(before), 1.0)
    radii = [radius for parameter in held for radius in kept_radii(optimizer, parameter)]
    torch._foreach_mul_(radii, ratios.unbind())


def drop_unused(optimizer: BaseOptimizer) -> list[str]:
    """Drop loaded state that no modifier keeps; returns its keys."""
    dropped = set[str]()
    for parameter in optimizer._parameters():
        state = optimizer.state.get(parameter, {})
        used = {tensor.key for tensor in optimizer.state_tensors(parameter)}
        for key in state.keys() - used:
            name = without_matrix(key)
            if name in OPTIONAL:
                del state[key]
                dropped.add(name)
    return sorted(dropped)


def norms_of_weights(optimizer: BaseOptimizer, parameters: Sequence[Tensor]) -> tuple[list[Matrix], Tensor]:
    """Logical matrices of parameters, and their norms in fp64."""
    indices = optimizer._indices_of(parameters)
    shards = optimizer.engine.split(indices, [local(p.detach()) for p in parameters])
    matrices = optimizer.engine.flat(indices)
    [squares] = squares_of_shards(optimizer.engine, matrices, shards)
    return matrices, squares.sqrt()
