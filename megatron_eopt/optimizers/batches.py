"""What a step knows of groups: parameters, state and settings."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_eopt.optimizers.foreach import Mask
from megatron_eopt.optimizers.group_settings import DecayMethod, Scalar
from megatron_eopt.optimizers.rounding import Numbered


@dataclass(frozen=True)
class Batch:
    """One group's parameters and state in a step."""

    indices: list[int]  # of the parameters, among all of the optimizer
    parameters: list[Tensor]  # in the order of the group
    weights: list[Tensor]  # this rank's part of each of them
    momenta: list[Tensor]  # of each momentum
    gradients: list[Tensor]  # of each gradient; chosen() has them in the dtype of averages
    further: list[list[Tensor]]  # of what else is kept of each parameter and changed in a step
    settings: dict[str, Any]  # of the group
    lr: Scalar
    beta: float  # of the momentum in this step
    nesterov: bool
    weight_decay: Scalar
    decays: bool  # whether there is a weight decay; a tensor may be one, since no device is asked
    decay_method: DecayMethod
    accepted: Mask = None
    rounded: list[Numbered] | None = None  # the entries of momenta in bf16 or 8 bits: random bits follow from them
    scales: list[Tensor] | None = None  # of momenta in 8 bits

    @property
    def changed(self) -> list[list[Tensor]]:
        """Weights, momenta and each kind of further state, which steps change."""
        scales = [] if self.scales is None else [self.scales]
        return [self.weights, self.momenta, *scales, *map(list, zip(*self.further, strict=True))]

    def flag(self, index: int) -> Tensor | bool:
        """Whether one of the parameters steps."""
        return True if self.accepted is None else self.accepted[index]
