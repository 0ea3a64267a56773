"""What a step knows of groups: parameters, state and settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.optimizers.foreach import Mask
from megatron_eopt.optimizers.rounding import Numbered
from megatron_eopt.settings.records import DecayMethod
from megatron_eopt.settings.values import Scalar


@dataclass(frozen=True)
class Batch:
    """One group's parameters and state in a step."""

    indices: list[int]  # of the parameters, among all of the optimizer
    parameters: list[Tensor]  # in the order of the group
    weights: list[Tensor]  # this rank's part of each of them
    momenta: list[Tensor]  # of each momentum
    gradients: list[Tensor]  # of each gradient; chosen() has them in the dtype of averages
    further: list[dict[str, Tensor]]  # by key, what else is kept of each parameter and changed in a step
    settings: Mapping[str, Any]  # effective ones of the group
    own: Mapping[str, Any]  # those that the group has itself, for methods of users
    lr: Scalar
    beta: float  # of the momentum in this step
    nesterov: bool
    weight_decay: Scalar
    decays: bool  # whether there is a weight decay; a tensor may be one, since no device is asked
    decay_method: DecayMethod
    accepted: Mask = None
    rounded: list[Numbered] | None = None  # the entries of momenta in bf16: random bits follow from them

    @property
    def cautious(self) -> bool:
        """Whether weight decay waits for the signs of the update."""
        return bool(self.settings.get("cautious_weight_decay"))

    @property
    def changed(self) -> list[list[Tensor]]:
        """Each parameter's weight, momentum and further state, which steps change."""
        several = zip(self.weights, self.momenta, self.further, strict=True)
        return [[weight, momentum, *further.values()] for weight, momentum, further in several]

    def of_matrices(self, key: str) -> list[list[Tensor]]:
        """What is kept under a key of each logical matrix, for each parameter."""
        return [[x for name, x in further.items() if name.startswith(key)] for further in self.further]

    def flag(self, index: int) -> Tensor | bool:
        """Whether one of the parameters steps."""
        return True if self.accepted is None else self.accepted[index]

    def masked(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """``x``, which has entries of each parameter, or 0 where it does not step."""
        return x if self.accepted is None else x * repeated(self.accepted, counts)

    def column(self, value: Scalar, counts: Sequence[int] | None = None) -> Tensor:
        """A number in fp64 for each of several entries of parameters, 0 where one does not step."""
        counts = [1] * len(self.indices) if counts is None else counts
        made = torch.ones(sum(counts), dtype=torch.float64, device=self.weights[0].device) * value
        return self.masked(made, counts)


def repeated(flags: Tensor, counts: Sequence[int]) -> Tensor:
    """Each entry so many times."""
    entries = flags.unbind()
    return torch.stack([entries[i] for i, count in enumerate(counts) for _ in range(count)])
