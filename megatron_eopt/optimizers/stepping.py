"""The frame of a step that every optimizer of ours has: groups are checked, and gradients are left out by one rule."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.batch import local
from megatron_eopt.optimizers.checks import check_gradients, check_lying, check_scalars
from megatron_eopt.optimizers.skipping import Skipping, skipping_for
from megatron_eopt.optimizers.state import DescribedState


@dataclass
class Ranks:
    """Process groups on their way into a copy, which shares them."""

    it: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        """The same."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to be pickled.

        Raises:
            TypeError: saying what to do.
        """
        raise TypeError(
            "an optimizer with process groups cannot be pickled, since they belong to this process: save its "
            "state_dict(), and load it into an optimizer that is built with the groups of the new process"
        )


def _shared(value: Any) -> Any:
    groups = vars(value).values() if hasattr(value, "__dict__") else ()
    return Ranks(value) if any(isinstance(each, ProcessGroup) for each in (value, *groups)) else value


class SteppingOptimizer(DescribedState):
    """An optimizer whose steps leave out gradients that are missing or not finite.

    Gradients are never written to, and a parameter without one is left as it is, and so is one whose gradient is not
    finite: see :mod:`~megatron_eopt.optimizers.skipping`.
    """

    # On the class, because torch leaves the attributes of an optimizer out of its pickles and copies.
    _skipping: Skipping | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: torch's part, and the attributes of this object but those that start with ``_``.

        A copy shares the process groups; they cannot be pickled.
        """
        own = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return {key: _shared(value) for key, value in own.items()} | super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`__getstate__` gave, or what ``load_state_dict`` loads."""
        super().__setstate__({key: value.it if isinstance(value, Ranks) else value for key, value in state.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ValueError: for a parameter that the optimizer cannot have, or a setting out of its range.
        """
        super().add_param_group(param_group)
        self._skipping = None
        try:
            self._check_settings(self.param_groups[-1])
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _check_settings(self, group: dict[str, Any]) -> None:
        """Refuse settings of a group that no step could work with; called in each step, so it waits for no device."""
        check_scalars(type(self).__name__, group)

    @abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse, by a ``ValueError``, what a group cannot have."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter whose gradient is there and finite.

        Args:
            closure: computes the loss and the gradients anew; called once, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            ValueError: for a setting or a gradient that the optimizer cannot take, before anything is changed.
            RuntimeError: if a gradient was not finite in several steps in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        if not parameters:
            return loss
        for group in self.param_groups:
            self._check_settings(group)
        self._check_gradients(parameters)
        if self._skipping is None:
            self._skipping = self._prepare(parameters)
        gradients = [None if p.grad is None else local(p.grad) for p in parameters]
        self._take(self._skipping.accept(gradients, self._agree))
        return loss

    def skipped_steps(self) -> dict[str, int]:
        """Parameter -> steps that were left out because its gradient was not finite. Waits for the device."""
        return {} if self._skipping is None else self._skipping.total

    @abstractmethod
    def _take(self, accepted: Tensor) -> None:
        """Make the step, of the parameters for which ``accepted``, on their device, is True."""

    def _check_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Refuse, by a ``ValueError``, gradients that the optimizer cannot take: none takes sparse ones, say."""
        check_gradients(type(self).__name__, parameters, self.param_groups)
        check_lying(type(self).__name__, parameters, self.param_groups)

    def _prepare(self, parameters: Sequence[Tensor]) -> Skipping:
        """What the first step needs, before it changes anything."""
        return skipping_for(self)

    def _agree(self, flags: Tensor) -> Tensor:
        """Element-wise minimum over the ranks that share the parameters, which are in dimension 1."""
        return flags
