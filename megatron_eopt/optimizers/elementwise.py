"""Optimizers of single entries: parts of a parameter lie anywhere, and the ranks that have them agree on its step."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from megatron_eopt.optimizers.batch import local
from megatron_eopt.optimizers.sharded import TensorParallelGroups
from megatron_eopt.optimizers.skipping import Skipping
from megatron_eopt.optimizers.stepping import SteppingOptimizer
from megatron_eopt.parallel.exchange import lowest
from megatron_eopt.parallel.layout import is_cut_again, is_expert, is_sharded


class ElementwiseOptimizer(SteppingOptimizer):
    """An optimizer whose entries step each for itself, but all those of a parameter together or not at all.

    A gradient that is not finite on one rank leaves out the step of that parameter on all ranks that have a part of it:
    one small all-reduce a step for each group of ranks.

    Attributes:
        pg_collection: the process groups of sharded parameters, ``tp`` and, for experts, ``expt_tp``; None where
            nothing is sharded, or where gradients are known to be finite.
    """

    pg_collection: TensorParallelGroups | None = None

    # Groups of ranks, each with which parameters they share; on the class, because it is left out of copies.
    _sharers: Sequence[tuple[ProcessGroup, Tensor]] = ()

    def _prepare(self, parameters: Sequence[Tensor]) -> Skipping:
        of_each = [self._groups_of(parameter) for parameter in parameters]
        groups = dict.fromkeys(group for groups in of_each for group in groups)
        device = local(parameters[0]).device
        self._sharers = [
            (group, torch.tensor([group in groups for groups in of_each], device=device)) for group in groups
        ]
        return super()._prepare(parameters)

    def _agree(self, flags: Tensor) -> Tensor:
        for group, shared in self._sharers:
            flags = torch.where(shared, lowest(flags, group), flags)
        return flags

    def _groups_of(self, parameter: Tensor) -> list[ProcessGroup]:
        """The groups of ranks that hold parts of a parameter, in the same order on all of them."""
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            cut = [i for i, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
            return [mesh.get_group(i) for i in cut if mesh.size(i) > 1]
        prefix = "expt_" if is_expert(parameter) else ""
        axes = {"tp": is_sharded(parameter), "gtp_remat": is_cut_again(parameter)}
        groups = [getattr(self.pg_collection, prefix + name, None) for name, cuts in axes.items() if cuts]
        return [group for group in groups if group is not None and group.size() > 1]
