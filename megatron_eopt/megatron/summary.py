"""The line about each optimizer's parameters and orthogonalization."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.parameters import torch_optimizers
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.base import KERNEL
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.optimizers.step_choice import STEP_KERNELS
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.optimizers.weight_average import average_of
from megatron_eopt.settings.groups import iteration_of


def print_summary(optimizer: Any, tp_mode_source: str) -> None:
    """Print :func:`summary` of an optimizer of Megatron's, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"megatron_eopt: {summary(list(torch_optimizers(optimizer)), tp_mode_source)}", flush=True)


def summary(optimizers: Sequence[Optimizer], tp_mode_source: str = "argument") -> str:
    """One line on what each class of optimizers updates here."""
    alike: dict[str, list[Optimizer]] = {}
    for optimizer in optimizers:
        alike.setdefault(type(optimizer).__name__, []).append(optimizer)
    text = "; ".join(_updated(name, group, tp_mode_source) for name, group in alike.items())
    rules = dict.fromkeys(str(average) for each in optimizers if (average := average_of(each)) is not None)
    return text + "".join(f"; weights are averaged by {rule}, and evaluated at it" for rule in rules)


def _updated(name: str, alike: Sequence[Optimizer], source: str) -> str:
    with_parameters = [optimizer for optimizer in alike if any(group["params"] for group in optimizer.param_groups)]
    parameters = [p for optimizer in with_parameters for group in optimizer.param_groups for p in group["params"]]
    elements = sum(local(p).numel() for p in parameters)
    modes = {optimizer.tp_mode for optimizer in with_parameters if isinstance(optimizer, TensorParallelMuon | Spectron)}
    text = f"{name} owns {len(parameters)} parameters with {elements:,} elements on this rank"
    text += "".join(f", tp_mode {mode} ({source})" for mode in modes)
    muons = [optimizer for optimizer in with_parameters if isinstance(optimizer, TensorParallelMuon)]
    if muons:
        offloaded = sum(sum(optimizer.prepare().offloaded()) for optimizer in muons)
        if offloaded:
            text += f", {offloaded / 2**20:,.3g} MiB of their state in host memory"
        return f"{text}, {_orthogonalized(muons)}"
    factored = [optimizer for optimizer in with_parameters if isinstance(optimizer, Spectron)]
    if factored:
        count = sum(optimizer.matrices_per_step for optimizer in factored)
        ranks = sorted({group["rank"] for optimizer in factored for group in optimizer.param_groups if group["params"]})
        listed = " or ".join(map(str, ranks))
        # for those who did not ask for low rank
        return f"{text}, {count} matrices, each the product of two factors of rank {listed} from the first step on"
    return text


def _orthogonalized(muons: Sequence[TensorParallelMuon]) -> str:
    schemes = Counter[str]()
    iterations = Counter[tuple[int, str]]()
    sizes = set[float]()
    ranks = 1
    for muon in muons:
        described = muon.described_matrices()
        for group in muon.param_groups:
            settings = iteration_of(muon.effective(group))
            coefficients = settings.coefficient_type if isinstance(settings.coefficient_type, str) else "custom"
            for parameter in group["params"]:
                for matrix, layout in zip(described[parameter], muon.matrix_layouts(parameter), strict=True):
                    iterations[settings.steps, coefficients] += 1
                    sizes |= set() if matrix.rms is None else {round(matrix.rms, 3)}
                    if matrix.scheme != "local":
                        schemes[matrix.scheme] += 1
                        ranks = max(ranks, layout.ranks)
    first = muons[0]
    second_moment = ""
    modified = first.given_modifiers()
    modifiers = "".join(f"{key} {value}, " for key, value in modified.items())
    if isinstance(first, TensorParallelAdaptiveMuon):
        method = first.moment2_method
        aligned = "aligned" if method == "normuon" or (method == "adamuon" and first.align_rms) else "not aligned"
        second_moment = f"second moment by {method} ({aligned} to Muon's size), first "
    steps = " or ".join(str(number) for number in sorted({number for number, _ in iterations}))
    counted = [f"{count} by {number} of {name}" for (number, name), count in sorted(iterations.items())]
    named = ", ".join(counted) if len(counted) > 1 else "".join(name for _, name in iterations)
    listed = " and ".join(f"{count} {scheme}" for scheme, count in sorted(schemes.items()))
    where = f"{listed} over {ranks} ranks" if schemes else "none sharded"
    rms = " to ".join(f"{size:g}" for size in sorted({min(sizes), max(sizes)})) if sizes else ""
    form = first.param_groups[0].get(STEP_KERNELS)  # chosen on a GPU
    form = f", elementwise work by {form}" if form else ""
    exactness = "an approximation" if "blockwise" in schemes else "exact"
    return (
        f"{sum(iterations.values())} matrices orthogonalized by {steps} Newton-Schulz steps ({named}, "
        f"{first.newton_schulz.fp32_matmul_prec} precision, symmetric products by "
        f"{first.param_groups[0][KERNEL]}{form}), "
        f"{where} ({exactness}), {modifiers}{second_moment}update RMS {rms or 'not known before the steps'} "
        f"(AdamW's is near 0.2)"
    )
