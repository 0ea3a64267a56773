"""Functions of the user's that orthogonalize a matrix, in place of Newton-Schulz, and what they get of its shards."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.records import Matrix, cut_dimension
from megatron_eopt.parallel.schemes.whole import cut_out, gather


def of_whole(
    function: Callable[..., Tensor], shard: Tensor, matrix: Matrix, group: ProcessGroup | None, *more: Any
) -> Tensor:
    """This rank's shard of what a function makes of a whole matrix, and of ``more``; all ranks compute it together."""
    if 0 in matrix.shape:
        return shard
    if group is None or not matrix.sharded:
        return function(shard, *more)
    (whole,) = gather([shard[None]], [matrix], group)()
    return cut_out(function(whole[0], *more), matrix.rectangles[group.rank()])


def takes_shards(function: Callable[..., Tensor]) -> bool:
    """Whether a function is called as Megatron does, ``(grad, tp_group, partition_dim)``: it needs or names them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) > 1 or any(p.name in ("tp_group", "partition_dim") for p in parameters)


def partition_of(matrix: Matrix) -> int | None:
    """Along which dimension Megatron's tensor parallelism cuts a matrix; None where nothing else is cut like it."""
    tensor_parallel = matrix.group in ("tp", "expt_tp") and not matrix.uneven and 0 not in matrix.shape
    return cut_dimension(matrix.shape, matrix.rectangles) if tensor_parallel else None
