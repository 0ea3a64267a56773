"""Choose the kernels of a run: one choice for all ranks, which checkpoints keep."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.optimizers import step_choice
from megatron_eopt.optimizers.base import KERNEL, STEP_KERNELS, BaseOptimizer
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.orthogonalize import timing
from megatron_eopt.orthogonalize.kernels import reason_against
from megatron_eopt.parallel.agreement import Groups, KernelProducts, in_turns, lowest_of_all


def choose_kernels(optimizers: Sequence[Any]) -> None:
    """Choose the kernels of symmetric products and of steps.

    The slowest rank counts, and a kernel that fails on one rank serves on none. Ranks without optimizers call it too: a
    checkpoint holds one choice, and replicas need not share a group. What is given is compiled in turns here, and
    checked by ``prepare``.
    """
    choosing = [x for x in optimizers if isinstance(x, BaseOptimizer) and KERNEL in x.carried_settings]
    timed = [x for x in choosing if timing.is_timed(x._parameters()[0].device)]
    world = {"world": dist.group.WORLD} if dist.group.WORLD else {}
    _choose_products(timed, world)
    _choose_form([optimizer for optimizer in timed if isinstance(optimizer, TensorParallelMuon)], world)


def _choose_products(optimizers: Sequence[BaseOptimizer], world: Groups) -> None:
    of_optimizers = [(optimizer, optimizer.kernel_products()) for optimizer in optimizers]

    def slowest() -> Tensor:
        times = torch.stack([timing.times([], [], torch.device("cpu"))] * 3)
        for optimizer, products in of_optimizers:
            given = optimizer.symmetric_products or optimizer.param_groups[0].get(KERNEL)
            if given is None:
                kind = _kind(products)
                times[kind] = times[kind].maximum(timing.times(*products))
            else:
                reason_against(given, *products)
        return times

    times = -lowest_of_all(-in_turns(slowest, world), world)
    for optimizer, products in of_optimizers:
        choice = timing.fastest(times[_kind(products)]) or "torch"
        for group in optimizer.param_groups:
            group.setdefault(KERNEL, choice)


def _kind(products: KernelProducts) -> int:
    """Products of one kind share a kernel: those in 16 bits, in fp32 that may round, and in exact fp32.

    Muon's may be in 16 bits and SOAP's in fp32, where other kernels are fast, and not all are timed.
    """
    _, dtypes, _, precision = products
    if torch.float32 not in dtypes:
        return 0
    return 2 if precision == "ieee" else 1


def _choose_form(muons: Sequence[TensorParallelMuon], world: Groups) -> None:
    """Choose the kernels of the steps that name none."""
    free = [x for x in muons if x.step_kernels is None and STEP_KERNELS not in x.param_groups[0]]

    def fault() -> str | None:
        reasons = [step_choice.reason_against(muon, muon._parameters()[0].device) for muon in free]
        return next(filter(None, reasons), None)

    form = step_choice.agreed_form(None, None, in_turns(fault, world), partial(lowest_of_all, groups=world))
    for muon in free:
        for group in muon.param_groups:
            group.setdefault(STEP_KERNELS, form)
