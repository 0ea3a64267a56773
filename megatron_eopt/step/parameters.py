"""Names, layouts and logical matrices of parameters."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from megatron_eopt.matrices import ATTRIBUTE, Split, check_split_shapes, declared_split
from megatron_eopt.parallel.attributes import is_expert, is_sharded, layout_of
from megatron_eopt.parallel.dtensor import layout_of_dtensor, tells_its_chunk
from megatron_eopt.parallel.layout import Layout, of_stack, split_layout, within
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.screen import listed
from megatron_eopt.settings.groups import warn

logger = logging.getLogger(__name__)

# Attributes of parameters:
NAME = "name_in_model"  # where whoever makes the groups knows it and torch is not told
SAVED_BY_LAYOUT = "saved_by_layout"  # of a DTensor whose state is saved by layouts, and so may be plain tensors
FLATTENED = "_fsdp_flattened"  # torch's, of what FSDP1 has wrapped

SAID = (NAME, ATTRIBUTE)  # what a parameter that replaces another one says as well

FSDP1_MESSAGE = (
    "is wrapped by FullyShardedDataParallel (FSDP1), whose shards are vectors that do not say which matrix they are "
    "of: take fully_shard (FSDP2), in accelerate fsdp_version=2"
)
GROUPS = ("tp", "expt_tp")  # in the order of layout_of


class TensorParallelGroups(Protocol):
    """What every optimizer reads of Megatron's ProcessGroupCollection; some read further groups."""

    tp: ProcessGroup
    expt_tp: ProcessGroup


class Matrices(TypedDict, total=False):
    """Settings by which logical matrices and their shards are found.

    Attributes:
        split_qkv: work on the parts of fused query, key and value projections separately; False.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute of a parameter
            wins.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.
    """

    split_qkv: bool
    is_qkv_fn: Callable[[Tensor], bool] | None
    qkv_split_shapes: Sequence[int] | None
    pg_collection: TensorParallelGroups | None


@dataclass(frozen=True)
class DescribedMatrix:
    """What an optimizer reports of a logical matrix."""

    name: str  # within its parameter, empty where that is one matrix
    shape: Shape  # of the global matrix
    scheme: str  # how the ranks that have it compute its update
    scale: float  # what multiplies the orthogonal factor, or whatever is used instead
    rms: float | None  # of the entries of the first update, before the learning rate; None where it is not known before


def local(x: Tensor) -> Tensor:
    """A DTensor's local shard, sharing memory; other tensors themselves."""
    return x.to_local() if isinstance(x, DTensor) else x


def has_dtensors(tensors: Iterable[object]) -> bool:
    """Whether there is a DTensor, by the few types that there are."""
    return any(issubclass(kind, DTensor) for kind in set(map(type, tensors)))


def scale_rows(x: Tensor, factors: Tensor) -> None:
    """Multiply rows by their factors, in place, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x.detach().copy_(x.detach().to(wide) * factors.to(x.device, wide).view(-1, *[1] * (x.ndim - 1)))


def in_order(split: Split, parameter: Tensor, layout: Layout) -> Split:
    """The split in the order of the parameter's rows."""
    return split.in_global_order() if isinstance(parameter, DTensor) and layout.shards is None else split


def parameter_names(groups: Sequence[dict[str, Any]], shapes: bool = True) -> list[str]:
    """Names of all parameters: torch's, their attribute, or their index."""
    return [name for number, group in enumerate(groups) for name in _names(group, number, shapes)]


def names_of_last(groups: Sequence[dict[str, Any]], shapes: bool = True) -> list[str]:
    """Names of the last group's parameters, indices with ``shapes``."""
    return _names(groups[-1], len(groups) - 1, shapes)


def _names(group: dict[str, Any], number: int, shapes: bool) -> list[str]:
    names = []
    for index, parameter in enumerate(group["params"]):
        shape = f", of shape {tuple(parameter.shape)}" if shapes else ""
        names.append(str(_known_name(group, index) or f"parameter {index} of group {number}{shape}"))
    return names


def _known_name(group: dict[str, Any], index: int) -> str | None:
    return group["param_names"][index] if "param_names" in group else getattr(group["params"][index], NAME, None)


def check_parameters(name: str, groups: Sequence[dict[str, Any]]) -> None:
    """Refuse a parameter that is twice in the last group, or of no real numbers."""
    seen = set[Tensor]()
    for parameter, called in zip(groups[-1]["params"], names_of_last(groups), strict=True):
        if parameter in seen:
            raise ValueError(f"{name}: {called} comes twice in one list of parameters, and would be stepped twice")
        seen.add(parameter)
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise ValueError(
                f"{name} takes parameters in floating point of 16 bits or more, but {called} is {parameter.dtype}: "
                "leave it out, or train a copy in such a dtype (of complex numbers, of both parts)"
            )


def refuse_flattened(name: str, groups: Sequence[dict[str, Any]], given: Collection[torch.Size]) -> None:
    """Refuse flat shards, such as FSDP1's; ``given`` are shapes that parameters had."""
    for parameter, called in zip(parameters_in(groups), parameter_names(groups, shapes=False), strict=True):
        if getattr(parameter, FLATTENED, False):
            raise ValueError(f"{name}: {called} {FSDP1_MESSAGE}")
        if given and parameter.ndim < 2 and parameter.shape not in given:
            raise ValueError(
                f"{name}: {called} has shape {tuple(parameter.shape)}, which none had that the optimizer was given: a "
                "flat partition, as ZeRO makes them, does not say which matrix it is of. Shard by fully_shard (FSDP2) "
                "or by Megatron, and add a vector of the model's by add_param_group()"
            )


def saved_attributes(parameters: Iterable[Tensor]) -> list[tuple[torch.Size, dict[str, Any]]]:
    """Shapes of parameters, and what they say of themselves."""
    return [(p.shape, {key: vars(p)[key] for key in SAID if key in vars(p)}) for p in parameters]


def restore_attributes(parameters: Sequence[Tensor], said: Sequence[tuple[torch.Size, dict[str, Any]]]) -> None:
    """Let parameters that replaced others, of the same shapes, say what those said."""
    if [p.shape for p in parameters] != [shape for shape, _ in said]:
        return
    for parameter, (_, attributes) in zip(parameters, said, strict=True):
        for key, value in attributes.items():
            if key not in vars(parameter):
                setattr(parameter, key, value)


def matrix_layout(parameter: Tensor, pg_collection: TensorParallelGroups | None) -> Layout:
    """The layout of a parameter, or of each stacked matrix."""
    if isinstance(parameter, DTensor):
        layout = layout_of_dtensor(parameter)
        split = declared_split(parameter)
        if split is not None and split.stacked is not None and 1 not in layout.cut_dims:
            _, rows, cols = parameter.shape
            return of_stack(layout, (rows, cols))
        name = _cut_over(parameter)
        tp = None if name is None else getattr(pg_collection, name, None)
        return within(layout, getattr(parameter, "partition_dim", 0), tp)
    return layout_of(parameter, *(getattr(pg_collection, name, None) for name in GROUPS))


def parameters_in(groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters of groups, in their order."""
    return [parameter for group in groups for parameter in group["params"]]


def check_scalable(groups: Sequence[dict[str, Any]], pg_collection: TensorParallelGroups | None) -> None:
    """Refuse parameters for which torch's GradScaler skips steps unevenly."""
    asked: dict[torch.dtype, set[ProcessGroup]] = {}
    for name, p in zip(parameter_names(groups), parameters_in(groups), strict=True):
        if p.grad is None:
            continue
        # it asks only the ranks that share the first gradient of each dtype, if that is a DTensor
        shared = sharing_groups(p, pg_collection)
        known = asked.setdefault(p.grad.dtype, set(shared.values())) if isinstance(p, DTensor) else set()
        if not known.issuperset(shared.values()):
            raise ValueError(
                f"torch's GradScaler does not ask all ranks of {', '.join(shared)}, which share {name}, for an inf in "
                "its gradient: some would make a step that others leave out. Train in bf16 without a scaler, or shard "
                "all parameters alike as DTensors, as FSDP2 does"
            )


def sharing_groups(parameter: Tensor, pg_collection: TensorParallelGroups | None) -> dict[str, ProcessGroup]:
    """Label -> group of ranks that share a parameter."""
    name = _cut_over(parameter)
    groups = {} if name is None else {name: getattr(pg_collection, name, None)}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        cut = [i for i, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
        names = mesh.mesh_dim_names or [f"mesh{i}" for i in range(mesh.ndim)]
        groups |= {f"{names[i]}={mesh.size(i)}": mesh.get_group(i) for i in cut}
    return {name: group for name, group in groups.items() if group is not None and group.size() > 1}


def _cut_over(parameter: Tensor) -> str | None:
    """The group over which Megatron cuts a parameter, outside meshes."""
    if not is_sharded(parameter) or (isinstance(parameter, DTensor) and tells_its_chunk(parameter)):
        return None
    return "expt_tp" if is_expert(parameter) else "tp"


def check_shard(parameter: Tensor, pg_collection: TensorParallelGroups | None, called: str, advice: str = "") -> None:
    """Refuse a shard without its process groups; ``advice`` for messages."""
    if isinstance(parameter, DTensor) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    name = _cut_over(parameter)
    if name is not None and getattr(pg_collection, name, None) is None:
        if name == "tp":
            advice += "; if every rank has it whole, set its tensor_model_parallel to False"
        raise ValueError(
            f"{called} is marked as sharded, but no process group completes it: pass a pg_collection that has "
            f"{name!r}{advice}"
        )


def checked_split(name: str, values: Mapping[str, Any], lengths: Sequence[int]) -> Sequence[int] | None:
    """``qkv_split_shapes`` of settings that describe fused projections, of ``lengths`` logical matrices."""
    shapes: Sequence[int] | None = values["qkv_split_shapes"]
    if not values["split_qkv"]:
        if values["is_qkv_fn"] is not None:
            warn(f"{name}: is_qkv_fn and qkv_split_shapes have no effect without split_qkv=True")
        return shapes
    if values["is_qkv_fn"] is None:
        raise ValueError("split_qkv needs is_qkv_fn, which tells the fused parameters, got None")
    if shapes is None and len(lengths) > 1:  # each parameter may bring its own
        return None
    return check_split_shapes(shapes, lengths)


def check_matrix(name: str, parameter: Tensor, called: str) -> None:
    """Refuse what is neither a matrix nor declared as matrices."""
    split = declared_split(parameter)
    shape = tuple(parameter.shape)
    if split is not None and split.flattened and len(shape) > 1:
        return
    stacked = None if split is None else split.stacked
    if len(shape) != (2 if stacked is None else 3):
        raise ValueError(
            f"{name} {called} has shape {shape}: give it to another optimizer (AdamW, say)"
            + (f", or declare a stack of {shape[0]} matrices" if len(shape) == 3 else "")
            + (f", or declare it as flattened, to {shape[0]} rows" if len(shape) > 2 else "")
        )
    if stacked not in (None, shape[0]):
        raise ValueError(f"a parameter of shape {shape} is declared as a stack of {stacked} matrices")
    if stacked is not None and isinstance(parameter, DTensor) and _cuts_matrices(parameter):
        raise ValueError(
            f"{name} {called} is a stack of shape {shape} with placements {parameter.placements}, which may cut its "
            f"matrices: shard it along its first dimension alone (Shard(0), as fully_shard does by default), make its "
            f"matrices parameters of their own, or give it to AdamW"
        )


def _cuts_matrices(stack: DTensor) -> bool:
    """Whether ranks may have parts of a stack's matrices."""
    if tells_its_chunk(stack) or _cut_over(stack):
        return True
    pairs = zip(stack.device_mesh.shape, stack.placements, strict=True)
    return any(ranks > 1 and getattr(placement, "dim", 0) != 0 for ranks, placement in pairs)


def check_split(parameter: Tensor, split: Split, layout: Layout, blockwise: bool) -> None:
    """Refuse logical matrices that do not fit the parameter."""
    rows = layout.shape[0]
    try:
        split_layout(layout, split)
    except ValueError as error:
        shape = tuple(parameter.shape)
        raise ValueError(f"a parameter of shape {shape} is not what was declared of it: {error}") from error
    # a DTensor's shard of a tensor-parallel shard has not its part of every matrix
    if not blockwise or not split.parts or (split.order == "per_shard" and not isinstance(parameter, DTensor)):
        return
    period = sum(split.pattern(rows).sizes)  # each shard of a logical matrix is a matrix: all ranks need the like
    if any(edge % period for rectangle in layout.rectangles for edge in (rectangle.top, rectangle.bottom)):
        raise ValueError(
            f"tp_mode blockwise cannot split a parameter of {rows} rows over {layout.ranks} ranks, whose shards end "
            f"inside the {period} rows that hold all of its logical matrices: take duplicated or "
            "distributed"
        )


def warn_of_fp16(names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Warn of parameters in fp16, whose range is too small."""
    half = [name for name, p in zip(names, parameters, strict=True) if p.dtype == torch.float16]
    if half:
        logger.warning(
            f"{listed(half)}: in fp16, gradients and state below 6e-8 become 0 (AdamW's eps of 1e-8 too) and those "
            "above 65504 inf; keep parameters in fp32 and compute under torch.autocast, or take bf16"
        )
