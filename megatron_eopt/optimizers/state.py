"""What an optimizer keeps per parameter: one description, from which state is created, saved and loaded.

State of a DTensor that has not its shape is a DTensor on the same mesh: torch's checkpoints take a plain tensor for one
that all ranks have alike, and save that of one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_eopt.optimizers.parameters import local
from megatron_eopt.parallel.dtensor import lies_alike
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.records import Shape

Lying = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[Placement, ...] | None]
"""Shape of a tensor; of a DTensor also that of this rank's part, and its placements."""

Dim = Literal["rows", "columns"] | int


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state of a parameter, which starts with zeros.

    Attributes:
        key: its name in ``optimizer.state[parameter]``.
        dims: None for a tensor of the shape of the parameter, which lies as the parameter does. Otherwise one entry per
            dimension: ``rows`` or ``columns`` for one as long as those of the logical matrix and cut as they are, or a
            number for one that every rank has whole; ``()`` is a scalar, the same on all ranks that share the matrix.
            Of a DTensor, what is along rows or columns is a DTensor on the same mesh, and what is not a plain tensor.
        matrix: which logical matrix of the parameter ``dims`` speaks of.
        dtype: None for that of the parameter.
        saved: whether a checkpoint holds it; False where it is computed anew after a load.
    """

    key: str
    dims: tuple[Dim, ...] | None = None
    matrix: int = 0
    dtype: torch.dtype | None = None
    saved: bool = True

    def local_shape(self, layouts: list[Layout]) -> tuple[int, ...]:
        """The shape of this rank's part, for :attr:`dims` that are not None.

        Args:
            layouts: of the logical matrices of the parameter.
        """
        return self._shape(layouts[self.matrix].rectangle.shape)

    def global_shape(self, layouts: list[Layout]) -> tuple[int, ...]:
        """The shape over all ranks, likewise."""
        return self._shape(layouts[self.matrix].shape)

    def _shape(self, of_matrix: Shape) -> tuple[int, ...]:
        assert self.dims is not None
        sides = dict(zip(SIDES, of_matrix, strict=True))
        return tuple(dim if isinstance(dim, int) else sides[dim] for dim in self.dims)


def zeros(parameter: Tensor, tensor: StateTensor, layouts: list[Layout]) -> Tensor:
    """A state tensor before the first step.

    Args:
        parameter: whose state it is.
        tensor: its description.
        layouts: of the logical matrices of the parameter; not needed for a tensor of its shape.
    """
    dtype = tensor.dtype or parameter.dtype
    if tensor.dims is None:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    part = torch.zeros(tensor.local_shape(layouts), dtype=dtype, device=parameter.device)
    if is_cut_like(parameter, tensor.dims):
        return cut_like(parameter, tensor.dims, part, tensor.global_shape(layouts))
    return part


def check_lying(parameter: Tensor, tensor: StateTensor, layouts: list[Layout], found: Tensor) -> None:
    """Check that a state tensor has the shape and the placements that its description says.

    Args:
        parameter: whose state it is.
        tensor: its description.
        layouts: as for :func:`zeros`.
        found: what is to be loaded.

    Raises:
        ValueError: if it has others.
    """
    if tensor.dims is None:
        expected = _lying(parameter)
    elif is_cut_like(parameter, tensor.dims):
        part = tensor.local_shape(layouts)
        expected = tensor.global_shape(layouts), part, placements_like(parameter, tensor.dims)
    else:
        expected = tensor.local_shape(layouts), None, None
    if (lying := _lying(found)) != expected:
        how = _HOW_TO_LOAD if lying[0] == expected[0] else ""
        raise ValueError(
            f"{tensor.key!r} has shape {_told(lying)}, expected {_told(expected)} for the parameter of shape "
            f"{tuple(parameter.shape)}: the state is of another model or layout{how}"
        )


_HOW_TO_LOAD = (
    "; torch.distributed.checkpoint.state_dict.set_optimizer_state_dict spreads it over the ranks as their parameters"
)


def _lying(x: Tensor) -> Lying:
    shape = tuple(x.shape)
    return (shape, tuple(local(x).shape), tuple(x.placements)) if isinstance(x, DTensor) else (shape, None, None)


def _told(lying: Lying) -> str:
    shape, part, placements = lying
    return f"{shape}" if part is None else f"{shape}, of which placements {placements} put {part} on this rank"


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
    return ", ".join(f"{rectangle.shape}" for rectangle in layout.rectangles)
