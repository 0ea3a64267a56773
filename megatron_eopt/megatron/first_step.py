"""Checks of the first step: missing matrices, and missing gradients."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.megatron.agreement import distinct, say
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.wrappers import torch_optimizers
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.nonfinite import listed
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.parallel.attributes import is_expert, is_replicated

PARTIAL = 0.1  # of a gradient's norm: what is further off the mean of the ranks is a part, not rounding
_NUMBER_OF_EXPERT = re.compile(r"(?<=^local_experts\.)\d+|(?<=\.weight)\d+|(?<=\.bias)\d+")


def check_steps(
    optimizer: Any, expected: int, compare: Callable[[], None] | None = None, look: Callable[[], None] = lambda: None
) -> None:
    """Check that the first step updates ``expected`` matrices here.

    Fewer prove nothing at a learning rate of zero, as warmups begin with, or where gradients are not finite: then the
    next step counts. ``compare`` is called before every step, ``look`` before the first.
    """
    step = optimizer.step
    proven = False
    looked = False
    counting = [inner for inner in torch_optimizers(optimizer) if isinstance(inner, BaseOptimizer)]
    for inner in counting:  # a rank may have nothing of any gradient, and the count below tells what is missing
        inner._session.warns_without_gradients = False

    @functools.wraps(step)
    def checked_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal proven, looked
        if compare is not None:
            compare()
        if not looked:
            looked = True
            look()
        before = sum(inner.matrices_updated for inner in counting)
        result = step(*args, **kwargs)
        if not proven and result[0]:
            updated = sum(inner.matrices_updated for inner in counting) - before
            at_rest = any(group["lr"] == 0 for inner in counting for group in inner.param_groups)
            if updated != expected and not at_rest and not any(inner.skipped_steps() for inner in counting):
                raise RuntimeError(
                    f"{updated} matrices were updated in the first step on rank {dist.get_rank()}, and the manifest "
                    f"has {expected}: some parameters got no gradient. Freeze what is not trained before Megatron "
                    f"wraps the model, or exclude it by an override"
                )
            proven = updated == expected
        if proven and compare is None and optimizer.step is checked_step:
            optimizer.step = step
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
        say(
            f"warning: the gradient is zero everywhere in the first step, of {listed(sorted(unused))}: no forward pass "
            f"uses it, or its output is multiplied by zero so far. Freeze what is not trained before Megatron wraps "
            f"the model, or exclude it by an override"
        )


def refuse_partial_gradients(
    assigned: Sequence[Assignment], tp: dist.ProcessGroup | None, expert_tp: dist.ProcessGroup | None
) -> None:
    """Refuse whole parameters whose gradients differ over tensor-parallel ranks.

    A module that gives each rank a part of a sum, and no attribute by which Megatron adds them up, makes ranks train
    different models (as MLM 7452, finding 11). All ranks call it before the first step. A gradient differs where it is
    off the mean of the ranks by more than :data:`PARTIAL` of its norm. A ``RuntimeError`` is on all ranks of a group.
    """
    names = list[str]()
    distances = list[Tensor]()
    for each in assigned:
        parameter = each.parameter.tensor
        group = expert_tp if is_expert(parameter) else tp
        if group is None or group.size() == 1 or isinstance(parameter, DTensor) or not is_replicated(parameter):
            continue
        found = _gradient(parameter)
        gradient = torch.zeros_like(parameter, dtype=torch.float32) if found is None else found.float()
        mean = gradient / group.size()
        dist.all_reduce(mean, group=group)
        off = (gradient - mean).norm() / gradient.norm().clamp(min=torch.finfo(torch.float32).tiny)
        dist.all_reduce(off, dist.ReduceOp.MAX, group=group)
        names.append(each.name)
        distances.append(off)
    off_by = torch.stack(distances).tolist() if distances else []
    different = [(off, name) for off, name in zip(off_by, names, strict=True) if off > PARTIAL]
    if different:
        off, name = max(different)
        raise RuntimeError(
            f"the gradients of {len(different)} parameters that every tensor-parallel rank has whole differ between "
            f"these ranks, most that of {name}, by {100 * off:.0f} % of its size: the ranks would train different "
            f"models. Expected are equal gradients. A module whose ranks have parts of the sum says so by "
            f"parameter.sequence_parallel = True, which Megatron obeys under --sequence-parallel; one whose ranks have "
            f"shards, by tensor_model_parallel and partition_dim. Known is the out_norm of gated delta nets without "
            f"--sequence-parallel. --no-check-replicas leaves this check out"
        )


def _gradient(parameter: Tensor) -> Tensor | None:
    for name in ("decoupled_grad", "grad", "main_grad"):
        gradient = getattr(parameter, name, None)
        if gradient is not None:
            return local(gradient)
    return None
