"""Which form of the elementwise half of a step serves: kernels or torch.

Parameters, settings and the device decide, so that ranks and resumes need not ask.
"""

import torch

from megatron_eopt.kernels.choice import fast_triton, triton_missing
from megatron_eopt.matrices import declared_split
from megatron_eopt.settings.records import StepForm
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.momenta.step_kernels import DTYPES
from megatron_eopt.step.parameters import local


def step_form(optimizer: BaseOptimizer, device: torch.device) -> tuple[StepForm, str]:
    """The form that is named, or that of the rule, and why.

    Raises ``ValueError`` if kernels are named and cannot serve.
    """
    named = optimizer.execution.step_kernels
    if named == "torch":
        return "torch", "named"
    if named == "triton":
        reason = triton_missing(device) or reason_against(optimizer)
        if reason is not None:
            raise ValueError(f"step_kernels='triton' cannot serve: {reason}. step_kernels='torch' serves anywhere")
        return "triton", "named"
    reason = fast_triton(device) or reason_against(optimizer)
    return ("triton", "measured to be faster") if reason is None else ("torch", reason)


def reason_against(optimizer: BaseOptimizer) -> str | None:
    """Why kernels cannot serve Muon's parameters and settings, or None."""
    modified = _modified(optimizer)
    if modified:
        return modified
    for name, parameter in zip(optimizer._names(), optimizer._parameters(), strict=True):
        weight = local(parameter)
        split = declared_split(parameter)
        momentum = optimizer.execution.momentum_dtype or weight.dtype
        if not {weight.dtype, momentum} <= set(DTYPES):
            return f"{name} is in {weight.dtype}, its momentum in {momentum}"
        stacked = split is not None and split.stacked is not None
        if weight.ndim > 2 and not stacked and not weight.is_contiguous():
            return f"{name} is read as a matrix, but its strides are {weight.stride()}"
    return None


def _modified(optimizer: BaseOptimizer) -> str:
    """What of the groups' modifiers kernels do not do; empty if they serve."""
    groups = list(map(optimizer.modifiers_of, optimizer.param_groups))
    wanted = sorted(filter(None, (group.by_torch for group in groups)))
    if wanted:
        return f"groups have {' and '.join(dict.fromkeys(wanted))}"
    differ = [key for key in ("weight_norm", "moment2_method") if len({getattr(group, key) for group in groups}) > 1]
    return f"groups differ in {' and '.join(differ)}" if differ else ""
