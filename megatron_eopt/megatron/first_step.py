"""What is checked around the first step of a run: that replicas are equal, and that every matrix is updated."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.checkpoints.checksum import checksum
from megatron_eopt.megatron.parameters import optimizer_parameters
from megatron_eopt.optimizers.logical import LogicalMatrices

Verdict = Callable[[], bool]
"""Called after a step that Megatron has made; whether the check has its answer, which may be an error."""

Check = Callable[[], Verdict | None]
"""Called before a step; None where that was all."""


def check_first_step(optimizer: Any, checks: Sequence[Check]) -> None:
    """Wrap ``optimizer.step`` until every check has its answer.

    Checks come after whatever has loaded or made the parameters: a checkpoint with or without optimizer state, or an
    initialization. A step that Megatron leaves out, since the gradient is not finite, answers no :data:`Verdict`; the
    next one does.

    Args:
        optimizer: Megatron's.
        checks: each is called before every step until it is answered.
    """
    step, pending = optimizer.step, list(checks)

    @functools.wraps(step)
    def checked_step(*args: Any, **kwargs: Any) -> Any:
        checks, pending[:] = [*pending], []
        asked = [(check, verdict) for check in checks if (verdict := check()) is not None]
        result = step(*args, **kwargs)
        pending.extend(check for check, verdict in asked if not result[0] or not verdict())
        if not pending and optimizer.step is checked_step:
            optimizer.step = step
        return result

    optimizer.step = checked_step


def replicas_are_equal(model_chunks: Sequence[Any], pg_collection: Any) -> Check:
    """A check that data-parallel ranks have equal parameters, bit for bit, before the first step.

    Args:
        model_chunks: the model.
        pg_collection: Megatron's process groups.
    """

    def check() -> None:
        parameters: dict[str, dict[str, Tensor]] = {"dp_cp": {}, "expt_dp": {}}
        for number, chunk in enumerate(model_chunks):
            for name, parameter in chunk.named_parameters():
                name_of_group = "dp_cp" if getattr(parameter, "allreduce", True) else "expt_dp"
                parameters[name_of_group][f"{number}.{name}" if len(model_chunks) > 1 else name] = parameter
        for name, of_group in parameters.items():
            ranks = getattr(pg_collection, name, None)
            if ranks is not None:
                _check_replicas(of_group, ranks)

    return check


def _check_replicas(parameters: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Check that parameters, which are in the same order on all ranks of a group, are equal there.

    Raises:
        RuntimeError: on all ranks of the group, naming parameters that differ.
    """
    if group.size() == 1 or not parameters:
        return
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


def matrices_are_updated(optimizer: Any, expected: int) -> Check:
    """A check that the first step updates as many matrices as the manifest says.

    Too few prove nothing in a step at a learning rate of zero, as warmups begin with: there may be nothing to compute.

    Args:
        optimizer: Megatron's.
        expected: how many matrices this rank has a shard of.
    """
    optimizers = dict.fromkeys(each.optimizer for each in optimizer_parameters(optimizer))
    counting = [each for each in optimizers if isinstance(each, LogicalMatrices)]

    def check() -> Verdict:
        before = sum(each.matrices_updated for each in counting)

        def verdict() -> bool:
            updated = sum(each.matrices_updated for each in counting) - before
            at_rest = any(group["lr"] == 0 for each in counting for group in each.param_groups)
            if updated != expected and not at_rest:
                raise RuntimeError(
                    f"{updated} matrices were updated in the first step on rank {dist.get_rank()}, and the manifest "
                    f"has {expected}: some parameters got no gradient. Freeze what is not trained before Megatron "
                    f"wraps the model, or exclude it by an override"
                )
            return updated == expected

        return verdict

    return check
