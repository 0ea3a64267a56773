"""What is checked around the first step of a run, by the one wrapper of its optimizer's ``step``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_eopt.megatron.parameters import optimizer_parameters
from megatron_eopt.optimizers.base import BaseOptimizer

type Verdict = Callable[[], bool]
"""Called after a step that Megatron has made; whether the check has its answer, which may be an error."""

type Check = Callable[[], Verdict | None]
"""Called before a step; None where that was all."""


def check_first_step(optimizer: Any, checks: Sequence[Check]) -> None:
    """Wrap the ``step`` of Megatron's optimizer until every check has its answer.

    Checks come after whatever has loaded or made the parameters: a checkpoint with or without optimizer state, or an
    initialization. A step that Megatron leaves out, since the gradient is not finite, answers no :data:`Verdict`; the
    next one does.
    """
    step, pending = optimizer.step, list(checks)

    @functools.wraps(step)
    def checked_step(*args: Any, **kwargs: Any) -> Any:
        checks, pending[:] = [*pending], []
        begun = [(check, verdict) for check in checks if (verdict := check()) is not None]
        result = step(*args, **kwargs)
        pending.extend(check for check, verdict in begun if not result[0] or not verdict())
        if not pending and optimizer.step is checked_step:
            optimizer.step = step
        return result

    optimizer.step = checked_step


def matrices_are_updated(optimizer: Any, expected: int) -> Check:
    """A check that the first step updates as many matrices on this rank as the manifest says.

    Too few prove nothing in a step at a learning rate of zero, as warmups begin with: there may be nothing to compute.
    Nor do they after gradients that were not finite, whose matrices stay as they are.
    """
    optimizers = dict.fromkeys(each.optimizer for each in optimizer_parameters(optimizer))
    counting = [each for each in optimizers if isinstance(each, BaseOptimizer)]

    def check() -> Verdict:
        before = sum(each.matrices_updated for each in counting)

        def verdict() -> bool:
            updated = sum(each.matrices_updated for each in counting) - before
            at_rest = any(group["lr"] == 0 for each in counting for group in each.param_groups)
            if updated != expected and not at_rest and not any(each.skipped_steps() for each in counting):
                raise RuntimeError(
                    f"{updated} matrices were updated in the first step on rank {dist.get_rank()}, and the manifest "
                    f"has {expected}: some parameters got no gradient. Freeze what is not trained before Megatron "
                    f"wraps the model, or exclude it by an override"
                )
            return updated == expected

        return verdict

    return check
