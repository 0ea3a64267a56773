"""State that is not shaped as its parameter, as shards of global tensors: which part of them this rank has."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron_eopt.megatron.checkpoints.keys import Sharded, sharded_tensors, state_key
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.rectangles import copies
from megatron_eopt.step.state import Dim, StateTensor


class Extent(NamedTuple):
    """What this rank has of one dimension of a tensor."""

    length: int  # global
    start: int
    here: int  # the length from there on


def sides_of(layout: Layout) -> dict[str, Extent]:
    """The rows and columns that this rank has of a matrix."""
    held = layout.rectangle
    return {
        "rows": Extent(layout.shape[0], held.top, held.shape[0]),
        "columns": Extent(layout.shape[1], held.left, held.shape[1]),
    }


def along(dims: Iterable[Dim], sides: Mapping[str, Extent]) -> list[Extent]:
    """What this rank has along each dimension of a state tensor."""
    return [Extent(dim, 0, dim) if isinstance(dim, int) else sides[dim] for dim in dims]


def sharded_state(tensor: StateTensor, data: Tensor, parameter: Sharded, layouts: list[Layout]) -> list[ShardedTensor]:
    """This rank's shards of state not shaped as its parameter.

    The tensors of a factory follow one another in this rank's rows, in an order that depends on the tensor-parallel
    size. So where such a parameter is one logical matrix, a state dimension along its rows is saved in as many tensors.
    Where it is several, each matrix has the same rows at every size. ``layouts`` are those of the logical matrices.
    Factories cut rows, and the rows of a state are its first dimension.
    """
    assert tensor.dims is not None
    saved = list(sharded_tensors([parameter]))
    layout = layouts[tensor.matrix]
    replica_id = _replica_id(tensor, layout, saved[0])
    if isinstance(parameter, ShardedTensor) or len(layouts) > 1 or "rows" not in tensor.dims:
        return _sharded(tensor, parameter.key, data, saved[0], sides_of(layout), replica_id)
    state = []
    for shard, view in zip(saved, data.split([shard.local_shape[0] for shard in saved]), strict=True):
        state += _sharded(tensor, shard.key, view, shard, _sides(shard), replica_id)
    return state


def _sharded(
    tensor: StateTensor,
    parameter_key: str,
    data: Tensor,
    of_parameter: ShardedTensor,
    sides: Mapping[str, Extent],
    replica_id: tuple[int, ...],
) -> list[ShardedTensor]:
    """One shard, or none where it is empty; ``sides``: the rows and columns."""
    if not data.numel():
        return []
    assert tensor.dims is not None
    extents = along(tensor.dims or (1,), sides)  # a scalar has one entry
    shape = [extent.here for extent in extents]
    assert list(data.shape) == shape[: data.ndim]
    # With its leading dimensions of one the tensor is whole: Megatron's own way to add them needs equal shards.
    ahead = of_parameter.prepend_axis_num
    whole = data.view(*[1] * ahead, *shape)
    shard = ShardedTensor(
        key=state_key(tensor.key, parameter_key),
        data=whole,
        dtype=data.dtype,
        local_shape=tuple(whole.shape),
        global_shape=(*of_parameter.global_shape[:ahead], *(extent.length for extent in extents)),
        global_offset=(*of_parameter.global_offset[:ahead], *(extent.start for extent in extents)),
        axis_fragmentations=None,
        replica_id=replica_id,
    )
    return [shard]


def _sides(saved: ShardedTensor) -> dict[str, Extent]:
    sides = {}
    for axis, name in enumerate(("rows", "columns"), start=saved.prepend_axis_num):
        here = saved.local_shape[axis - saved.prepend_axis_num]
        sides[name] = Extent(saved.global_shape[axis], saved.global_offset[axis], here)
    return sides


def _replica_id(tensor: StateTensor, layout: Layout, parameter: ShardedTensor) -> tuple[int, ...]:
    """Megatron's number of a copy; the one of zeros is saved."""
    own = parameter.replica_id
    pipeline, tensor_parallel, *data_parallel = own if isinstance(own, tuple) else (0, own)
    if tensor.rank is not None:
        if copies(layout.shape, layout.rectangles) > 1:
            # the one rank that has it need not be the first of its data-parallel group
            data_parallel = [0 for _ in data_parallel]
        return (pipeline, tensor_parallel, *data_parallel)
    assert tensor.dims is not None
    shards = []
    for held in layout.rectangles:
        rows = (held.top, held.bottom) if "rows" in tensor.dims else None
        columns = (held.left, held.right) if "columns" in tensor.dims else None
        shards.append((rows, columns))
    ranks = layout.ranks
    earlier = shards[: layout.rank].count(shards[layout.rank])  # ranks before this one that hold the same shard
    if ranks == 1 and any(parameter.global_offset[parameter.prepend_axis_num :]):
        # an elementwise optimizer knows no layout: the copy of the rank that has the first shard is saved
        ranks = 2
        earlier = 1
    return (pipeline, tensor_parallel * ranks + earlier, *data_parallel)


def joined(tensor: StateTensor, loaded: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`sharded_state`, of local ``shape``."""
    if not loaded:
        return torch.empty(0, dtype=tensor.dtype).view(shape)
    return torch.cat([shard.reshape(-1) for shard in loaded]).view(shape)
