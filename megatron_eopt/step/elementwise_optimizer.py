"""Optimizers that step every entry by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.step import foreach
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import local


class Batch:
    """Equal parameters of a group that step together, as shards.

    Attributes:
        group: its settings.
        ok: whether there is a step; None where the host knows that there is one.
        weights: to be changed in place.
    """

    def __init__(
        self, group: dict[str, Any], ok: Flag, parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]]
    ) -> None:
        self.group = group
        self.ok = ok
        self.weights = [local(p) for p in parameters]
        self._gradients = [local(p.grad) for p in parameters if p.grad is not None]
        self._states = states

    def state(self, key: str) -> list[Tensor]:
        """What is kept under a key, perhaps nothing; changed in place."""
        return [local(state[key]) for state in self._states if key in state]

    def gradients(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of what is to decrease, in dtypes of ``like``."""
        gradients = [g.to(x.dtype) for g, x in zip(self._gradients, like, strict=True)]
        return list(torch._foreach_neg(gradients)) if self.group["maximize"] else gradients


class ElementwiseOptimizer(BaseOptimizer):
    """Optimizers that step every entry by itself.

    They take any shape, shards and DTensors. A subclass defines its state, in the shape of parameters or in numbers of
    each, and the step (:meth:`update`), which its :attr:`counters` count.
    """

    elementwise = True

    def update(self, batch: Batch) -> None:
        """Step weights and state, or neither if not ``batch.ok``."""
        raise NotImplementedError

    def matrix_layouts(self, parameter: Tensor) -> list[Layout]:
        """Return one column, as there are no matrices."""
        return [on_one_rank((parameter.numel(), 1))]

    def _take(self, ok: Flag) -> None:
        self._begin_state()
        self._session.changing = True
        for group in self.param_groups:
            for key in self.counters:
                group[key] += 1
        for group, parameters in foreach.active(self.param_groups, ok, lambda p: frozenset(self.state[p])):
            self.update(Batch(group, ok, parameters, [self.state[p] for p in parameters]))
