"""What optimizers share that work on whole matrices, each on a compute rank."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.factored_chunks import Planned, Sides
from megatron_eopt.optimizers.parameters import DescribedMatrix, check_matrix, check_shard, names_of_last

CLOCK = "clock"  # setting of a group: steps of the optimizer so far, by which factors are worked on again

Takes = Literal["matrices", "matrices and vectors"]


def check_group(optimizer: BaseOptimizer, group: dict[str, Any], takes: Takes) -> None:
    """Refuse parameters of the last group, and begin its clock."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    several = group["params"], names_of_last(groups), names_of_last(groups, shapes=False)
    for parameter, called, index in zip(*several, strict=True):
        is_matrix = parameter.ndim > 1 or takes == "matrices"
        if is_matrix:
            check_matrix(name, parameter, f"takes {takes}, but {index}")
        try:
            optimizer.layout(parameter)
        except ValueError as error:
            raise ValueError(f"{name} cannot lay {called} out: {error}") from error
        if is_matrix:
            optimizer._check_split(parameter)
            check_shard(parameter, optimizer.pg_collection, called)
    group.setdefault(CLOCK, 0)


def planned(optimizer: BaseOptimizer, sides: Sides, all_whole: bool = False) -> dict[Tensor, list[Planned]]:
    """Plan the matrices of all parameters; a new group changes no other's compute ranks.

    Groups have the setting ``max_dim``, the longest side that has a factor.
    """
    plans: dict[Tensor, list[Planned]] = {}
    loads: dict[str, list[int]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            pairs = zip(optimizer.key_ends(p), optimizer.matrix_layouts(p), strict=True)
            longest = group["max_dim"] if p.ndim > 1 else -1
            plans[p] = [Planned(*pair, longest, sides, all_whole) for pair in pairs]
        cut = (plan for p in group["params"] if not isinstance(p, DTensor) for plan in plans[p] if plan.gathered)
        for plan in sorted(cut, key=lambda plan: -plan.cost):
            load = loads.setdefault(plan.layout.label, [0] * plan.layout.ranks)
            plan.compute_rank = load.index(min(load))
            load[plan.compute_rank] += plan.cost
    return plans


def described(optimizer: BaseOptimizer, plans: Mapping[Tensor, list[Planned]]) -> dict[Tensor, list[DescribedMatrix]]:
    """The logical matrices of each parameter that is no vector."""
    matrices: dict[Tensor, list[DescribedMatrix]] = {}
    for parameter in (p for p in plans if p.ndim > 1):
        names = optimizer.split_of(parameter).names(optimizer.layout(parameter).shape[0])
        matrices[parameter] = []
        for name, plan in zip(names, plans[parameter], strict=True):
            dealt, alone = ("owner", "duplicated") if plan.layout.sharded else ("share", "local")
            scheme = alone if plan.compute_rank is None else dealt
            matrices[parameter].append(DescribedMatrix(name, plan.layout.shape, scheme, 1.0, None))
    return matrices
