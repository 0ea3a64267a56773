"""State tensors: described once, created, kept and loaded.

State of a DTensor in another shape is a DTensor on the same mesh: torch's checkpoints would take a plain tensor for one
that all ranks have alike, and save one rank's.
"""

import json
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
from megatron_eopt.optimizers.modifiers import OPTIONAL
from megatron_eopt.optimizers.nonfinite import listed
from megatron_eopt.optimizers.parameters import SAVED_BY_LAYOUT, local
from megatron_eopt.parallel.dtensor import lies_alike
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.settings.groups import plain, warn
from megatron_eopt.settings.of_class import class_of_ours, settings_of

logger = logging.getLogger(__name__)

Layouts = Callable[[Tensor], list[Layout]]
Dim = Literal["rows", "columns"] | int
MOMENTUM_BUFFER = "momentum_buffer"  # state key: the momentum
STATE_OF = "state_of"  # in a group: the name of the optimizer that keeps its state
NO_SETTINGS = frozenset({"params", "param_names", STATE_OF})  # in a group
UNMARKED = frozenset({"tp_mode", "momentum_dtype"})  # exact in all but one value; and what the state shows by itself
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


def initial(parameter: Tensor, tensor: StateTensor, layouts: Layouts) -> Tensor:
    """A state tensor before the first step."""
    dtype = tensor.dtype or parameter.dtype
    if tensor.like_parameter:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    shape, own_shape, placements = _expected(parameter, tensor, layouts)
    shard = torch.zeros(own_shape, dtype=dtype, device=parameter.device)
    if tensor.start is not None:
        layout = layouts(parameter)[tensor.matrix]
        side = layout if tensor.dims is not None and tensor.dims[0] == "rows" else layout.transposed
        shard.copy_(tensor.start(side.shape[0])[side.rectangle.top : side.rectangle.bottom])
    if not isinstance(parameter, DTensor) or placements is None:
        return shard
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        shard, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


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
    """State of an optimizer's parameters: created, kept and loaded.

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

    def initial(self, parameter: Tensor, tensor: StateTensor) -> Tensor:
        """A state tensor before the first step, on its device."""
        if not self.is_on_host(parameter, tensor):
            return initial(parameter, tensor, self.layouts)
        pinned = parameter.device.type == "cuda"
        return torch.zeros(parameter.shape, dtype=tensor.dtype or parameter.dtype, device="cpu", pin_memory=pinned)

    def to_load(self, numbered: Sequence[tuple[Tensor, int]], saved: Mapping[int, Any]) -> list[tuple[Tensor, Any]]:
        """Saved states of parameters, but of those without a step."""
        loaded = []
        for p, number in numbered:
            state = saved.get(number, {})
            described = {tensor.key for tensor in self.described(p)}
            if state.keys() & described or state.keys() - self.kept.get(p, {}).keys():
                loaded.append((p, state))
        return loaded

    def lacking(self, numbered: Sequence[tuple[Tensor, int]], saved: Mapping[int, Any]) -> list[Tensor]:
        """Parameters that train and have no state, where others have theirs."""
        with_state = False
        without = []
        for p, number in numbered:
            needed = {tensor.key for tensor in self.described(p) if not tensor.optional}
            if needed & saved.get(number, {}).keys():
                with_state = True
            elif needed and p.requires_grad:
                without.append(p)
        return without if with_state else []

    def without_host(self, numbered: Sequence[tuple[Tensor, int]], saved: Mapping[int, Any]) -> dict[int, Any]:
        """Saved states without what is to be in host memory.

        torch moves all that it loads to the devices of the parameters, where there may be no room.
        """
        kept = {number: dict(state) for number, state in saved.items()}
        for p, number in numbered:
            for tensor in self.described(p):
                if self.is_on_host(p, tensor):
                    kept.get(number, {}).pop(tensor.key, None)
        return kept

    def place(self, loaded: Iterable[tuple[Tensor, Mapping[str, Tensor]]]) -> set[str]:
        """Set what torch's load moved, cast or left out; returns optional keys that states lack."""
        lacking = set()
        for parameter, saved in loaded:
            state = self.kept[parameter]
            for tensor in self.described(parameter):
                key = tensor.key
                if key not in saved and tensor.optional:
                    lacking.add(key if key in OPTIONAL else key.rpartition("_")[0])
                elif self.is_on_host(parameter, tensor):
                    state[key] = self.initial(parameter, tensor).copy_(saved[key])
                elif tensor.rank is not None and tensor.is_elsewhere(self.layouts(parameter)):  # once all had it
                    state[key] = self.initial(parameter, tensor)
                elif tensor.dtype not in (None, parameter.dtype):  # to which torch casts what it loads
                    state[key] = saved[key].detach().to(local(parameter).device, tensor.dtype, copy=True)
        return lacking


def name_in_states(cls: type) -> str:
    """A class's name in states; users' subclasses use their base's."""
    name: str = class_of_ours(cls).__name__
    return name


def mark_of(optimizer: Any) -> str:
    """Its :func:`name_in_states`, and, as JSON, settings that groups lack and that are no default."""
    known = settings_of(type(optimizer))
    settings = plain(optimizer.settings() | optimizer.settings_of_groups())
    given = {}
    for key, value in settings.items():
        marked = key in known and key not in optimizer.defaults and key not in UNMARKED
        if marked and value != known[key].default:
            given[key] = value
    return name_in_states(type(optimizer)) + (f" {json.dumps(given)}" if given else "")


def note_forgotten(optimizer: Any, saved: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> None:
    """Warn of settings in marks of ``saved`` groups that ``groups`` to be loaded go on without."""
    name = type(optimizer).__name__
    settings = optimizer.settings() | optimizer.settings_of_groups()
    forgotten = dict[str, None]()  # in order
    for was, group in zip(saved, groups, strict=False):
        _, _, given = was.get(STATE_OF, "").partition(" ")
        now = json.loads(json.dumps(plain({**settings, **group})))
        for key, value in json.loads(given or "{}").items():
            if key not in was and now.get(key, value) != value:
                forgotten[f"{key} {value!r} and goes on with {now[key]!r}"] = None
    if forgotten:
        warn(f"{name} loads a state that was made with {', with '.join(forgotten)}: build it as it was to go on alike")


def check_state_dict(name: str, state_dict: object) -> None:
    """Refuse what no optimizer's ``state_dict()`` returns."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"{name}.load_state_dict takes what state_dict() returned, a dict with 'state' and 'param_groups', got "
            f"{found}"
        )


def check_writer(cls: type, state_dict: Mapping[str, Any], unmarked: bool = False) -> None:
    """Refuse another optimizer's state; warn of an ``unmarked`` one."""
    called = cls.__name__
    check_state_dict(called, state_dict)
    writers = {group.get(STATE_OF, "").partition(" ")[0] for group in state_dict["param_groups"]}
    others = writers - {name_in_states(cls), ""}
    if others:
        other = ", ".join(sorted(others))
        raise ValueError(
            f"{called} cannot load a state of {other}: what its tensors mean is another thing, also where keys and "
            f"shapes are the same. To go on from it, build {other}, or load the weights alone and begin with fresh "
            f"state; to take its tensors as they are, remove {STATE_OF!r} from each group of the state"
        )
    if unmarked and "" in writers and any(state_dict["state"].values()):
        warn(
            f"{called} loads a state that does not say which optimizer wrote it, and takes it for one of its own: "
            "tensors of another one with the same keys and shapes, such as torch's, would mean another thing"
        )


def check_shape(parameter: Tensor, tensor: StateTensor, layouts: Layouts, found: Tensor) -> None:
    """Refuse a state tensor unlike :func:`initial` in shape or placements."""
    own = _shape_of(found)
    allowed = [_expected(parameter, tensor, layouts)]
    if tensor.rank is not None:  # in earlier releases every rank had what only a compute rank needs
        whole = tensor.global_shape(layouts(parameter))
        allowed.append(StateShape(whole, whole))
    if own not in allowed:
        raise ValueError(
            f"{tensor.key!r} has shape {own}, expected {allowed[0]} for the parameter of shape "
            f"{tuple(parameter.shape)}: the state is of another model or layout, or ranks had dealt matrices "
            "otherwise: group parameters as before, and load a whole state into DTensors by torch's "
            "set_optimizer_state_dict"
        )


def check_loaded(
    name: str,
    states: Iterable[tuple[Tensor, Mapping[str, Any]]],
    described: Described,
    layouts: Layouts,
    called: Mapping[Tensor, str],
) -> set[str]:
    """Refuse states that no step could go on from; returns conversions.

    Args:
        name: of the optimizer.
        states: parameters with the states that are to be theirs.
        described: what state tensors a parameter has.
        layouts: layouts of a parameter's logical matrices.
        called: names of parameters, for messages.

    Raises:
        TypeError: for what is no tensor.
        ValueError: for a tensor that is missing, of another shape, or not finite.
    """
    converted: set[str] = set()
    values: list[tuple[str, Tensor, torch.dtype]] = []
    for parameter, state in states:
        for tensor in described(parameter):
            key = tensor.key
            if key not in state:
                if tensor.optional:
                    continue
                raise ValueError(
                    f"{name} needs {key!r} for the parameter of shape {tuple(parameter.shape)}, but the state has "
                    f"{sorted(state)}: it is of another optimizer, or of other settings of this one"
                )
            found = state[key]
            of = f"{key!r} of {called[parameter]}"
            if not isinstance(found, Tensor):
                raise TypeError(f"{name} loads tensors, and {of} in the state is {type(found).__name__}")
            check_shape(parameter, tensor, layouts, found)
            dtype = tensor.dtype or parameter.dtype
            if found.dtype != dtype:
                converted.add(f"{key} from {found.dtype} to {dtype}")
            values.append((of, found, dtype))
    check_finite(name, values)
    return converted


def check_finite(name: str, values: Iterable[tuple[str, Tensor, torch.dtype]]) -> None:
    """Refuse tensors that are not finite in the dtypes that will keep them; waits for the device."""
    for of, found, dtype in values:
        if dtype.is_floating_point and not local(found).to(dtype).isfinite().all():
            raise ValueError(
                f"{name}: {of} in the state has values that are not finite in {dtype}, which would stay in it for "
                "ever: load an earlier state, or go on with fresh state from the weights alone"
            )


def note_begun_anew(name: str, lacking: Sequence[str]) -> None:
    """Warn of parameters without any state where others have theirs."""
    if lacking:  # on every rank, each of which may lack other ones
        logger.warning(
            f"{name} loads a state without any of {listed(lacking)}: it begins anew, as that of a parameter that never "
            "had a gradient"
        )


def note_loaded(name: str, converted: Iterable[str], lacking: Iterable[str]) -> None:
    """Warn of state that a load has converted, or that begins anew."""
    converted = sorted(converted)
    if converted:
        warn(f"{name} converts the state that it loads: {', '.join(converted)}")
    lacking = sorted(lacking)
    if lacking:
        warn(f"{name} loads a state without {' and '.join(lacking)}, which begins anew")


class StateShape(NamedTuple):
    """Shape of a tensor and of this rank's part, and placements of a DTensor."""

    shape: tuple[int, ...]
    own: tuple[int, ...]
    placements: tuple[Placement, ...] | None = None

    def __str__(self) -> str:
        if self.placements is None:
            return f"{self.shape}"
        return f"{self.shape}, of which placements {self.placements} put {self.own} on this rank"


def _expected(parameter: Tensor, tensor: StateTensor, layouts: Layouts) -> StateShape:
    if tensor.dims is None:
        return _shape_of(parameter)
    if tensor.dims == ():  # of a vector, too, which has no layout
        return StateShape((), ())
    own = tensor.local_shape(layouts(parameter))
    if not _is_cut_like(parameter, tensor):
        return StateShape(own, own)
    sides = SIDES[::-1] if is_transposed(parameter) else SIDES
    placements = tuple(_placement(placement, tensor.dims, sides) for placement in parameter.placements)
    return StateShape(tensor.global_shape(layouts(parameter)), own, placements)


def _shape_of(x: Tensor) -> StateShape:
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
            raise ValueError(
                f"{where} is a DTensor of shape {tuple(parameter.shape)} with placements {parameter.placements}, which "
                f"cut its logical matrix {tensor.matrix}, {layout.shape}, into {rectangles}: no placement says that of "
                f"{tensor.key!r}, and it could not be saved. Shard it along columns, or so that each rank has as many "
                "whole groups of rows as the others, or make its matrices parameters of their own"
            )
