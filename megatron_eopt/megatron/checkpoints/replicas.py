"""Data-parallel ranks hold the same parameters: checked before the first step, by a hash of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.checkpoints.checksum import checksum


def check_replicas(model_chunks: Sequence[Any], dense: ProcessGroup | None, expert: ProcessGroup | None) -> None:
    """Check that data-parallel ranks hold the same parameters, bit for bit; all of them call it together.

    It is for the time before the first step, after whatever has loaded or made the parameters: a checkpoint with or
    without optimizer state, or an initialization.

    Args:
        model_chunks: the model.
        dense: the data-parallel group of parameters; None to leave them out.
        expert: that of experts' parameters.

    Raises:
        RuntimeError: on all ranks of the group, naming parameters that differ.
    """
    parameters: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}
    for number, chunk in enumerate(model_chunks):
        for name, parameter in chunk.named_parameters():
            of_expert = not getattr(parameter, "allreduce", True)
            parameters[of_expert][f"{number}.{name}" if len(model_chunks) > 1 else name] = parameter
    for of_expert, group in ((False, dense), (True, expert)):
        if group is not None and group.size() > 1 and parameters[of_expert]:
            _check_equal(parameters[of_expert], group)


def _check_equal(parameters: Mapping[str, Tensor], group: ProcessGroup) -> None:
    hashes = torch.stack([checksum(p, [0] * p.ndim, p.shape) for p in parameters.values()])
    extremes = torch.stack([hashes, ~hashes])  # the largest is the complement of the least complement
    dist.all_reduce(extremes, dist.ReduceOp.MIN, group=group)
    different = (extremes[0] != ~extremes[1]).tolist()
    names = [name for name, differs in zip(parameters, different, strict=True) if differs]
    if names:
        raise RuntimeError(
            f"{len(names)} of {len(parameters)} parameters differ between data-parallel ranks, such as {names[0]}: the "
            f"ranks would train different models. Nothing was stepped. Load a checkpoint that verify-checkpoint calls "
            f"good, or look for what makes ranks start differently (seeds, --data-parallel-random-init); "
            f"--no-check-replicas leaves this check out"
        )
