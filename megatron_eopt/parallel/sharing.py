"""Parameters of which some lie on several ranks: what these agree on, and what they sum up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import Split
from megatron_eopt.parallel.exchange import lowest
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.statistics import Statistics, Wanted, reduce_statistics


@dataclass(frozen=True)
class Parameter:
    """What a plan has to know of a parameter.

    Attributes:
        name: the same on every rank, and unique.
        layout: where it lies, or where each matrix of a stack does.
        split: its logical matrices.
        dtype: of its updates.
    """

    name: str
    layout: Layout
    split: Split
    dtype: torch.dtype


class SharedParameters:
    """A list of parameters, and the groups of ranks that hold them.

    Args:
        parameters: in the same order on every rank.
        device: of the updates.

    Raises:
        ValueError: for two groups of ranks of the same name.

    Attributes:
        device: as given.
        groups: of ranks, by label.
    """

    def __init__(self, parameters: Sequence[Parameter], device: torch.device) -> None:
        self._parameters = list(parameters)
        self.device = device
        self.groups = _groups(parameters)
        self._sharers = {
            label: torch.tensor([p.layout.label == label for p in parameters], device=device) for label in self.groups
        }

    def lowest(self, x: Tensor) -> Tensor:
        """Element-wise minimum over the ranks of every group, one group after another."""
        for label in sorted(self.groups):
            x = lowest(x, self.groups[label])
        return x

    def agree(self, flags: Tensor) -> Tensor:
        """Element-wise minimum of ``flags`` (k x parameters) over the ranks that share each parameter."""
        for label in sorted(self.groups):
            flags = torch.where(self._sharers[label], lowest(flags, self.groups[label]), flags)
        return flags

    def shares(self, place: int) -> bool:
        """Whether other ranks wait for this one's part of a parameter."""
        return self._parameters[place].layout.ranks > 1

    def statistics(self, wanted: Sequence[Wanted]) -> list[Statistics]:
        """Statistics of logical matrices, with at most one all-reduce for each group; the same on all its ranks."""
        places = {label: [i for i, one in enumerate(wanted) if one.matrix.group == label] for label in _labels(wanted)}
        pending = {
            label: reduce_statistics([wanted[i] for i in of_label], self.groups.get(label))
            for label, of_label in places.items()
        }
        found = {
            i: each
            for label, of_label in places.items()
            for i, each in zip(of_label, pending[label].wait(), strict=True)
        }
        return [found[i] for i in range(len(wanted))]


def _labels(wanted: Sequence[Wanted]) -> list[str]:
    return sorted({one.matrix.group for one in wanted})


def _groups(parameters: Sequence[Parameter]) -> dict[str, ProcessGroup]:
    groups: dict[str, ProcessGroup] = {}
    for parameter in parameters:
        layout = parameter.layout
        if layout.group is not None and groups.setdefault(layout.label, layout.group) is not layout.group:
            raise ValueError(
                f"{parameter.name} lies on another group of ranks than parameters before it, but both are called "
                f"{layout.label!r}: give the dimensions of one device mesh other names, or each mesh an optimizer"
            )
    return groups
