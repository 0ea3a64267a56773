"""The line that says which optimizer owns how many parameters and how they are orthogonalized."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.parameters import torch_optimizers
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.factored import FactoredOptimizer
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.planning import RUNG
from megatron_eopt.parallel.pieces import Shape


def print_summary(optimizer: Any) -> None:
    """Print :func:`summary` on rank 0; all ranks call it, since it settles their plan."""
    text = summary(list(torch_optimizers(optimizer)))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"megatron_eopt: {text}", flush=True)


def summary(optimizers: Sequence[Optimizer]) -> str:
    """One line on what each optimizer owns on this rank."""
    kinds: dict[str, list[Tensor]] = {}
    muons: dict[str, list[TensorParallelMuon]] = {}
    factored: dict[str, list[FactoredOptimizer]] = {}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kinds.setdefault(type(optimizer).__name__, []).extend(parameters)
        if isinstance(optimizer, TensorParallelMuon) and parameters:
            muons.setdefault(type(optimizer).__name__, []).append(optimizer)
        if isinstance(optimizer, FactoredOptimizer) and parameters:
            factored.setdefault(type(optimizer).__name__, []).append(optimizer)
    notes = {name: _how(found) for name, found in muons.items()}
    notes |= {name: _factored(found) for name, found in factored.items()}
    return "; ".join(
        f"{name} owns {len(parameters)} parameters with {sum(p.numel() for p in parameters):,} elements on this rank"
        + (f", {notes[name]}" if name in notes else "")
        for name, parameters in kinds.items()
    )


def _how(muons: Sequence[TensorParallelMuon]) -> str:
    """How the matrices of Muon are orthogonalized: one optimizer, or one for experts beside it, built alike."""
    muon = muons[0]
    plans = [each.planned.plan for each in muons]
    counts = Counter[str]()
    ranks = 1
    for plan in plans:
        for bucket in plan.buckets:
            if bucket.scheme != "local":
                counts[bucket.scheme.replace("_", " ")] += len(bucket.matrices)
                ranks = max(ranks, plan.matrices[bucket.matrices[0]].ranks)
    iterations = Counter[tuple[int, str]]()
    rms: set[float] = set()
    for each, group, shape in _matrices(muons):
        settings = each.update_settings(group).newton_schulz
        named = isinstance(settings.coefficient_type, str)
        iterations[settings.steps, str(settings.coefficient_type) if named else "custom"] += 1
        size = each.predicted_rms(*shape, group)
        rms |= set() if size is None else {round(size, 3)}
    listed = " and ".join(f"{count} {scheme}" for scheme, count in sorted(counts.items()))
    where = f"{listed} over {ranks} ranks" if counts else "none sharded"
    sizes = " to ".join(f"{size:g}" for size in sorted({min(rms), max(rms)})) if rms else "not known before the steps"
    exactness = "an approximation" if "blockwise" in counts else "exact"
    precision = f"{muon.newton_schulz.fp32_matmul_prec} precision, symmetric products by {muon.param_groups[0][RUNG]}"
    return (
        f"{sum(iterations.values())} matrices orthogonalized by {_iterations(iterations)}, {precision}), {where} "
        f"({exactness}), {_second_moment(muon)}update RMS {sizes} "
        f"(AdamW's is near 0.2)"
    )


def _factored(optimizers: Sequence[FactoredOptimizer]) -> str:
    """What becomes of the weights, for those who did not ask for low rank."""
    count = sum(each.matrices_per_step for each in optimizers)
    ranks = sorted({group["rank"] for each in optimizers for group in each.param_groups if group["params"]})
    listed = " or ".join(map(str, ranks))
    return f"{count} matrices, each the product of two factors of rank {listed} from the first step on"


def _matrices(muons: Sequence[TensorParallelMuon]) -> Iterator[tuple[TensorParallelMuon, dict[str, Any], Shape]]:
    """Every logical matrix: its optimizer, its group and its shape."""
    for muon in muons:
        for group in muon.param_groups:
            for parameter in group["params"]:
                for layout in muon.matrix_layouts(parameter):
                    yield muon, group, layout.shape


def _iterations(counts: Mapping[tuple[int, str], int]) -> str:
    """Steps and coefficients, with the number of matrices where these differ; a parenthesis is left open."""
    steps = " or ".join(str(number) for number in sorted({number for number, _ in counts}))
    if len(counts) == 1:
        return f"{steps} Newton-Schulz steps ({next(iter(counts))[1]}"
    listed = (f"{count} by {number} of {name}" for (number, name), count in sorted(counts.items()))
    return f"{steps} Newton-Schulz steps ({', '.join(listed)}"


def _second_moment(muon: TensorParallelMuon) -> str:
    if not isinstance(muon, TensorParallelAdaptiveMuon):
        return ""
    sizes = {"adamuon": "aligned" if muon.align_rms else "not aligned", "normuon": "aligned", "namo": "not aligned"}
    return f"second moment by {muon.moment2_method} ({sizes[muon.moment2_method]} to Muon's size), first "
