"""Checks of the first step: missing matrices, and missing gradients."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.consensus import distinct, log_rank0
from megatron_eopt.megatron.wrappers import torch_optimizers
from megatron_eopt.screen import listed
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import local

_NUMBER_OF_EXPERT = re.compile(r"(?<=^local_experts\.)\d+|(?<=\.weight)\d+|(?<=\.bias)\d+")


def check_steps(
    optimizer: Any,
    expected: int,
    look: Callable[[], None] = lambda: None,
    look_again: Callable[[], None] = lambda: None,
) -> None:
    """Check that the first step updates ``expected`` matrices here.

    Fewer prove nothing at a learning rate of zero, as warmups begin with, or where gradients are not finite: then the
    next step counts. ``look`` is called before the first, and ``look_again`` after it.
    """
    step = optimizer.step
    proven = False
    looked = False
    counting = [inner for inner in torch_optimizers(optimizer) if isinstance(inner, BaseOptimizer)]

    @functools.wraps(step)
    def checked_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal proven, looked
        if proven:
            return step(*args, **kwargs)
        first = not looked
        looked = True
        if first:
            look()
        before = sum(inner.matrices_updated for inner in counting)
        result = step(*args, **kwargs)
        if first:
            look_again()
        if result[0]:
            updated = sum(inner.matrices_updated for inner in counting) - before
            at_rest = any(group["lr"] == 0 for inner in counting for group in inner.param_groups)
            if updated != expected and not at_rest and not any(inner.skipped_steps() for inner in counting):
                raise RuntimeError(
                    f"{updated} matrices were updated in the first step on rank {dist.get_rank()}, and the manifest "
                    f"has {expected}: some parameters got no gradient. Freeze what is not trained before Megatron "
                    f"wraps the model, or exclude it by an override"
                )
            proven = updated == expected
        return result

    optimizer.step = checked_step


def warn_of_unused(assigned: Sequence[Assignment]) -> None:
    """Warn of parameters whose gradient is zero on all ranks.

    Megatron's buffers hold zeros for parameters that no backward pass has reached. Another data-parallel rank may have
    the whole sum, and an expert may get no tokens, so one expert speaks for all of its layer.
    """
    reached: dict[str, list[Tensor]] = {}
    for each in assigned:
        if each.optimizer is not None and 0 not in (each.settings.get("lr"), each.settings.get("lr_mult")):
            parameter = each.parameter.tensor
            gradient = _gradient(parameter)
            none = torch.zeros((), dtype=torch.bool, device=parameter.device)
            head, experts, tail = each.name.partition(".experts.")
            name = head + experts + _NUMBER_OF_EXPERT.sub("*", tail)
            reached.setdefault(name, []).append(none if gradient is None else gradient.any())
    here = torch.stack([torch.stack(flags).any() for flags in reached.values()]).tolist() if reached else []
    of_ranks = distinct(dict(zip(reached, here, strict=True)))
    used = {name for of_rank in of_ranks for name, is_reached in of_rank.items() if is_reached}
    unused = {name for of_rank in of_ranks for name in of_rank} - used
    if unused:
        log_rank0(
            f"warning: the gradient is zero everywhere in the first step, of {listed(sorted(unused))}: no forward pass "
            f"uses it, or its output is multiplied by zero so far. Freeze what is not trained before Megatron wraps "
            f"the model, or exclude it by an override"
        )


def _gradient(parameter: Tensor) -> Tensor | None:
    for name in ("decoupled_grad", "grad", "main_grad"):
        gradient = getattr(parameter, name, None)
        if gradient is not None:
            return local(gradient)
    return None
