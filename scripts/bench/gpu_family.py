"""The part of ``make gpu`` on whole steps: every optimizer beside its peers, in time and in memory."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_optimizers import GPTS, METHODS, TINY_GPT, peak_of
from gpu_products import WORK
from gpu_verdicts import Run, in_a_row, needs, of_host, wait
from torch import Tensor, nn

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.tools.plan.models import dealt_matrices
from megatron_eopt.tools.plan.sizes import Parallel

Build = Callable[[Sequence[Tensor]], Any]

SECONDS_OF_ONE = 10  # an optimizer is not begun in the last of a part
MEDIUM: dict[str, Any] = {"fp32_matmul_prec": "medium"}
FURTHER = {"spectron": {"rank": 16}}  # what a row's constructor has to be told


def peers() -> dict[str, tuple[Build, str]]:
    """Optimizers that are not ours, with the precision of their products."""
    return {
        "AdamW, fused": (lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True), "no products"),
        "torch.optim.Muon": (lambda params: torch.optim.Muon(params, lr=1e-4), "bf16"),
        "emerging-optimizers, Muon": (emerging, "medium: bf16"),
    }


def emerging(params: Sequence[Tensor]) -> Any:
    """Muon of emerging-optimizers, without its syrk, which tunes for minutes."""
    needs("emerging_optimizers")
    from emerging_optimizers.orthogonalized_optimizers import Muon

    return Muon(params, lr=1e-4, fp32_matmul_prec="medium")


def muons(run: Run) -> dict[str, tuple[Build, str]]:
    """Our Muon in all ways to keep and to make its step."""
    ways: dict[str, dict[str, Any]] = {
        "ours, muon": MEDIUM,
        "ours, muon, preset fast": {**MEDIUM, "coefficient_type": "cubic5"},
        "ours, muon, momenta in bf16": {**MEDIUM, "momentum_dtype": torch.bfloat16},
        "ours, muon, momenta in host memory": {**MEDIUM, "offload_fraction": 1.0},
        "ours, muon, as a graph": {**MEDIUM, "cuda_graphs": True},
        "ours, muon, elementwise work by torch": {**MEDIUM, "step_kernels": "torch"},
        "ours, muon, in fp32": {"fp32_matmul_prec": "highest"},
    }
    if not run.on_gpu:
        del ways["ours, muon, as a graph"]
    return {x: (partial(TensorParallelMuon, lr=1e-4, **way), way["fp32_matmul_prec"]) for x, way in ways.items()}


def others() -> dict[str, tuple[Build, str]]:
    """The relatives and the other optimizers of the family."""
    found: dict[str, tuple[Build, str]] = {}
    for name, row in OPTIMIZERS.items():
        for further in METHODS if name == "adaptive_muon" else [FURTHER.get(name, {})]:
            precision = MEDIUM if row.takes("fp32_matmul_prec") else {}
            label = ", ".join(["ours", name, *(str(x) for x in further.values() if isinstance(x, str))])
            settings: dict[str, Any] = {"lr": 1e-4, **precision, **further}
            found[label] = (partial(row.cls, **settings), "medium" if precision else "no products")
    found.pop("ours, muon")
    return found


def family(run: Run) -> None:
    """Whole steps of every optimizer at medium beside fused AdamW and other Muons: time, time of the host, memory."""
    for model, sizes in (TINY_GPT if run.tiny else GPTS).items():
        shapes = [each.shape for each in dealt_matrices(sizes, Parallel(), WORK).matrices]
        everyone = peers() | muons(run) | ({} if model == "1.3B" else others())
        adamw: dict[str, float] = {}
        for name, (build, precision) in everyone.items():
            label = f"{model}: {name}"
            if time.monotonic() > run.until - SECONDS_OF_ONE:
                run.judge(label, None, "", reason="no time was left")
                continue
            with run.check(label):
                found = run.figures[label] = measured(build, shapes, run)
                adamw = adamw or found  # the first
                whole = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
                run.tell(
                    label, found["ms"], "ms", f"{precision}; {whole}; {found['ms'] / adamw['ms']:.2f} of AdamW's time"
                )


def measured(build: Build, shapes: Sequence[Shape], run: Run) -> dict[str, float]:
    """Milliseconds of a step and of the host in it, and GiB of state and of the step's peak beside it."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device=run.device)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    wait(run.device)
    before = allocated(run)
    optimizer = build(parameters)
    in_a_row(optimizer.step, 2, run.device)
    gc.collect()
    state, calls = allocated(run) - before, 2 if run.tiny else 10
    found = {
        "ms": in_a_row(optimizer.step, calls, run.device) * 1e3,
        "host ms": of_host(optimizer.step, calls, run.device) * 1e3,
        "GiB of state": state / 2**30,
        "GiB at the peak of a step": peak_of(optimizer.step, run) / 2**30,
    }
    del optimizer, parameters
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()
    return found


def allocated(run: Run) -> int:
    """Bytes of tensors on the GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated() if run.on_gpu else 0
