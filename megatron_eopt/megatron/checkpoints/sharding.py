"""State tensors of any shape as Megatron's ShardedTensors, from the description of the state alone."""

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.parallel.layout import Layout

type Sharded = ShardedTensor | ShardedTensorFactory
"""What Megatron's model says of a parameter: a factory makes several tensors of it (gate and up of a SwiGLU's fc1)."""


def sharded_state(tensor: StateTensor, data: Tensor, parameter: Sharded, layouts: list[Layout]) -> list[ShardedTensor]:
    """One state tensor whose shape is not that of its parameter, as what is saved and loaded of it on this rank.

    A factory's parts follow one another in the rows that this rank holds, in an order that depends on the
    tensor-parallel size. So where the parameter is one matrix, a dimension along its rows is cut into the same parts,
    each in its own place. One of several logical matrices has places of its own at every size.

    Args:
        tensor: its description; ``dims`` is not None.
        data: this rank's part.
        parameter: the sharded tensor of the parameter, with its data.
        layouts: of the logical matrices of the parameter.

    Returns:
        Views of ``data``, one behind the other along its first dimension; none where it is empty.

    Raises:
        ValueError: for a parameter whose parts are not cut along its rows, and, where they are of one matrix, for rows
            in another than the first dimension.
    """
    assert tensor.dims is not None
    parts = _parts(parameter)
    in_parts = len(parts) > 1 and len(layouts) == 1
    if in_parts and "rows" in tensor.dims[1:]:
        raise ValueError(
            f"{tensor.key} of {parameter.key}: rows of a matrix that is saved in {len(parts)} parts have to be the "
            f"first dimension of a state tensor; got dims {tensor.dims}"
        )
    layout = layouts[tensor.matrix]
    replica_id = _replica_id(parts[0].replica_id, _earlier_copies(tensor, layout), layout.ranks)
    if tensor.dims[:1] != ("rows",) or not in_parts:
        sides = {
            "rows": (layout.shape[0], layout.piece.top, layout.piece.bottom),
            "columns": (layout.shape[1], layout.piece.left, layout.piece.right),
        }
        return _placed(tensor, data, parameter.key, parts[0], sides, replica_id)
    placed = []
    start = 0
    for part in parts:
        rows, columns = (_side(part, axis) for axis in (0, 1))
        size = part.local_shape[0]
        piece = data[start : start + size]
        placed += _placed(tensor, piece, part.key, part, {"rows": rows, "columns": columns}, replica_id)
        start += size
    return placed


def joined(tensor: StateTensor, parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The state tensor of local ``shape`` from what was loaded for :func:`sharded_state`."""
    flat = [part.reshape(-1) for part in parts]
    if sum(part.numel() for part in flat) != torch.Size(shape).numel():
        raise ValueError(f"what was loaded for {tensor.key} does not fill its shape {shape}")
    return torch.cat(flat).view(shape) if flat else torch.empty(shape, dtype=tensor.dtype)


def state_key(key: str, parameter_key: str) -> str:
    """Where a checkpoint holds a state tensor: Megatron's rule."""
    return f"optimizer.state.{key}.{parameter_key}"


def built(parameter: Sharded) -> list[ShardedTensor]:
    """The tensors that are saved of a parameter on this rank."""
    if isinstance(parameter, ShardedTensor):
        return [parameter]
    return [part for part in nested_values(parameter.build()) if isinstance(part, ShardedTensor)]


def _parts(parameter: Sharded) -> list[ShardedTensor]:
    parts = built(parameter)
    rows = sum(part.local_shape[0] for part in parts)
    if rows != parameter.data.shape[0] or any(p.local_shape[1:] != parts[0].local_shape[1:] for p in parts):
        raise ValueError(f"{parameter.key} is saved in parts that are not cut along its rows: {parts}")
    return parts


def _side(part: ShardedTensor, axis: int) -> tuple[int, int, int]:
    """Global length of a dimension of the parameter, and from where to where this rank's part goes."""
    place = part.prepend_axis_num + axis
    start = part.global_offset[place]
    return part.global_shape[place], start, start + part.local_shape[axis]


def _placed(
    tensor: StateTensor,
    data: Tensor,
    key: str,
    part: ShardedTensor,
    sides: dict[str, tuple[int, int, int]],
    replica_id: int | tuple[int, ...],
) -> list[ShardedTensor]:
    assert tensor.dims is not None
    if not data.numel():
        return []
    ahead = part.prepend_axis_num  # dimensions of stacked layers and experts
    along = [(dim, 0, dim) if isinstance(dim, int) else sides[dim] for dim in tensor.dims] or [(1, 0, 1)]
    assert tuple(data.shape) == tuple(end - start for _, start, end in along[: data.ndim])
    # With its leading dimensions of one the tensor is whole: Megatron's own way to add them needs equal shards.
    view = data.view(*[1] * ahead, *[end - start for _, start, end in along])
    return [
        ShardedTensor(
            key=state_key(tensor.key, key),
            data=view,
            dtype=view.dtype,
            local_shape=tuple(view.shape),
            global_shape=(*part.global_shape[:ahead], *(length for length, _, _ in along)),
            global_offset=(*part.global_offset[:ahead], *(start for _, start, _ in along)),
            axis_fragmentations=None,
            replica_id=replica_id,
        )
    ]


def _earlier_copies(tensor: StateTensor, layout: Layout) -> int:
    """How many ranks before this one hold the same part of the state tensor."""
    assert tensor.dims is not None
    held = [
        tuple(
            (piece.top, piece.bottom) if dim == "rows" else (piece.left, piece.right) if dim == "columns" else ()
            for dim in tensor.dims
        )
        for piece in layout.pieces
    ]
    return held[: layout.rank].count(held[layout.rank])


def _replica_id(of_parameter: int | tuple[int, ...], copies: int, ranks: int) -> int | tuple[int, ...]:
    """That of the parameter, (pipeline, tensor, data), told apart further where a state tensor has more copies."""
    if isinstance(of_parameter, int):
        return of_parameter * ranks + copies
    pipeline, tensor, *data = of_parameter
    return (pipeline, tensor * ranks + copies, *data)
