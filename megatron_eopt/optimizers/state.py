"""What an optimizer keeps per parameter: one description, from which state is created, saved and loaded."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.batch import local
from megatron_eopt.parallel.layout import Layout

Dim = Literal["rows", "columns"] | int


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state of a parameter, which starts with zeros.

    Attributes:
        key: its name in ``optimizer.state[parameter]``.
        dims: None for a tensor of the shape of the parameter, which lies as the parameter does. Otherwise one entry per
            dimension: ``rows`` or ``columns`` for one as long as those of the logical matrix and cut as they are, or a
            number for one that every rank has whole; ``()`` is a scalar, the same on all ranks that share the matrix.
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
        assert self.dims is not None
        sides = dict(zip(("rows", "columns"), layouts[self.matrix].piece.shape, strict=True))
        return tuple(dim if isinstance(dim, int) else sides[dim] for dim in self.dims)


class DescribedState(Optimizer):
    """An optimizer whose state is what :meth:`state_tensors` says: created, saved and loaded from that alone."""

    carried_settings: frozenset[str] = frozenset()
    """Settings of a group that the optimizer itself makes, and with which a resumed run has to go on."""

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it: plain values alone."""
        return {key: value for key, value in self.defaults.items() if isinstance(value, str | int | float | bool)}

    @abstractmethod
    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """What is kept for a parameter, in a fixed order and the same on all ranks that share it."""

    def matrix_layouts(self, parameter: Tensor) -> list[Layout]:
        """Where the logical matrices of a parameter lie; needed where :meth:`state_tensors` speaks of them."""
        raise NotImplementedError(f"{type(self).__name__} does not say where the matrices of a parameter lie")

    def init_state(self) -> None:
        """Create the state of every parameter, with a gradient or not, as a checkpoint needs it before it can load."""
        for group in self.param_groups:
            for parameter in group["params"]:
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
        return torch.zeros(self._shape(parameter, tensor), dtype=dtype, device=local(parameter).device)

    def _shape(self, parameter: Tensor, tensor: StateTensor) -> tuple[int, ...]:
        if tensor.dims is None:
            return tuple(parameter.shape)
        return tensor.local_shape(self.matrix_layouts(parameter))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: if the groups or the shapes are others, or if a tensor is missing; nothing is changed then.
        """
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
                expected = self._shape(parameter, tensor)
                if tuple(saved[tensor.key].shape) != expected:
                    raise ValueError(
                        f"{tensor.key!r} has shape {tuple(saved[tensor.key].shape)}, expected {expected} for the "
                        f"parameter of shape {tuple(parameter.shape)}: the state is of another model or layout"
                    )

    def _saved(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """Each parameter with what a state dict has of it, but for those that had made no step."""
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        state = state_dict["state"]
        pairs = zip(self._parameters(), places, strict=False)  # of other groups torch says what is wrong
        return [(parameter, state[place]) for parameter, place in pairs if state.get(place)]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
