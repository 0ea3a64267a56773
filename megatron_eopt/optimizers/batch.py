"""What a step works on, gathered once: the same for every way to run it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.bulk import Scalar

GroupRates = Sequence[tuple[Scalar, Scalar]]
"""Learning rate and weight decay of each group."""


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
    """

    places: list[int]
    parameters: list[Tensor]
    momenta: list[Tensor]
    gradients: list[Tensor]
    further: list[list[Tensor]]
    settings: dict[str, Any]


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
