"""Functions of the user's that orthogonalize in place of Newton-Schulz."""

import inspect
from collections.abc import Callable, Sequence
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.exchange import cut_out, gather
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import cut_dimension
from megatron_eopt.settings.groups import warn
from megatron_eopt.settings.of_class import class_of_ours
from megatron_eopt.step.parameters import local

OF_USERS = ("orthogonalize", "scaled_orthogonalize_fn", "orthogonalize_fn", "scale_factor_fn")
"""Methods that users may override where updates are orthogonalized."""

HOOKS_OF_OTHERS = (
    "pre_weight_update_fn_inplace",
    "post_weight_update_fn_inplace",
    "_apply_weight_decay_inplace",
    "_apply_moment2_normalization",
    "_apply_muon_scale",
    "_match_frobenius_norm",
    "scaled_orthogonalize_fn_with_gtp_remat",
)
"""Methods that emerging-optimizers 0.3.0 and Megatron call in a step, and nothing here does."""


def warn_of_uncalled(cls: Any) -> None:
    """Warn, once for all of them, of methods of a user's class that no step of ours calls."""
    ours = class_of_ours(cls)
    names = [name for name in (*OF_USERS, *HOOKS_OF_OTHERS) if hasattr(cls, name) and not hasattr(ours, name)]
    if names and cls._take is ours._take and cls.step is ours.step:
        warn(
            f"{cls.__name__}: no step here calls {', '.join(names)}, hooks of emerging-optimizers and Megatron: do the "
            f"same in orthogonalize of a TensorParallelMuon, in a hook of torch (register_step_post_hook), or in a "
            f"step of your own"
        )


def of_whole(
    function: Callable[..., Tensor], name: str, shard: Tensor, matrix: Matrix, group: ProcessGroup | None, *more: Any
) -> Tensor:
    """This rank's shard of a function of whole matrices; collective."""
    if 0 in matrix.shape:
        return shard
    if group is None or not matrix.sharded:
        return checked(f"{name} of a matrix", function(shard, *more), shard)
    (whole,) = gather([shard[None]], [matrix], group)()
    result = checked(f"{name} of a matrix", function(whole[0], *more), whole[0])
    return cut_out(result, matrix.rectangles[group.rank()])


def checked(called: str, result: Any, grad: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A function's local result; a ``ValueError`` for no update."""
    dtype = dtype or grad.dtype
    x = local(result)
    found = result
    if isinstance(x, Tensor):
        if x.shape == grad.shape and x.device == grad.device and torch.can_cast(x.dtype, dtype):
            return x if x.is_floating_point() else x.to(dtype)
        found = f"{tuple(x.shape)} on {x.device} of {x.dtype}"
    raise ValueError(
        f"{called} must return a tensor of shape {tuple(grad.shape)} on {grad.device} that can be cast to {dtype}, got "
        f"{found}"
    )


def factors_by_user(
    function: Callable[[Tensor], Tensor], engine: Engine, index: int, shards: Sequence[Tensor]
) -> list[Tensor]:
    """Orthogonal factors by a user's ``orthogonalize_fn`` of whole matrices."""
    pairs = zip(shards, engine.matrices[index], strict=True)
    return [of_whole(function, "orthogonalize_fn", x, m, engine.groups.get(m.group)).clone() for x, m in pairs]


def scaled_by_user(
    function: Callable[..., Tensor], tp: ProcessGroup | None, engine: Engine, index: int, shards: Sequence[Tensor]
) -> list[Tensor]:
    """Updates by a user's ``scaled_orthogonalize_fn``, of shards with ``tp``."""
    name = "scaled_orthogonalize_fn"
    updates = []
    for matrix, shard in zip(engine.matrices[index], shards, strict=True):
        group = engine.groups.get(matrix.group)
        dim = partition_of(matrix)
        if not takes_shards(function):
            updates.append(of_whole(function, name, shard, matrix, group))
        elif dim is None:
            updates.append(of_whole(function, name, shard, matrix, group, tp, None))
        else:
            updates.append(checked(f"{name} of a shard", function(shard, tp, dim), shard))
    return updates


def scales_of(scale: Callable[[int, int], float] | None, matrices: Sequence[Matrix]) -> list[float]:
    """The scale of each matrix, 1 without a function of it."""
    # that of a matrix without entries may divide by zero
    scales = [1.0 if scale is None or 0 in matrix.shape else scale(*matrix.shape) for matrix in matrices]
    for x, matrix in zip(scales, matrices, strict=True):
        if not isinstance(x, Real | Tensor) or not -inf < x < inf:
            rows, cols = matrix.shape
            raise ValueError(f"scale_factor_fn of {rows} rows and {cols} columns must return a number, got {x!r}")
    return list(map(float, scales))


def takes_shards(function: Callable[..., Tensor]) -> bool:
    """Whether a function takes Megatron's ``(grad, tp_group, partition_dim)``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) > 1 or any(p.name in ("tp_group", "partition_dim") for p in parameters)


def partition_of(matrix: Matrix) -> int | None:
    """The dimension that Megatron's tensor parallelism cuts, if only that."""
    tensor_parallel = matrix.group in ("tp", "expt_tp") and not matrix.uneven and 0 not in matrix.shape
    return cut_dimension(matrix.shape, matrix.rectangles) if tensor_parallel else None
