"""State of a DTensor that has not its shape, as a DTensor on the same mesh.

torch's checkpoints take a plain tensor for one that all ranks have alike, and save that of one rank.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_eopt.parallel.dtensor import lies_alike
from megatron_eopt.parallel.layout import Layout

SIDES = ("rows", "columns")


def is_cut_like(parameter: Tensor, dims: Sequence[str | int]) -> TypeGuard[DTensor]:
    """Whether a parameter is a DTensor, and state of such dimensions too."""
    return isinstance(parameter, DTensor) and any(dim in SIDES for dim in dims)


def placements_like(parameter: DTensor, dims: Sequence[str | int]) -> tuple[Placement, ...]:
    """Rows and columns are cut as those of the parameter, wherever they are among ``dims``; others are replicated."""
    return tuple(_placement(of_parameter, dims) for of_parameter in parameter.placements)


def cut_like(parameter: DTensor, dims: Sequence[str | int], part: Tensor, shape: Sequence[int]) -> DTensor:
    """A DTensor of this rank's ``part`` of a state tensor, whose memory it shares.

    Args:
        parameter: the one whose state it is.
        dims: as in :class:`~megatron_eopt.optimizers.state.StateTensor`.
        part: this rank's, may be empty.
        shape: of the global tensor.

    Raises:
        ValueError: for two dimensions along rows, or along columns, which a mesh cannot cut both.
    """
    if max(dims.count(side) for side in SIDES) > 1:
        raise ValueError(f"a state tensor of a DTensor has rows and columns once each at most, got dims {tuple(dims)}")
    stride = torch.empty(tuple(shape), device="meta").stride()
    placements = placements_like(parameter, dims)
    return DTensor.from_local(
        part, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def check_placements(
    where: str, parameter: Tensor, layouts: Sequence[Layout], described: Sequence[tuple[str, int]]
) -> None:
    """Check that the state of a DTensor lies as placements can say; all ranks come to the same answer.

    Args:
        where: what a message begins with.
        parameter: any parameter; one that is no DTensor passes.
        layouts: of its logical matrices.
        described: key of each state tensor along rows or columns, and which logical matrix it is of.

    Raises:
        ValueError: if rows or columns of a logical matrix are cut otherwise than those of a DTensor.
    """
    for key, matrix in described:
        if isinstance(parameter, DTensor) and not lies_alike(parameter, layouts[matrix]):
            raise ValueError(
                f"{where} is a DTensor of shape {tuple(parameter.shape)} with placements {parameter.placements}, which "
                f"cut its logical matrix {matrix}, {layouts[matrix].shape}, into {_listed(layouts[matrix])}: no "
                f"placement says that of {key!r}, and it could not be saved. Shard it along columns, or so that each "
                f"rank has as many whole groups of rows as the others, or make its matrices parameters of their own"
            )


def _placement(of_parameter: Placement, dims: Sequence[str | int]) -> Placement:
    if isinstance(of_parameter, Replicate):
        return Replicate()
    side = SIDES[min(of_parameter.dim, 1)]  # type: ignore[attr-defined]  # a layout takes Replicate and shards alone
    if side not in dims:
        return Replicate()
    factor = getattr(of_parameter, "split_factor", None)
    place = list(dims).index(side)
    return Shard(place) if factor is None else _StridedShard(place, split_factor=factor)


def _listed(layout: Layout) -> str:
    return ", ".join(f"{piece.shape}" for piece in layout.pieces)
