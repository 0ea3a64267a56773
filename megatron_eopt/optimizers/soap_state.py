"""What SOAP keeps of a parameter, where its logical matrices lie, and which parameters it can have."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import WHOLE, Split, check_split_shapes, declared_split
from megatron_eopt.optimizers.logical import LogicalMatrices, check_dimensions, check_query_groups
from megatron_eopt.optimizers.muon import TensorParallelGroups
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.stepping import SteppingOptimizer
from megatron_eopt.parallel.dtensor import layout_of_dtensor
from megatron_eopt.parallel.layout import Layout, is_expert, is_sharded, layout_of, on_one_rank
from megatron_eopt.parallel.pieces import cut

EXP_AVG, EXP_AVG_SQ, STEPS = "exp_avg", "exp_avg_sq", "steps"

SIDES = (("L", "Q_L"), ("R", "Q_R"))
"""Names of the factor and of the basis of the rows, and of the columns."""

MAX_DIM = "max_dim"
"""Setting of a group: the longest side that has a factor."""


class SOAPState(SteppingOptimizer, LogicalMatrices):
    """The state of SOAP, and the checks of its parameters.

    Attributes:
        pg_collection: the process groups of sharded parameters.
    """

    split_lengths = (3, 4)
    pairs_rows = True

    pg_collection: TensorParallelGroups | None

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies: of a stack each of its matrices, of one dimension as a column."""
        if parameter.ndim == 0:
            return on_one_rank((1, 1))
        if isinstance(parameter, DTensor):
            return layout_of_dtensor(parameter)
        tp_group = getattr(self.pg_collection, "tp", None)
        expert_tp_group = getattr(self.pg_collection, "expt_tp", None)
        if parameter.ndim > 1:
            return layout_of(parameter, tp_group, expert_tp_group)
        group = expert_tp_group if is_expert(parameter) else tp_group
        if not is_sharded(parameter) or group is None or group.size() == 1:
            return on_one_rank((parameter.numel(), 1))
        shape = (parameter.numel() * group.size(), 1)
        return Layout(shape, cut(shape, 0, group.size()), group, "expt_tp" if is_expert(parameter) else "tp")

    def split_shapes(self, parameter: Tensor) -> tuple[int, ...] | None:
        """Rows of each logical matrix in one query group of a fused parameter; None for any other."""
        own = getattr(parameter, "qkv_split_shapes", None)
        if own is None or not self._is_split(parameter):
            return super().split_shapes(parameter)
        return tuple(own)

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter; what is no matrix is dealt with elementwise, and so never split."""
        if parameter.ndim < 2:
            return WHOLE
        split = super().split_of(parameter)
        return split.in_global_order() if isinstance(parameter, DTensor) else split

    def key_ends(self, parameter: Tensor) -> list[str]:
        """What the keys of each logical matrix end with: nothing where the parameter is one matrix."""
        if self.split_of(parameter).is_whole:
            return [""]
        return [f"_{part}" for part in range(len(self.matrix_layouts(parameter)))]

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Adam's moments, the second in the eigenbases, the steps, and each matrix' factors and bases, whole."""
        group = next(each for each in self.param_groups if any(parameter is p for p in each["params"]))
        wide = torch.promote_types(parameter.dtype, torch.float32)
        layouts = self.matrix_layouts(parameter) if parameter.ndim > 1 else []
        return [
            StateTensor(EXP_AVG, dtype=wide),
            StateTensor(EXP_AVG_SQ, dtype=wide),
            StateTensor(STEPS, dims=(), dtype=torch.float64),
            *(
                StateTensor(key + end, (length, length), part, wide)
                for part, (layout, end) in enumerate(zip(layouts, self.key_ends(parameter), strict=False))
                for keys, length in zip(SIDES, layout.shape, strict=True)
                if length <= group[MAX_DIM] and 0 not in layout.shape
                for key in keys
            ),
        ]

    def _check_split(self, qkv_split_shapes: Sequence[int] | None) -> tuple[int, ...] | None:
        # None is allowed here: each parameter may bring its own, which _check_qkv looks at.
        return None if qkv_split_shapes is None and self.is_qkv_fn else super()._check_split(qkv_split_shapes)

    def _check_qkv(self, parameter: Tensor) -> None:
        check_query_groups(check_split_shapes(self.split_shapes(parameter), self.split_lengths), self.layout(parameter))

    def _check_parameter(self, parameter: Tensor, place: str) -> None:
        if parameter.ndim > 1:
            declared = declared_split(parameter)
            check_dimensions(f"{type(self).__name__} takes matrices and vectors, but {place}", parameter, declared)
            self._check_ranks(parameter, place)
            if declared is not None:
                self._check_declared(parameter)
            elif self._is_split(parameter):
                self._check_qkv(parameter)
        try:
            _ = self.matrix_layouts(parameter)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__} cannot lay {place} out: {error}") from error

    def _check_ranks(self, parameter: Tensor, place: str) -> None:
        group = "expt_tp" if is_expert(parameter) else "tp"
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        whole = isinstance(parameter, DTensor) or not is_sharded(parameter)
        if not (alone or whole) and getattr(self.pg_collection, group, None) is None:
            raise ValueError(
                f"{type(self).__name__}: {place} is marked as sharded, but no process group completes it: pass a "
                f"pg_collection that has {group!r}"
            )
