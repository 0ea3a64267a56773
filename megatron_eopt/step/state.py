"""State tensors: described once, created and kept.

State of a DTensor in another shape is a DTensor on the same mesh: torch's checkpoints would take a plain tensor for one
that all ranks have alike, and save one rank's.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_eopt.matrices import is_transposed
from megatron_eopt.parallel.dtensor import lies_alike
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.settings.groups import warn
from megatron_eopt.step.parameters import SAVED_BY_LAYOUT, local

logger = logging.getLogger(__name__)

Layouts = Callable[[Tensor], list[Layout]]
Dim = Literal["rows", "columns"] | int
MOMENTUM_BUFFER = "momentum_buffer"  # state key: the momentum
EXP_AVG = "exp_avg"  # the momentum of Adam and its like, named as where Megatron-Core creates the state itself
EXP_AVG_SQ = "exp_avg_sq"  # the second moment
STEPS = "steps"  # how many a parameter has made
PREVIOUS_GRADIENT = "previous_gradient"  # that of the last step
HAS_PREVIOUS = "has_previous"  # 1 where there is one: after a step with a rate above 0
STATE_OF = "state_of"  # in a group: the name of the optimizer that keeps its state
NO_SETTINGS = frozenset({"params", "param_names", STATE_OF})  # in a group


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in NO_SETTINGS}


SIDES: tuple[Literal["rows"], Literal["columns"]] = ("rows", "columns")


@dataclass(frozen=True)
class StateTensor:
    """One state tensor of a parameter: zeros, or ``start``, at first.

    Without ``dims`` it has the shape and layout of the parameter. Otherwise a dimension is ``rows`` or ``columns``, as
    long as those of the logical matrix and cut alike, or a number that every rank has whole; ``()`` is a scalar. Along
    rows or columns of a DTensor it is a DTensor on the same mesh, otherwise a plain tensor.

    Only compute rank ``rank`` of the matrix's group has the tensor; those of others are empty. Not of a DTensor.
    """

    key: str  # in optimizer.state[parameter]
    dims: tuple[Dim, ...] | None = None
    matrix: int = 0  # the logical one of the parameter that dims and rank speak of
    dtype: torch.dtype | None = None  # None for that of the parameter
    rank: int | None = None
    start: Callable[[int], Tensor] | None = None  # first values along its first dimension, by its length, not zeros
    optional: bool = False  # it begins anew where a loaded state lacks it
    non_negative: bool = False  # second moments, norms and counts, of which a step takes roots and shares

    @property
    def like_parameter(self) -> bool:
        """Whether it has the shape of its parameter."""
        return self.dims is None

    def is_elsewhere(self, layouts: list[Layout]) -> bool:
        """Whether only another rank has it."""
        return self.rank not in (None, layouts[self.matrix].rank)

    def local_shape(self, layouts: list[Layout]) -> tuple[int, ...]:
        """The local shape, by layouts of logical matrices; needs :attr:`dims`."""
        shape = self._shape(layouts[self.matrix].rectangle.shape)
        return (0,) * len(shape) if self.is_elsewhere(layouts) else shape

    def global_shape(self, layouts: list[Layout]) -> tuple[int, ...]:
        """The shape over all ranks, for the same."""
        return self._shape(layouts[self.matrix].shape)

    def _shape(self, of_matrix: Shape) -> tuple[int, ...]:
        assert self.dims is not None
        sides = dict(zip(SIDES, of_matrix, strict=True))
        return tuple(dim if isinstance(dim, int) else sides[dim] for dim in self.dims)


Described = Callable[[Tensor], list[StateTensor]]


def on_host(sizes: Iterable[int], fraction: float) -> Iterator[bool]:
    """Whether each parameter's state is on the host, spread evenly."""
    total = there = 0  # of the first parameters, however many, at least the fraction is there
    for size in sizes:
        total += size
        taken = there < fraction * total
        there += size * taken
        yield taken


def bytes_of_entry(parameter: Tensor, tensors: Iterable[StateTensor]) -> int:
    """Bytes of parameter-shaped state for each entry."""
    return sum((tensor.dtype or parameter.dtype).itemsize for tensor in tensors if tensor.like_parameter)


@dataclass(frozen=True)
class States:
    """State of an optimizer's parameters: described, created and kept.

    Attributes:
        kept: parameter -> key -> tensor.
        described: what state tensors a parameter has.
        layouts: layouts of a parameter's logical matrices.
        on_host: whether state in a parameter's own shape is in host memory.
    """

    kept: MutableMapping[Tensor, dict[str, Any]]
    described: Described
    layouts: Layouts
    on_host: Callable[[Tensor], bool]

    def share_on_host(self, parameters: Sequence[Tensor], fraction: float) -> list[bool]:
        """Which parameters' state is to be in host memory."""
        sizes = []
        for p in parameters:
            entries = sum(prod(layout.shape) for layout in self.layouts(p))
            sizes.append(entries * bytes_of_entry(p, self.described(p)))
        return list(on_host(sizes, fraction))

    def is_on_host(self, parameter: Tensor, tensor: StateTensor) -> bool:
        """Whether one state tensor is in host memory."""
        return tensor.like_parameter and self.on_host(parameter)

    def of(self, parameter: Tensor, key: str | None = None) -> dict[str, Any]:
        """A parameter's state; without ``key``, what it lacks is created."""
        state = self.kept[parameter]
        if key not in state:
            for tensor in self.described(parameter):
                if tensor.key not in state:
                    state[tensor.key] = self.initial(parameter, tensor)
        return state

    @torch.inference_mode(False)  # whose tensors no later step could change
    def initial(self, parameter: Tensor, tensor: StateTensor) -> Tensor:
        """A state tensor before the first step."""
        dtype = tensor.dtype or parameter.dtype
        if self.is_on_host(parameter, tensor):
            return torch.zeros(parameter.shape, dtype=dtype, device="cpu")  # the first step pins it
        if tensor.like_parameter:
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        shape, local_shape, placements = expected_shape(parameter, tensor, self.layouts)
        shard = torch.zeros(local_shape, dtype=dtype, device=parameter.device)
        if tensor.start is not None:
            layout = self.layouts(parameter)[tensor.matrix]
            side = layout if tensor.dims is not None and tensor.dims[0] == "rows" else layout.transposed
            shard.copy_(tensor.start(side.shape[0])[side.rectangle.top : side.rectangle.bottom])
        if not isinstance(parameter, DTensor) or placements is None:
            return shard
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            shard, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def forget_replaced(name: str, state: MutableMapping[Any, dict[str, Any]], parameters: Iterable[Tensor]) -> None:
    """Drop state of what is in no group any more; warn where it is not as it began."""
    lost = 0
    for parameter in {*state} - {*parameters}:
        if isinstance(parameter, Tensor):
            tensors = state.pop(parameter).values()
            lost += any(_has_values(x) for x in tensors if isinstance(x, Tensor) and x.shape == parameter.shape)
    if lost:
        warn(
            f"{name}: the state of {lost} parameters is dropped, as its groups have others now, which accelerate's "
            "prepare puts there under FSDP2: load state after that"
        )


def _has_values(x: Tensor) -> bool:
    return not x.is_meta and bool(x.any())


class StateShape(NamedTuple):
    """Shape of a tensor and of this rank's part, and placements of a DTensor."""

    shape: tuple[int, ...]
    on_this_rank: tuple[int, ...]
    placements: tuple[Placement, ...] | None = None

    def __str__(self) -> str:
        if self.placements is None:
            return f"{self.shape}"
        return f"{self.shape}, of which placements {self.placements} put {self.on_this_rank} on this rank"


def expected_shape(parameter: Tensor, tensor: StateTensor, layouts: Layouts) -> StateShape:
    """What a state tensor of a parameter has."""
    if tensor.dims is None:
        return shape_of(parameter)
    if tensor.dims == ():  # of a vector, too, which has no layout
        return StateShape((), ())
    local_shape = tensor.local_shape(layouts(parameter))
    if not _is_cut_like(parameter, tensor):
        return StateShape(local_shape, local_shape)
    sides = SIDES[::-1] if is_transposed(parameter) else SIDES
    placements = tuple(_placement(placement, tensor.dims, sides) for placement in parameter.placements)
    return StateShape(tensor.global_shape(layouts(parameter)), local_shape, placements)


def shape_of(x: Tensor) -> StateShape:
    """What a tensor has."""
    return StateShape(tuple(x.shape), tuple(local(x).shape), tuple(x.placements) if isinstance(x, DTensor) else None)


def _is_cut_like(parameter: Tensor, tensor: StateTensor) -> TypeGuard[DTensor]:
    """Whether a state tensor is a DTensor, like its parameter."""
    by_layout = getattr(parameter, SAVED_BY_LAYOUT, False)
    return isinstance(parameter, DTensor) and not by_layout and any(dim in SIDES for dim in tensor.dims or ())


def _placement(of_parameter: Placement, dims: Sequence[Dim], sides: Sequence[Dim]) -> Placement:
    if isinstance(of_parameter, Replicate):
        return of_parameter
    side = sides[min(of_parameter.dim, 1)]  # type: ignore[attr-defined]  # a layout takes Replicate and shards alone
    if side not in dims:
        return Replicate()
    factor = getattr(of_parameter, "split_factor", None)
    index = dims.index(side)
    return Shard(index) if factor is None else _StridedShard(index, split_factor=factor)


def check_placements(where: str, parameter: Tensor, tensors: Sequence[StateTensor], layouts: Layouts) -> None:
    """Refuse a DTensor whose logical matrices have no placements."""
    transposed = is_transposed(parameter)
    sides = SIDES[::-1] if transposed else SIDES
    for tensor in tensors:
        if not _is_cut_like(parameter, tensor):
            continue
        layout = layouts(parameter)[tensor.matrix]
        dims = [dim for dim, side in enumerate(sides) if side in (tensor.dims or ())]
        if not lies_alike(parameter, layout.transposed if transposed else layout, dims):
            rectangles = ", ".join(str(rectangle.shape) for rectangle in layout.rectangles)
            advice = (
                "Shard it along columns, or so that each rank has as many whole groups of rows as the others, or make "
                "its matrices parameters of their own"
            )
            if parameter.ndim > 2:
                advice = (
                    "Take an optimizer whose state has the shape of the parameter (muon, say), give the stack to "
                    "AdamW, or make its matrices parameters of their own"
                )
            raise ValueError(
                f"{where} is a DTensor of shape {tuple(parameter.shape)} with placements {parameter.placements}, which "
                f"cut its logical matrix {tensor.matrix}, {layout.shape}, into {rectangles}: no placement says that of "
                f"{tensor.key!r}, and it could not be saved. {advice}"
            )
