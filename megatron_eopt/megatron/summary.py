"""The line that says which optimizer owns how many parameters and how they are orthogonalized."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.orthogonalize.scale import predicted_update_rms


def print_summary(optimizer: Any) -> None:
    """Print :func:`summary` on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"megatron_eopt: {summary(list(torch_optimizers(optimizer)))}", flush=True)


def torch_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """The torch optimizers inside Megatron's wrappers, in their order."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for each in chained:
            yield from torch_optimizers(each)
    elif isinstance(optimizer, Optimizer):
        yield optimizer
    elif getattr(optimizer, "optimizer", None) is not None:
        yield from torch_optimizers(optimizer.optimizer)


def summary(optimizers: Sequence[Optimizer]) -> str:
    """One line on what each optimizer owns on this rank."""
    kinds: dict[str, list[Tensor]] = {}
    notes: dict[str, str] = {}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kinds.setdefault(type(optimizer).__name__, []).extend(parameters)
        if isinstance(optimizer, TensorParallelMuon) and parameters:
            notes[type(optimizer).__name__] = _how(optimizer, kinds[type(optimizer).__name__])
    return "; ".join(
        f"{name} owns {len(parameters)} parameters with {sum(p.numel() for p in parameters):,} elements on this rank"
        + (f", {notes[name]}" if name in notes else "")
        for name, parameters in kinds.items()
    )


def _how(muon: TensorParallelMuon, parameters: Sequence[Tensor]) -> str:
    layouts = [(muon.layout(parameter), muon.split_shapes(parameter)) for parameter in parameters]
    schemes = [muon.scheme(layout, shapes) for layout, shapes in layouts if layout.sharded]
    counts = [f"{schemes.count(scheme)} {scheme}" for scheme in sorted(set(schemes))]
    ranks = max(layout.ranks for layout, _ in layouts)
    settings = muon.newton_schulz
    sizes = sorted(
        {
            round(predicted_update_rms(*layout.shape, muon.scale_mode, muon.extra_scale_factor), 3)
            for layout, _ in layouts
        }
    )
    name = settings.coefficient_type if isinstance(settings.coefficient_type, str) else "custom"
    where = f"{' and '.join(counts)} over {ranks} tensor-parallel ranks" if counts else "none sharded"
    exactness = "an approximation" if "blockwise" in schemes else "exact"
    return (
        f"{sum(len(shapes or (1,)) for _, shapes in layouts)} matrices orthogonalized by {settings.steps} "
        f"Newton-Schulz steps ({name}, {settings.fp32_matmul_prec} precision), {where} ({exactness}), update RMS "
        f"{' to '.join(f'{size:g}' for size in dict.fromkeys((sizes[0], sizes[-1])))} (AdamW's is near 0.2)"
    )
