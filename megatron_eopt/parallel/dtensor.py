"""Layouts of DTensors: FSDP2, HSDP, tensor parallelism, meshes.

Shards follow from the placements by the definitions of ``Shard`` and ``_StridedShard``: torch's helper does not say
whether they are one rectangle, and changed between releases. Megatron-FSDP's begin at any row: each rank tells its own.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_eopt.parallel.collectives import Partition, all_gather, joint_group
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.rectangles import Rectangle

Cut = tuple[int, int, int]  # by a mesh dimension: dimension of the tensor, number of ranks, split factor

_known = WeakTensorKeyDictionary()  # DTensor that tells its chunk -> its layout, for which ranks have to talk


def layout_of_dtensor(x: DTensor) -> Layout:
    """The layout of a DTensor as (first dimension x rest).

    The group has the ranks of all mesh dimensions that cut: each replica of HSDP is a layout of its own. Where several
    cut, or if it :func:`tells_its_chunk`, all ranks of the mesh call together, in the same order of parameters. Raises
    ``ValueError`` for other placements than ``Replicate`` and shards, for a tensor that does not hold what they say or
    holds several rectangles, and if the group cannot be made.
    """
    mesh = x.device_mesh
    placements = x.placements
    described = f"a DTensor of shape {tuple(x.shape)} with placements {placements} on a mesh {tuple(mesh.shape)}"
    if mesh.get_coordinate() is None:
        raise ValueError(f"{described} that this rank is no part of: give each rank its own parameters only")
    if not all(isinstance(placement, Replicate | Shard | _StridedShard) for placement in placements):
        raise ValueError(f"{described}: only Replicate and Shard can be laid out, redistribute it to those first")
    shape = (x.shape[0], prod(x.shape[1:]))
    cuts = _cuts(x)
    if not cuts:
        return on_one_rank(shape)
    if tells_its_chunk(x):
        if x not in _known:
            _known[x] = _of_chunks(x, shape, list(cuts))
        return _known[x]
    rectangles = _rectangles(tuple(x.shape), tuple(cuts.values()))
    if rectangles is None:
        raise ValueError(
            f"{described}: a rank holds several separate parts of the matrix {shape}; use an order of shards that "
            f"leaves each rank one rectangle, such as Shard(0) for FSDP over Shard(0) or Shard(1) for tensor "
            f"parallelism"
        )
    group, ranks, label = _group(mesh, list(cuts))
    held = dict(zip(ranks, rectangles, strict=True))
    layout = Layout(shape, tuple(held[rank] for rank in dist.get_process_group_ranks(group)), group, label)
    local = x._local_tensor.shape
    if local.numel() != layout.rectangle.numel:
        raise ValueError(f"{described}: this rank holds {tuple(local)}, but by its placements {layout.rectangle}")
    return layout


def tells_its_chunk(x: DTensor) -> bool:
    """Whether a DTensor tells its chunk, as in Megatron-FSDP."""
    return hasattr(x._local_tensor, "__create_chunk_list__")


def _of_chunks(x: DTensor, shape: tuple[int, int], dims: Sequence[int]) -> Layout:
    """The layout of a DTensor that tells its chunk; all ranks call together."""
    group, _, label = _group(x.device_mesh, dims)
    (chunk,) = x.__create_chunk_list__()
    top, *_ = chunk.offsets
    height, *_ = chunk.sizes
    others = [range(start, start + size) for start, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)]
    left, right = _flattened(others, x.shape[1:]) or (-1, -1)
    here = torch.tensor([top, top + height, left, right], device=x.device)
    of_all = all_gather(here, group).wait()
    rectangles = tuple(Rectangle(*edges) for edges in of_all.tolist())
    entries = sum(rectangle.numel for rectangle in rectangles)
    if entries != prod(shape) or any(rectangle.left < 0 for rectangle in rectangles):
        shapes = ", ".join(f"{rectangle.shape}" for rectangle in rectangles)
        raise ValueError(
            f"a DTensor of shape {tuple(x.shape)} is cut into chunks {shapes}, which do not make up the matrix {shape}"
        )
    # of tensor parallelism, which cuts first: each has its part of every matrix
    shards = len(x) // len(getattr(x, "orig_param", x))
    return Layout(shape, rectangles, group, label, shards=shards)


def lies_alike(x: DTensor, layout: Layout, dims: Collection[int] = (0, 1)) -> bool:
    """Whether ``x`` is cut like ``layout``, that of its matrix, along ``dims``.

    Rows are cut where the first dimension of ``x`` is, columns where another one is; True if it tells its chunk.
    """
    cuts = _cuts(x)
    if tells_its_chunk(x):
        return True
    if not cuts or layout.group is None:
        return not layout.sharded
    of_matrix = tuple((min(dim, 1), ranks, factor) for dim, ranks, factor in cuts.values())
    rectangles = _rectangles(layout.shape, of_matrix)
    if rectangles is None:
        return False
    _, ranks = _partition(x.device_mesh, list(cuts))
    held = dict(zip(ranks, rectangles, strict=True))
    for rank, wanted in zip(dist.get_process_group_ranks(layout.group), layout.rectangles, strict=True):
        found = held[rank]
        if found.shape == wanted.shape and not wanted.numel:
            continue  # where nothing is held, its edges say nothing
        if 0 in dims and (found.top, found.bottom) != (wanted.top, wanted.bottom):
            return False
        if 1 in dims and (found.left, found.right) != (wanted.left, wanted.right):
            return False
    return True


def _cuts(x: DTensor) -> dict[int, Cut]:
    """The dimensions of the mesh that cut, each with its cut."""
    cuts = dict[int, Cut]()
    for i, placement in enumerate(x.placements):
        ranks = x.device_mesh.size(i)
        if ranks > 1 and not isinstance(placement, Replicate):
            dim: int = placement.dim  # type: ignore[attr-defined]
            cuts[i] = (dim, ranks, getattr(placement, "split_factor", 1))
    return cuts


@lru_cache
def _rectangles(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[Rectangle, ...] | None:
    """Each rank's rectangle, the last cut fastest; None for several."""
    result = []
    ranges = [range(ranks) for _, ranks, _ in cuts]
    for coordinates in product(*ranges):
        rows, *others = [_held(dim, length, cuts, coordinates) for dim, length in enumerate(shape)]
        columns = _flattened(others, shape[1:])
        if rows is None or columns is None:
            return None
        result.append(Rectangle(rows.start, rows.stop, *columns))
    return tuple(result)


def _held(
    dim: int,
    length: int,
    cuts: Sequence[Cut],
    coordinates: Sequence[int],
) -> range | None:
    """Indices of a dimension on a rank; None unless consecutive.

    A shard cuts what earlier mesh dimensions left, ``_StridedShard`` each of ``split_factor`` parts of it.
    """
    held: Sequence[int] = range(length)
    for (cut_dim, ranks, factor), rank in zip(cuts, coordinates, strict=True):
        if cut_dim == dim:
            shards = list[int]()
            for part in range(factor):
                shards += _chunk(_chunk(held, factor, part), ranks, rank)
            held = shards
    if not held:
        return range(length, length)
    if held[-1] - held[0] != len(held) - 1:
        return None
    return range(held[0], held[-1] + 1)


def _chunk(indices: Sequence[int], chunks: int, which: int) -> Sequence[int]:
    """One of so many chunks, as :func:`torch.chunk` cuts."""
    size = -(-len(indices) // chunks)
    return indices[which * size : (which + 1) * size]


def _flattened(ranges: Sequence[range | None], shape: Sequence[int]) -> tuple[int, int] | None:
    """A box's range in its flattened tensor; None for several."""
    start = 0
    size = 1
    for held, length in zip(ranges, shape, strict=True):
        # behind a dimension with several entries, all others have to be whole
        if held is None or (size > 1 and len(held) != length):
            return None
        start = start * length + held.start
        size = size * len(held)
    if size == 0:
        return prod(shape), prod(shape)
    return start, start + size


def _group(mesh: DeviceMesh, dims: Sequence[int]) -> tuple[ProcessGroup, tuple[int, ...], str]:
    """Group, its ranks in the mesh's order, and label."""
    partition, ranks = _partition(mesh, dims)
    group = mesh.get_group(dims[0]) if len(dims) == 1 else joint_group(partition, ranks)
    names = mesh.mesh_dim_names or [f"mesh{dim}" for dim in range(mesh.ndim)]
    return group, ranks, ",".join(f"{names[dim]}={mesh.size(dim)}" for dim in dims)


def _partition(mesh: DeviceMesh, dims: Sequence[int]) -> tuple[Partition, tuple[int, ...]]:
    """Ranks that differ in ``dims`` only; those with this rank."""
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    ranks = mesh.mesh.permute(*others, *dims).reshape(-1, prod(mesh.size(dim) for dim in dims))
    partition = tuple(map(tuple, ranks.tolist()))
    (own,) = [row for row in partition if dist.get_rank() in row]
    return partition, own
