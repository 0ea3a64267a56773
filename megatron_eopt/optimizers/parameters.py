"""What is known of a parameter: its name, this rank's part, its layout, and its logical matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from megatron_eopt.matrices import Split
from megatron_eopt.parallel.dtensor import layout_of_dtensor
from megatron_eopt.parallel.layout import Layout, is_cut_again, is_expert, is_sharded, layout_of, split_layout
from megatron_eopt.parallel.records import Shape

NAME = "name_in_model"
"""Attribute of a parameter: its name, where whoever makes the groups knows it and torch is not told."""

GROUPS = ("tp", "expt_tp", "gtp_remat", "expt_gtp_remat")
"""Names of the groups in the order in which :func:`~megatron_eopt.parallel.layout.layout_of` takes them."""


class TensorParallelGroups(Protocol):
    """What is read of Megatron's ProcessGroupCollection, ``gtp_remat`` and ``expt_gtp_remat`` where it has them."""

    tp: ProcessGroup
    expt_tp: ProcessGroup


@dataclass(frozen=True)
class DescribedMatrix:
    """What an optimizer says of one logical matrix.

    Attributes:
        name: within its parameter, empty where that is one matrix.
        shape: of the global matrix.
        scheme: how the ranks that have it compute its update.
        scale: what multiplies the orthogonal factor, or whatever is used instead.
        rms: of the entries of the first update, before the learning rate; None where it is not known before.
    """

    name: str
    shape: Shape
    scheme: str
    scale: float
    rms: float | None


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def parameter_names(groups: Sequence[dict[str, Any]]) -> list[str]:
    """A name for every parameter, in the order of the groups: as torch was told, its attribute, or its index."""
    return [
        _name(group, index) or f"parameter {index} of group {number}, of shape {tuple(parameter.shape)}"
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    ]


def names_of_last(groups: Sequence[dict[str, Any]], shapes: bool = True) -> list[str]:
    """The names of the parameters of the last group, which may have none.

    Args:
        groups: of an optimizer.
        shapes: whether a name that is made of the index has the shape, too.
    """
    last = groups[-1]
    if shapes:
        names = parameter_names(groups)
        return names[len(names) - len(last["params"]) :]
    return [_name(last, i) or f"parameter {i} of group {len(groups) - 1}" for i in range(len(last["params"]))]


def name_of(parameter: Tensor, groups: Sequence[dict[str, Any]]) -> str:
    """The name of a parameter that is in one of the groups."""
    names = zip((p for group in groups for p in group["params"]), parameter_names(groups), strict=True)
    return next(name for p, name in names if p is parameter)


def _name(group: dict[str, Any], index: int) -> str | None:
    if "param_names" in group:
        return str(group["param_names"][index])
    return getattr(group["params"][index], NAME, None)


def matrix_layout(parameter: Tensor, pg_collection: TensorParallelGroups | None) -> Layout:
    """The layout of a parameter; of a stack, that of each of its matrices.

    Args:
        parameter: a DTensor, or a tensor with Megatron's attributes.
        pg_collection: Megatron's process groups; None where nothing is sharded.
    """
    if isinstance(parameter, DTensor):
        return layout_of_dtensor(parameter)
    return layout_of(parameter, *(getattr(pg_collection, name, None) for name in GROUPS))


def sharing_groups(parameter: Tensor, pg_collection: TensorParallelGroups | None) -> dict[str, ProcessGroup]:
    """The groups of ranks that hold parts of a parameter of any shape, by label."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        cut = [i for i, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
        names = mesh.mesh_dim_names or [f"mesh{i}" for i in range(mesh.ndim)]
        return {f"{names[i]}={mesh.size(i)}": mesh.get_group(i) for i in cut if mesh.size(i) > 1}
    prefix = "expt_" if is_expert(parameter) else ""
    axes = {f"{prefix}tp": is_sharded(parameter), f"{prefix}gtp_remat": is_cut_again(parameter)}
    groups = {name: getattr(pg_collection, name, None) for name, cuts in axes.items() if cuts}
    return {name: group for name, group in groups.items() if group is not None and group.size() > 1}


def check_completed(
    parameter: Tensor, pg_collection: TensorParallelGroups | None, called: str, otherwise: str = ""
) -> None:
    """Refuse a shard that no process group completes, or that is cut a second time as nothing here is.

    Args:
        parameter: any.
        pg_collection: the process groups.
        called: what a message calls the parameter.
        otherwise: what else the message advises.

    Raises:
        ValueError: naming the missing group.
    """
    if isinstance(parameter, DTensor) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    prefix = "expt_" if is_expert(parameter) else ""
    for name, shard in (("tp", is_sharded(parameter)), ("gtp_remat", is_cut_again(parameter))):
        if shard and getattr(pg_collection, prefix + name, None) is None:
            raise ValueError(
                f"{called} is marked as sharded, but no process group completes it: pass a pg_collection that has "
                f"{prefix + name!r}{otherwise}"
            )
    if is_cut_again(parameter):
        matrix_layout(parameter, pg_collection)


def check_dimensions(where: str, parameter: Tensor, split: Split | None) -> None:
    """Check that a parameter is a matrix, or is declared as a stack of matrices and has three dimensions.

    Args:
        where: what a message begins with.
        parameter: this rank's part.
        split: what its attribute declares.

    Raises:
        ValueError: if it is something else.
    """
    stacked = None if split is None else split.stacked
    shape = tuple(parameter.shape)
    if len(shape) != (2 if stacked is None else 3):
        raise ValueError(
            f"{where} has shape {shape}: give it to another optimizer (AdamW, say)"
            + (f", or declare a stack of {shape[0]} matrices" if len(shape) == 3 else "")
        )
    if stacked not in (None, shape[0]):
        raise ValueError(f"a parameter of shape {shape} is declared as a stack of {stacked} matrices")
    if stacked is not None and isinstance(parameter, DTensor):
        raise ValueError(f"stacked matrices cannot be DTensors yet, got one of shape {shape}: keep them apart")


def check_declared(shape: Sequence[int], split: Split, layout: Layout, blockwise: bool = False) -> None:
    """Check that the declared matrices are those of the parameter, and that its shards can be split.

    Args:
        shape: of this rank's part, for messages.
        split: what is declared.
        layout: of the parameter.
        blockwise: each shard of a logical matrix is taken for a matrix, so all ranks need the like of each.

    Raises:
        ValueError: saying what does not fit.
    """
    try:
        split_layout(layout, split)
    except ValueError as error:
        raise ValueError(f"a parameter of shape {tuple(shape)} is not what was declared of it: {error}") from error
    rows = sum(split.pattern(layout.shape[0]).sizes)
    if blockwise and split.parts and split.order != "per_shard" and _cut_inside(layout, rows):
        raise ValueError(
            f"tp_mode blockwise cannot split a parameter of {layout.shape[0]} rows over {layout.ranks} ranks, whose "
            f"shards end inside the {rows} rows that hold all of its logical matrices: take duplicated or distributed"
        )


def check_query_groups(shapes: Sequence[int], layout: Layout, blockwise: bool = False) -> None:
    """Check that a fused query, key and value projection can be split.

    Args:
        shapes: rows of each logical matrix in a query group.
        layout: of the projection.
        blockwise: as for :func:`check_declared`.

    Raises:
        ValueError: saying what does not fit.
    """
    if layout.shape[0] % sum(shapes):
        raise ValueError(
            f"a fused projection of {layout.shape[0]} rows is not a whole number of query groups {list(shapes)}, "
            f"which have {sum(shapes)} rows"
        )
    if blockwise and _cut_inside(layout, sum(shapes)):
        raise ValueError(
            f"tp_mode blockwise cannot split a fused projection of {layout.shape[0]} rows over {layout.ranks} "
            f"ranks, whose shards end inside a query group of {sum(shapes)} rows: take duplicated or distributed, "
            f"or turn split_qkv off"
        )


def _cut_inside(layout: Layout, rows: int) -> bool:
    """Whether a shard begins or ends elsewhere than at a multiple of so many rows."""
    return any(edge % rows for rectangle in layout.rectangles for edge in (rectangle.top, rectangle.bottom))
