"""How optimizer state is laid out in a checkpoint: as ShardedTensors, by its description alone, layer by layer.

Megatron stacks layers that are alike into one tensor of the checkpoint, and so their state. Where some layers have no
state, or another, the stack would have holes, which Megatron refuses in the first save. It can name every layer
instead; it writes down in the checkpoint that it did, and reads that before it loads.
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

from megatron_eopt.manifest import ParamPattern, rows
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import distinct
from megatron_eopt.megatron.parameters import shard_of
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.records import copies
from megatron_eopt.redirect import around

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_SETTING = "non_homogeneous_layers"  # Megatron's name for it
_MARK = "megatron_eopt_layers_differ"

type Sharded = ShardedTensor | ShardedTensorFactory
"""What Megatron's model says of a parameter: a factory makes several tensors of it (gate and up of a SwiGLU's fc1)."""


def sharded_state(tensor: StateTensor, data: Tensor, parameter: Sharded, layouts: list[Layout]) -> list[ShardedTensor]:
    """One state tensor whose shape is not that of its parameter, as what is saved and loaded of it on this rank.

    The tensors of a factory follow one another in the rows that this rank holds, in an order that depends on the
    tensor-parallel size. Where such a parameter is one logical matrix, a state dimension along its rows is therefore
    saved in as many tensors. Where it is several, each matrix has the same rows at every size.

    It is saved as views of ``data``, this rank's shard, one behind the other along the first dimension; none where that
    is empty. ``layouts`` are those of the logical matrices of the parameter. A ``ValueError`` refuses a factory whose
    tensors are not cut along the rows of the parameter, and, where the parameter is one logical matrix, rows in another
    than the first dimension.
    """
    assert tensor.dims is not None
    saved, layout = list(sharded_tensors([parameter])), layouts[tensor.matrix]
    in_rows = sum(each.local_shape[0] for each in saved) == parameter.data.shape[0]
    if not in_rows or any(each.local_shape[1:] != saved[0].local_shape[1:] for each in saved):
        raise ValueError(f"{parameter.key} is saved in tensors that are not cut along its rows: {saved}")
    ahead, held = saved[0].prepend_axis_num, layout.rectangle  # dimensions of stacked layers and experts
    # Of rows and columns: the global length, and from where to where this rank has them.
    if isinstance(parameter, ShardedTensor) or len(layouts) > 1 or "rows" not in tensor.dims:
        rows, columns = (layout.shape[0], held.top, held.bottom), (layout.shape[1], held.left, held.right)
        views = [(saved[0], parameter.key, data, rows, columns)]
    elif "rows" in tensor.dims[1:]:
        raise ValueError(
            f"{tensor.key} of {parameter.key}: rows of a matrix that is saved in {len(saved)} tensors have to be the "
            f"first dimension of a state tensor; got dims {tensor.dims}"
        )
    else:
        data_of = data.split([each.local_shape[0] for each in saved])
        views = [(each, each.key, view, *_sides(each)) for each, view in zip(saved, data_of, strict=True)]
    state, own = [], saved[0].replica_id
    if tensor.rank is None:
        replica_id = _replica_id(tensor.dims, layout, own)
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
        lengths, starts, ends = zip(*along, strict=True)
        shape = [end - start for start, end in zip(starts, ends, strict=True)]
        assert list(view.shape) == shape[: view.ndim]
        # With its leading dimensions of one the tensor is whole: Megatron's own way to add them needs equal shards.
        whole = view.view(*[1] * ahead, *shape)
        state.append(
            ShardedTensor(
                key=state_key(tensor.key, key),
                data=whole,
                dtype=data.dtype,
                local_shape=tuple(whole.shape),
                global_shape=(*of_parameter.global_shape[:ahead], *lengths),
                global_offset=(*of_parameter.global_offset[:ahead], *starts),
                axis_fragmentations=None,
                replica_id=replica_id,
            )
        )
    return state


def _sides(saved: ShardedTensor) -> list[tuple[int, int, int]]:
    lengths, starts = (of[saved.prepend_axis_num :] for of in (saved.global_shape, saved.global_offset))
    ends = (start + size for start, size in zip(starts, saved.local_shape, strict=True))
    return list(zip(lengths, starts, ends, strict=True))


def joined(tensor: StateTensor, loaded: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The state tensor of local ``shape`` from what was loaded for :func:`sharded_state`."""
    flat = [each.reshape(-1) for each in loaded]
    if sum(each.numel() for each in flat) != torch.Size(shape).numel():
        raise ValueError(f"what was loaded for {tensor.key} does not fill its shape {shape}")
    return torch.cat(flat).view(shape) if flat else torch.empty(shape, dtype=tensor.dtype)


def state_key(key: str, parameter_key: str) -> str:
    """Where a checkpoint holds a state tensor: Megatron's rule."""
    return f"optimizer.state.{key}.{parameter_key}"


def sharded_tensors(state_dict: Any) -> Iterator[ShardedTensor]:
    """What a state dict saves or loads on this rank, with the tensors of factories."""
    for value in nested_values(state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors(value.build())


def stacked_index(parameter: Sharded) -> int:
    """Which of the layers (and experts) that Megatron stacks under one key a parameter is; 0 where there is one."""
    first, index = next(sharded_tensors([parameter])), 0
    for axis in range(first.prepend_axis_num):
        index = index * first.global_shape[axis] + first.global_offset[axis]
    return index


def _replica_id(dims: Sequence[str | int], layout: Layout, own: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """The parameter's ``own``, (pipeline, tensor, data), told apart further where a state tensor has more copies."""
    rows, columns = "rows" in dims, "columns" in dims
    shards = [(rows and (held.top, held.bottom), columns and (held.left, held.right)) for held in layout.rectangles]
    earlier = shards[: layout.rank].count(shards[layout.rank])  # ranks before this one that hold the same shard
    if isinstance(own, int):
        return own * layout.ranks + earlier
    pipeline, tensor, *data = own
    return (pipeline, tensor * layout.ranks + earlier, *data)


def layers_differ(families: Iterable[ParamPattern], frozen: Iterable[str]) -> bool:
    """Whether layers differ in the optimizers of parameters that are alike; all ranks call it together.

    ``families`` are the manifest, ``frozen`` the names of this rank's parameters that no optimizer may have. Different
    optimizers for experts of one layer are refused in a run that saves in torch_dist: Megatron can only stack them.
    """
    kinds: dict[str, set[tuple[str | None, int]]] = defaultdict(set)
    for row in rows(families):
        kinds[_EXPERT.sub("*", row.name)].add((row.optimizer, len(row.matrices)))
    for name in set().union(*distinct(sorted({_EXPERT.sub("*", name) for name in frozen}))):
        kinds[name].add((None, 0))
    args = releases.training_args()
    saves = getattr(args, "save", None) is not None and getattr(args, "ckpt_format", None) == "torch_dist"
    for name, found in sorted(kinds.items()):
        if saves and len(found) > 1:
            optimizers = " and ".join(sorted({optimizer or "none" for optimizer, _ in found}))
            raise ValueError(
                f"experts of one layer ({name}) are treated differently (optimizers: {optimizers}), and Megatron "
                f"stacks their state in torch_dist checkpoints: let overrides select all experts of a layer, or leave "
                f"--save away"
            )
    of_layers: dict[str, set[frozenset[Any]]] = defaultdict(set)
    for name, found in kinds.items():
        of_layers[_LAYER.sub("*", name)].add(frozenset(found))
    return any(len(found) > 1 for found in of_layers.values())


def keep_apart(model_chunks: Sequence[Any], apart: bool) -> None:
    """Whether every layer of a model has a name of its own in the checkpoints of ``megatron.training``."""
    for chunk in unwrap_model(list(model_chunks)):
        setattr(chunk, _MARK, apart)


@around
def by_shard(number: Callable[..., dict[int, int]], parameters: Iterable[Tensor]) -> dict[int, int]:
    """Around Megatron's ``get_optim_param_to_id_map``: of a DTensor it gets what the model's ShardedTensor holds."""
    return number(map(shard_of, parameters))


@around
def undecided(build_metadata: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Around Megatron's ``_build_sharded_state_dict_metadata``, which knows no model: :func:`named_apart` decides."""
    return {_SETTING: None} | build_metadata(*args, **kwargs)


@around
def named_apart(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around Megatron's ``generate_state_dict``: it names each layer of a model that is to :func:`keep_apart`.

    What is loaded has the names that the checkpoint says; where it says nothing, the metadata are :func:`undecided`.
    """
    given = inspect.signature(generate).bind(*args, **kwargs).arguments
    apart = any(getattr(chunk, _MARK, False) for chunk in given["model"])
    for name in ("model_sd_kwargs", "optim_sd_kwargs"):
        metadata = (given.get(name) or {}).get("metadata") or {}
        if metadata.get(_SETTING, ...) is None:
            metadata.pop(_SETTING)
            metadata |= {_SETTING: True} if apart else {}
    return generate(*args, **kwargs)
