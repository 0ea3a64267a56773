"""How optimizer state is laid out in torch_dist checkpoints."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.rectangles import copies
from megatron_eopt.step.state import StateTensor

type Sharded = ShardedTensor | ShardedTensorFactory
"""What Megatron's model says of a parameter: a factory makes several tensors of it (gate and up of a SwiGLU's fc1)."""
type ReplicaId = int | tuple[int, ...]
"""Megatron's number of a copy; the copy of zeros is saved."""


class Extent(NamedTuple):
    """From where to where this rank has one dimension of a tensor."""

    length: int  # global
    start: int
    end: int


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
        held = layout.rectangle
        sides = {
            "rows": Extent(layout.shape[0], held.top, held.bottom),
            "columns": Extent(layout.shape[1], held.left, held.right),
        }
        return _sharded(tensor, parameter.key, data, saved[0], sides, replica_id)
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
    replica_id: ReplicaId,
) -> list[ShardedTensor]:
    """One shard, or none where it is empty; ``sides``: the rows and columns."""
    if not data.numel():
        return []
    assert tensor.dims is not None
    along = [Extent(dim, 0, dim) if isinstance(dim, int) else sides[dim] for dim in tensor.dims]
    if not along:  # a scalar
        along = [Extent(1, 0, 1)]
    shape = [side.end - side.start for side in along]
    assert list(data.shape) == shape[: data.ndim]
    # With its leading dimensions of one the tensor is whole: Megatron's own way to add them needs equal shards.
    ahead = of_parameter.prepend_axis_num
    whole = data.view(*[1] * ahead, *shape)
    shard = ShardedTensor(
        key=state_key(tensor.key, parameter_key),
        data=whole,
        dtype=data.dtype,
        local_shape=tuple(whole.shape),
        global_shape=(*of_parameter.global_shape[:ahead], *(side.length for side in along)),
        global_offset=(*of_parameter.global_offset[:ahead], *(side.start for side in along)),
        axis_fragmentations=None,
        replica_id=replica_id,
    )
    return [shard]


def _sides(saved: ShardedTensor) -> dict[str, Extent]:
    sides = {}
    for axis, name in enumerate(("rows", "columns"), start=saved.prepend_axis_num):
        start = saved.global_offset[axis]
        length = saved.local_shape[axis - saved.prepend_axis_num]
        sides[name] = Extent(saved.global_shape[axis], start, start + length)
    return sides


def _replica_id(tensor: StateTensor, layout: Layout, parameter: ShardedTensor) -> ReplicaId:
    own = parameter.replica_id
    if tensor.rank is None:
        return _told_apart(tensor, layout, parameter)
    if copies(layout.shape, layout.rectangles) == 1:
        return own
    # the one rank that has it need not be the first of its data-parallel group
    return 0 if isinstance(own, int) else (*own[:-1], 0)


def _told_apart(tensor: StateTensor, layout: Layout, parameter: ShardedTensor) -> ReplicaId:
    """The parameter's own, told apart where state has more copies."""
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
    own = parameter.replica_id
    if isinstance(own, int):
        return own * ranks + earlier
    pipeline, tensor_parallel, *data_parallel = own
    return (pipeline, tensor_parallel * ranks + earlier, *data_parallel)


def joined(tensor: StateTensor, loaded: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`sharded_state`, of local ``shape``."""
    if not loaded:
        return torch.empty(0, dtype=tensor.dtype).view(shape)
    return torch.cat([shard.reshape(-1) for shard in loaded]).view(shape)


def state_key(key: str, parameter_key: str) -> str:
    """Megatron's key of a state tensor."""
    return f"optimizer.state.{key}.{parameter_key}"


def sharded_tensors(state_dict: Any) -> Iterator[ShardedTensor]:
    """The tensors of a state dict, with those of factories."""
    for value in nested_values(state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors(value.build())


def stacked_index(parameter: Sharded) -> int:
    """Index among the layers and experts stacked under a key."""
    first = next(sharded_tensors([parameter]))
    index = 0
    for axis in range(first.prepend_axis_num):
        index = index * first.global_shape[axis] + first.global_offset[axis]
    return index
