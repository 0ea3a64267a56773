"""What a step works on, gathered once: the same for every way to run it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.bulk import DecayMethod, Scalar


@dataclass(frozen=True)
class Batch:
    """What a step works on of one group of parameters.

    Attributes:
        places: of the parameters, among all of the optimizer.
        parameters: in the order of the group.
        momenta: this rank's part of each momentum, and
        gradients: of each gradient, in the dtype of the momentum.
        further: of what else is kept of each parameter and changed in a step.
        settings: of the group.
        lr: learning rate of the group.
        weight_decay: of the group.
        decay_method: how the weight decay is applied.
    """

    places: list[int]
    parameters: list[Tensor]
    momenta: list[Tensor]
    gradients: list[Tensor]
    further: list[list[Tensor]]
    settings: dict[str, Any]
    lr: Scalar
    weight_decay: Scalar
    decay_method: DecayMethod


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
