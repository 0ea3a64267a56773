"""Warnings of an optimizer's first step."""

import logging
from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_eopt.optimizers.nonfinite import listed
from megatron_eopt.parallel.layout import is_sharded, is_unmarked
from megatron_eopt.parallel.records import Matrix

logger = logging.getLogger(__name__)

# Parameter -> the optimizers that have stepped it, in the order of their first steps; all by weak references.
_stepped_by = WeakTensorKeyDictionary()


def note_others[Kind: Optimizer](optimizer: Kind, names: Sequence[str], parameters: Sequence[Tensor]) -> set[Kind]:
    """Warn of a second optimizer; returns those seen before."""
    before, since = set[Kind](), dict[str, Kind]()
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is None:
            continue
        known = [other for of_one in _stepped_by.get(parameter, ()) if (other := of_one()) is not None]
        if optimizer not in known:
            before.update(known)
            _stepped_by[parameter] = [ref(other) for other in (*known, optimizer)]
        elif known[-1] is not optimizer:  # after a run, its optimizer may stay alive while another trains on
            since[name] = known[-1]
    if since:
        kinds = " and ".join(dict.fromkeys(type(other).__name__ for other in (optimizer, *since.values())))
        logger.warning(
            f"{listed(since)}: stepped in turn by two optimizers ({kinds}); give each parameter to one of them"
        )
    return before


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
