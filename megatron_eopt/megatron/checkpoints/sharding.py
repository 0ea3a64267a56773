"""How optimizer state is laid out in torch_dist checkpoints.

Megatron stacks layers, and their state, into one tensor. Where layers have different state, it would refuse the holes
in the first save: then it is told to name every layer, which the checkpoint says.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import union
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.rectangles import copies
from megatron_eopt.redirect import around
from megatron_eopt.routing import ParamPattern, rows

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_SETTING = "non_homogeneous_layers"  # Megatron's name for it
_MARK = "megatron_eopt_layers_differ"

type Sharded = ShardedTensor | ShardedTensorFactory
"""What Megatron's model says of a parameter: a factory makes several tensors of it (gate and up of a SwiGLU's fc1)."""


def sharded_state(tensor: StateTensor, data: Tensor, parameter: Sharded, layouts: list[Layout]) -> list[ShardedTensor]:
    """This rank's shards of state not shaped as its parameter.

    The tensors of a factory follow one another in this rank's rows, in an order that depends on the tensor-parallel
    size. So where such a parameter is one logical matrix, a state dimension along its rows is saved in as many tensors.
    Where it is several, each matrix has the same rows at every size. ``layouts`` are those of the logical matrices. A
    ValueError refuses a factory that is not cut along the rows, or whose rows are not the state's first dimension.
    """
    saved = list(sharded_tensors([parameter]))
    layout = layouts[tensor.matrix]
    in_rows = sum(shard.local_shape[0] for shard in saved) == parameter.data.shape[0]
    if not in_rows or any(shard.local_shape[1:] != saved[0].local_shape[1:] for shard in saved):
        raise ValueError(f"{parameter.key} is saved in tensors that are not cut along its rows: {saved}")
    rows_of = [shard.local_shape[0] for shard in saved]
    assert tensor.dims is not None
    held = layout.rectangle
    # Of rows and columns: the global length, and from where to where this rank has them.
    if isinstance(parameter, ShardedTensor) or len(layouts) > 1 or "rows" not in tensor.dims:
        rows = (layout.shape[0], held.top, held.bottom)
        columns = (layout.shape[1], held.left, held.right)
        views = [(saved[0], parameter.key, data, rows, columns)]
    elif "rows" in tensor.dims[1:]:
        raise ValueError(
            f"{tensor.key} of {parameter.key}: rows of a matrix that is saved in {len(saved)} tensors have to be the "
            f"first dimension of a state tensor; got dims {tensor.dims}"
        )
    else:
        views = [(s, s.key, view, *_sides(s)) for s, view in zip(saved, data.split(rows_of), strict=True)]
    state = []
    own = saved[0].replica_id
    if tensor.rank is None:
        replica_id = _replica_id(tensor.dims, layout, saved[0])
    elif copies(layout.shape, layout.rectangles) == 1:
        replica_id = own
    else:
        # the one rank that has it need not be the first of its data-parallel group
        replica_id = 0 if isinstance(own, int) else (*own[:-1], 0)
    for of_parameter, key, view, rows, columns in views:
        if not view.numel():
            continue
        of_side = {"rows": rows, "columns": columns}
        along = [(dim, 0, dim) if isinstance(dim, int) else of_side[dim] for dim in tensor.dims] or [(1, 0, 1)]
        state.append(_sharded(tensor, key, view, of_parameter, along, replica_id))
    return state


def _sharded(
    tensor: StateTensor,
    parameter_key: str,
    data: Tensor,
    of_parameter: ShardedTensor,
    along: Sequence[tuple[int, int, int]],
    replica_id: int | tuple[int, ...],
) -> ShardedTensor:
    """A shard with ``along`` each dimension: global length, start, end."""
    lengths, starts, ends = zip(*along, strict=True)
    shape = [end - start for start, end in zip(starts, ends, strict=True)]
    ahead = of_parameter.prepend_axis_num
    assert list(data.shape) == shape[: data.ndim]
    # With its leading dimensions of one the tensor is whole: Megatron's own way to add them needs equal shards.
    whole = data.view(*[1] * ahead, *shape)
    return ShardedTensor(
        key=state_key(tensor.key, parameter_key),
        data=whole,
        dtype=data.dtype,
        local_shape=tuple(whole.shape),
        global_shape=(*of_parameter.global_shape[:ahead], *lengths),
        global_offset=(*of_parameter.global_offset[:ahead], *starts),
        axis_fragmentations=None,
        replica_id=replica_id,
    )


def _sides(saved: ShardedTensor) -> list[tuple[int, int, int]]:
    lengths, starts = (of[saved.prepend_axis_num :] for of in (saved.global_shape, saved.global_offset))
    ends = (start + size for start, size in zip(starts, saved.local_shape, strict=True))
    return list(zip(lengths, starts, ends, strict=True))


def joined(tensor: StateTensor, loaded: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`sharded_state`, of local ``shape``."""
    flat = [shard.reshape(-1) for shard in loaded]
    if sum(shard.numel() for shard in flat) != torch.Size(shape).numel():
        raise ValueError(f"what was loaded for {tensor.key} does not fill its shape {shape}")
    return torch.cat(flat).view(shape) if flat else torch.empty(shape, dtype=tensor.dtype)


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


def _replica_id(dims: Sequence[str | int], layout: Layout, parameter: ShardedTensor) -> int | tuple[int, ...]:
    """The parameter's own, told apart where state has more copies."""
    own = parameter.replica_id
    rows = "rows" in dims
    columns = "columns" in dims
    shards = [(rows and (held.top, held.bottom), columns and (held.left, held.right)) for held in layout.rectangles]
    ranks = layout.ranks
    earlier = shards[: layout.rank].count(shards[layout.rank])  # ranks before this one that hold the same shard
    if ranks == 1 and any(parameter.global_offset[parameter.prepend_axis_num :]):
        # an elementwise optimizer knows no layout: the copy of the rank that has the first shard is saved
        ranks = 2
        earlier = 1
    if isinstance(own, int):
        return own * ranks + earlier
    pipeline, tensor, *data = own
    return (pipeline, tensor * ranks + earlier, *data)


def layers_differ(families: Iterable[ParamPattern], frozen: Iterable[str]) -> bool:
    """Whether layers have different optimizers or state; one layer's experts may not."""
    kinds: dict[str, set[tuple[str | None, int, int]]] = defaultdict(set)
    for row in rows(families):
        kinds[_EXPERT.sub("*", row.name)].add((row.optimizer, len(row.matrices), row.state_bytes))
    for name in union(_EXPERT.sub("*", name) for name in frozen):
        kinds[name].add((None, 0, 0))
    args = releases.training_args()
    saves = getattr(args, "save", None) is not None and getattr(args, "ckpt_format", None) == "torch_dist"
    for name, treated in sorted(kinds.items()):
        if saves and len(treated) > 1:
            optimizers = " and ".join(sorted({optimizer or "none" for optimizer, *_ in treated}))
            raise ValueError(
                f"experts of one layer ({name}) are treated differently (optimizers: {optimizers}), and Megatron "
                f"stacks their state in torch_dist checkpoints: let overrides select all experts of a layer, or leave "
                f"--save away"
            )
    of_layers: dict[str, set[frozenset[Any]]] = defaultdict(set)
    for name, treated in kinds.items():
        of_layers[_LAYER.sub("*", name)].add(frozenset(treated))
    return any(len(treated) > 1 for treated in of_layers.values())


def keep_apart(model_chunks: Sequence[Any], apart: bool) -> None:
    """Set whether checkpoints name every layer of a model."""
    for chunk in unwrap_model(list(model_chunks)):
        setattr(chunk, _MARK, apart)


@around
def undecided(build_metadata: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Lets :func:`named_apart` decide, instead of ``_build_sharded_state_dict_metadata``."""
    return {_SETTING: None} | build_metadata(*args, **kwargs)


@around
def named_apart(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``generate_state_dict``: layers to :func:`keep_apart` are named."""
    given = inspect.signature(generate).bind(*args, **kwargs).arguments
    apart = any(getattr(chunk, _MARK, False) for chunk in given["model"])
    for name in ("model_sd_kwargs", "optim_sd_kwargs"):
        metadata = (given.get(name) or {}).get("metadata") or {}
        if metadata.get(_SETTING, ...) is None:
            metadata.pop(_SETTING)
            metadata |= {_SETTING: True} if apart else {}
    return generate(*args, **kwargs)
