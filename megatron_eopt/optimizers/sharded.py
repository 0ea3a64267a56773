"""Logical matrices of parameters of which a rank may hold a part: where they lie, and what has to be there for it."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import Split, check_split_shapes
from megatron_eopt.optimizers.logical import LogicalMatrices, check_query_groups
from megatron_eopt.parallel.dtensor import layout_of_dtensor
from megatron_eopt.parallel.layout import Layout, is_cut_again, is_expert, is_sharded, layout_of


class TensorParallelGroups(Protocol):
    """What is read of Megatron's ProcessGroupCollection, ``gtp_remat`` and ``expt_gtp_remat`` where it has them."""

    tp: ProcessGroup
    expt_tp: ProcessGroup


GROUPS = ("tp", "expt_tp", "gtp_remat", "expt_gtp_remat")
"""Names of the groups in the order in which :func:`~megatron_eopt.parallel.layout.layout_of` takes them."""


class ShardedMatrices(LogicalMatrices):
    """An optimizer whose matrices lie on tensor-parallel ranks, or on the mesh of DTensors.

    Attributes:
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``, and ``gtp_remat`` and
            ``expt_gtp_remat`` where Megatron cuts weights a second time; None where nothing is sharded.
    """

    split_lengths = (3, 4)

    pg_collection: TensorParallelGroups | None

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies; of a stack, where each of its matrices does."""
        if isinstance(parameter, DTensor):
            return layout_of_dtensor(parameter)
        return layout_of(parameter, *(getattr(self.pg_collection, name, None) for name in GROUPS))

    def split_shapes(self, parameter: Tensor) -> tuple[int, ...] | None:
        """Rows of each logical matrix in one query group of a fused parameter; None for any other."""
        own = getattr(parameter, "qkv_split_shapes", None)
        if own is None or not self._is_split(parameter):
            return super().split_shapes(parameter)
        return tuple(own)

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter: what its attribute declares, else what ``split_qkv`` makes of it."""
        split = super().split_of(parameter)
        return split.in_global_order() if isinstance(parameter, DTensor) else split

    def key_ends(self, parameter: Tensor) -> list[str]:
        """What the keys of each logical matrix end with: nothing where the parameter is one matrix."""
        if self.split_of(parameter).is_whole:
            return [""]
        return [f"_{part}" for part in range(len(self.matrix_layouts(parameter)))]

    def _check_split(self, qkv_split_shapes: Sequence[int] | None) -> tuple[int, ...] | None:
        # None is allowed here: each parameter may bring its own, which _check_qkv looks at.
        return None if qkv_split_shapes is None and self.is_qkv_fn else super()._check_split(qkv_split_shapes)

    def _check_qkv(self, parameter: Tensor) -> None:
        check_query_groups(check_split_shapes(self.split_shapes(parameter), self.split_lengths), self.layout(parameter))

    def _check_ranks(self, parameter: Tensor, called: str, otherwise: str = "") -> None:
        """Refuse a shard that no process group completes, or that is cut a second time as nothing here is.

        Args:
            parameter: any.
            called: what a message calls it.
            otherwise: what else the message advises.
        """
        if isinstance(parameter, DTensor) or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        prefix = "expt_" if is_expert(parameter) else ""
        for name, shard in (("tp", is_sharded(parameter)), ("gtp_remat", is_cut_again(parameter))):
            if shard and getattr(self.pg_collection, prefix + name, None) is None:
                raise ValueError(
                    f"{called} is marked as sharded, but no process group completes it: pass a pg_collection that has "
                    f"{prefix + name!r}{otherwise}"
                )
        if is_cut_again(parameter):
            self.layout(parameter)
