"""What SOAP keeps of a parameter, where its logical matrices lie, and which parameters it can have."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import WHOLE, Split, declared_split
from megatron_eopt.optimizers.logical import check_dimensions
from megatron_eopt.optimizers.sharded import ShardedMatrices
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.stepping import SteppingOptimizer
from megatron_eopt.parallel.layout import Layout, is_expert, is_sharded, on_one_rank
from megatron_eopt.parallel.records import cut

EXP_AVG, EXP_AVG_SQ, STEPS = "exp_avg", "exp_avg_sq", "steps"

SIDES = (("L", "Q_L"), ("R", "Q_R"))
"""Names of the factor and of the basis of the rows, and of the columns."""

MAX_DIM = "max_dim"
"""Setting of a group: the longest side that has a factor."""


class SOAPState(SteppingOptimizer, ShardedMatrices):
    """The state of SOAP, and the checks of its parameters."""

    pairs_rows = True

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies: of a stack each of its matrices, of one dimension as a column."""
        if parameter.ndim == 0:
            return on_one_rank((1, 1))
        if parameter.ndim > 1 or isinstance(parameter, DTensor):
            return super().layout(parameter)
        group = getattr(self.pg_collection, "expt_tp" if is_expert(parameter) else "tp", None)
        if not is_sharded(parameter) or group is None or group.size() == 1:
            return on_one_rank((parameter.numel(), 1))
        shape = (parameter.numel() * group.size(), 1)
        return Layout(shape, cut(shape, 0, group.size()), group, "expt_tp" if is_expert(parameter) else "tp")

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter; what is no matrix is dealt with elementwise, and so never split."""
        return WHOLE if parameter.ndim < 2 else super().split_of(parameter)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Adam's moments, the second in the eigenbases, the steps, and each matrix' factors and bases, whole."""
        group = self.group_of(parameter)
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
