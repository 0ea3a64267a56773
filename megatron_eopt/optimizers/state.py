"""What an optimizer keeps per parameter: one description, from which state is created, saved and loaded."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.batch import local
from megatron_eopt.optimizers.dtensor_state import SIDES, check_placements, cut_like, is_cut_like, placements_like
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.pieces import Shape

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
        return self._shape(layouts[self.matrix].piece.shape)

    def global_shape(self, layouts: list[Layout]) -> tuple[int, ...]:
        """The shape over all ranks, likewise."""
        return self._shape(layouts[self.matrix].shape)

    def _shape(self, of_matrix: Shape) -> tuple[int, ...]:
        assert self.dims is not None
        sides = dict(zip(SIDES, of_matrix, strict=True))
        return tuple(dim if isinstance(dim, int) else sides[dim] for dim in self.dims)


class DescribedState(Optimizer):
    """An optimizer whose state is what :meth:`state_tensors` says: created, saved and loaded from that alone."""

    carried_settings: frozenset[str] = frozenset()
    """Settings of a group that the optimizer itself makes, and with which a resumed run has to go on."""

    live_key: str | None = None
    """Where a checkpoint holds a parameter itself, if the model's part of it holds what is :meth:`exported`."""

    # On the class, because it is left out of pickles and copies.
    _group_by_parameter: dict[Tensor, dict[str, Any]] | None = None

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it: plain values alone."""
        return {key: value for key, value in self.defaults.items() if isinstance(value, str | int | float | bool)}

    def settings_of_groups(self) -> dict[str, Any]:
        """The settings of which each group may have a value of its own -> the value of groups that have none."""
        return dict(self.defaults)

    def exported(self, parameter: Tensor) -> Tensor:
        """What is evaluated and exported in the place of a parameter, as it lies."""
        return parameter.detach()

    @abstractmethod
    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """What is kept for a parameter, in a fixed order and the same on all ranks that share it."""

    def matrix_layouts(self, parameter: Tensor) -> list[Layout]:
        """Where the logical matrices of a parameter lie; needed where :meth:`state_tensors` speaks of them."""
        raise NotImplementedError(f"{type(self).__name__} does not say where the matrices of a parameter lie")

    def group_of(self, parameter: Tensor) -> dict[str, Any]:
        """The group of a parameter."""
        found = (self._group_by_parameter or {}).get(parameter)
        # a load makes other groups, and Megatron puts its fp32 copies in the place of parameters
        if found is None or not any(found is group for group in self.param_groups):
            self._group_by_parameter = {p: group for group in self.param_groups for p in group["params"]}
            found = self._group_by_parameter[parameter]
        return found

    def init_state(self) -> None:
        """Create the state of every parameter, with a gradient or not, as a checkpoint needs it before it can load."""
        for group in self.param_groups:
            self._init_group(group)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = False) -> None:
        """Create the state of a group's parameters: the contract of emerging-optimizers.

        Args:
            group: one of the optimizer's.
            skip_non_grad_params: leave out parameters without a gradient.
        """
        for parameter in group["params"]:
            if parameter.grad is not None or not skip_non_grad_params:
                self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, created where it is not there."""
        state = self.state[parameter]
        if not state:
            for tensor in self.state_tensors(parameter):
                state[tensor.key] = self._zeros(parameter, tensor)
        return state

    def _zeros(self, parameter: Tensor, tensor: StateTensor) -> Tensor:
        dtype = tensor.dtype or parameter.dtype
        if tensor.dims is None:
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        layouts = self.matrix_layouts(parameter)
        part = torch.zeros(tensor.local_shape(layouts), dtype=dtype, device=parameter.device)
        if is_cut_like(parameter, tensor.dims):
            return cut_like(parameter, tensor.dims, part, tensor.global_shape(layouts))
        return part

    def _expected(self, parameter: Tensor, tensor: StateTensor) -> Lying:
        """How a state tensor lies."""
        if tensor.dims is None:
            return _lying(parameter)
        layouts = self.matrix_layouts(parameter)
        part = tensor.local_shape(layouts)
        if is_cut_like(parameter, tensor.dims):
            return tensor.global_shape(layouts), part, placements_like(parameter, tensor.dims)
        return part, None, None

    def _check_placements(self, parameter: Tensor, called: str) -> None:
        """Refuse a DTensor whose state cannot be saved; to be called by all ranks, before there is any state.

        Raises:
            ValueError: naming it, if no placement says how a state tensor of it is cut.
        """
        along = [x for x in self.state_tensors(parameter) if is_cut_like(parameter, x.dims or ())]
        if along:
            described = [(tensor.key, tensor.matrix) for tensor in along]
            where = f"{type(self).__name__}: {called}"
            check_placements(where, parameter, self.matrix_layouts(parameter), described)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state. Of settings that it lacks, a group keeps those that it has.

        Raises:
            ValueError: if the groups or the shapes are others, or if a tensor is missing; nothing is changed then.
        """
        needed = self.defaults.keys() | self.carried_settings
        known = [{key: group[key] for key in needed & group.keys()} for group in self.param_groups]
        saved = state_dict["param_groups"]
        pairs = zip(saved, [*known, *[{}] * len(saved)], strict=False)  # of other groups torch says what is wrong
        state_dict = {**state_dict, "param_groups": [self._completed(*pair) for pair in pairs]}
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        for parameter, saved in self._saved(state_dict):
            for tensor in self.state_tensors(parameter):
                loaded = saved.get(tensor.key)
                if loaded is None:
                    self.state[parameter][tensor.key] = self._zeros(parameter, tensor)
                elif tensor.dtype not in (None, parameter.dtype):  # to which torch casts what it loads
                    self.state[parameter][tensor.key] = (
                        loaded.detach().clone().to(local(parameter).device, tensor.dtype)
                    )

    def _completed(self, saved: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        """The settings of a saved group, with those known of the group in their place where they are missing."""
        return {**known, **saved}

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        for parameter, saved in self._saved(state_dict):
            for tensor in self.state_tensors(parameter):
                if tensor.key not in saved and not tensor.saved:
                    continue
                if tensor.key not in saved:
                    raise ValueError(
                        f"{type(self).__name__} needs {tensor.key!r} for the parameter of shape "
                        f"{tuple(parameter.shape)}, but the state has {sorted(saved)}: it is of another optimizer, or "
                        f"of other settings of this one"
                    )
                found, expected = _lying(saved[tensor.key]), self._expected(parameter, tensor)
                if found != expected:
                    how = _HOW_TO_LOAD if found[0] == expected[0] else ""
                    raise ValueError(
                        f"{tensor.key!r} has shape {_told(found)}, expected {_told(expected)} for the parameter of "
                        f"shape {tuple(parameter.shape)}: the state is of another model or layout{how}"
                    )

    def _saved(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """Each parameter with what a state dict has of it, but for those that had made no step."""
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        state = state_dict["state"]
        pairs = zip(self._parameters(), places, strict=False)  # of other groups torch says what is wrong
        return [(parameter, state[place]) for parameter, place in pairs if state.get(place)]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


_HOW_TO_LOAD = (
    "; torch.distributed.checkpoint.state_dict.set_optimizer_state_dict spreads it over the ranks as their parameters"
)


def _lying(x: Tensor) -> Lying:
    shape = tuple(x.shape)
    return (shape, tuple(local(x).shape), tuple(x.placements)) if isinstance(x, DTensor) else (shape, None, None)


def _told(lying: Lying) -> str:
    shape, part, placements = lying
    return f"{shape}" if part is None else f"{shape}, of which placements {placements} put {part} on this rank"
