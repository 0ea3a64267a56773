"""Warnings of an optimizer's first step."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.nonfinite import listed
from megatron_eopt.parallel.layout import is_sharded, is_unmarked
from megatron_eopt.parallel.records import Matrix

logger = logging.getLogger(__name__)


def warn_of_fp16(names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Warn of parameters in fp16, whose range is too small."""
    if half := [name for name, p in zip(names, parameters, strict=True) if p.dtype == torch.float16]:
        logger.warning(
            f"{listed(half)}: in fp16, gradients and state below 6e-8 become 0 (AdamW's eps of 1e-8 too) and those "
            f"above 65504 inf; keep parameters in fp32 and compute under torch.autocast, or take bf16"
        )


def warned_of_unmarked(
    optimizer: str,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    matrices: Sequence[Sequence[Matrix]],
    tp: ProcessGroup,
) -> bool:
    """Warn of a ``partition_dim`` without ``tensor_model_parallel``."""
    several = zip(names, parameters, matrices, strict=True)
    claiming = [(name, p) for name, p, of_p in several if of_p and p.ndim > 1 and is_unmarked(p)]
    unmarked = [name for name, p in claiming if not is_sharded(p)]
    if unmarked and tp.rank() == 0:
        logger.warning(
            f"{optimizer}: {', '.join(unmarked)} have a partition_dim and no tensor_model_parallel, so each of the "
            f"{tp.size()} tensor-parallel ranks takes its own for a whole matrix: set tensor_model_parallel = True on "
            f"a shard, False on what is whole"
        )
    return bool(unmarked)
