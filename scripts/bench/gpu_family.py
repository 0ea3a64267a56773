"""The part of ``make gpu`` on whole steps: every optimizer beside its peers, in time and in memory."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_optimizers import GPTS, METHODS, TINY_GPT, parameters_of, peak_of
from gpu_verdicts import Run, in_a_row, needs, of_host, wait
from model_matrices import shapes_of
from torch import Tensor
from torch.autograd import DeviceType

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.settings.execution import gathered

Build = Callable[[Sequence[Tensor]], Any]

SECONDS_OF_ONE = 10  # an optimizer is not begun in the last of a part
SLOW = 0.5  # seconds of a step, above which few are timed
PROFILED = (
    "ours, muon",
    "ours, adaptive_muon, moment2_method adamuon",
    "ours, adaptive_muon, moment2_method normuon",
    "ours, adaptive_muon, moment2_method namo",
    "ours, soap, precondition_frequency 1",
    "ours, shampoo",
    "ours, spectron, rank 16",
    "ours, dion",
    "ours, psgd_kron",
)
PROFILED_STEPS = 2
MEDIUM: dict[str, Any] = {"fp32_matmul_prec": "medium"}
# What a constructor is told, where that is more than the rate: a row for each.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "spectron": [{"rank": 16}],
    "adaptive_muon": METHODS,
    "soap": [{}, {"precondition_frequency": 1}],
}


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


def compiling() -> dict[str, tuple[Build, str]]:
    """Muons whose compilers may take longer than a part."""
    return {"gram-newton-schulz, Muon": (gram, "bf16"), "dion, Muon, gram": (dion, "bf16")}


def gram(params: Sequence[Tensor]) -> Any:
    """Muon of gram-newton-schulz, with its kernels."""
    needs("gram_newton_schulz")
    from gram_newton_schulz import Muon

    return Muon(params, lr=1e-4)


def dion(params: Sequence[Tensor]) -> Any:
    """Muon of dion by the Gram form, which was its fastest."""
    needs("dion")
    from dion.muon import Muon

    return Muon(params, lr=1e-4, use_gram_newton_schulz=True)


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
    found: dict[str, tuple[Build, str]] = {}
    for name, way in ways.items():
        settings = gathered(TensorParallelMuon, way)
        found[name] = partial(TensorParallelMuon, lr=1e-4, **settings), way["fp32_matmul_prec"]
    return found


def others() -> dict[str, tuple[Build, str]]:
    """The relatives and the other optimizers of the family."""
    found: dict[str, tuple[Build, str]] = {}
    for name, row in OPTIMIZERS.items():
        for further in VARIANTS.get(name, [{}]):
            precision = MEDIUM if row.takes("fp32_matmul_prec") else {}
            label = ", ".join(["ours", name, *(f"{key} {value}" for key, value in further.items())])
            settings: dict[str, Any] = {"lr": 1e-4, **precision, **further}
            found[label] = (partial(row.cls, **settings), "medium" if precision else "no products")
    found.pop("ours, muon")
    return found


def family(run: Run) -> None:
    """Whole steps of every optimizer at medium beside fused AdamW and other Muons: time, time of the host, memory."""
    models = {model: shapes_of(sizes) for model, sizes in (TINY_GPT if run.tiny else GPTS).items()}
    everyone = [(model, peers() | muons(run) | ({} if model == "1.3B" else others())) for model in models]
    everyone += [(model, compiling()) for model in models]
    adamw: dict[str, dict[str, float]] = {}
    for model, contestants in everyone:
        shapes = models[model]
        for name, (build, precision) in contestants.items():
            label = f"{model}: {name}"
            if not run.has_time(label, SECONDS_OF_ONE):
                continue
            with run.check(label):
                found = run.figures[label] = measured(build, shapes, run)
                times = found["ms"] / adamw.setdefault(model, found)["ms"]  # the first
                whole = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
                run.tell(label, found["ms"], "ms", f"{precision}; {whole}; {times:.2f} of AdamW's time")


def measured(build: Build, shapes: Sequence[Shape], run: Run) -> dict[str, float]:
    """Milliseconds of a step and of the host in it, and GiB of state and of the step's peak beside it."""
    parameters = parameters_of(shapes, run.device)
    before = allocated(run)
    optimizer = build(parameters)
    seconds = in_a_row(optimizer.step, 2, run.device)
    gc.collect()
    state, calls = allocated(run) - before, 2 if run.tiny or seconds > SLOW else 10
    found = {
        "ms": in_a_row(optimizer.step, calls, run.device) * 1e3,
        "host ms": of_host(optimizer.step, calls, run.device) * 1e3,
        "GiB of state": state / 2**30,
        "GiB at the peak of a step": peak_of(optimizer.step, run) / 2**30,
    }
    del optimizer, parameters
    free(run)
    return found


def free(run: Run) -> None:
    """Give back what nobody refers to."""
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()


def profile(run: Run) -> None:
    """Where the device time of a step for 124M goes, kernel by kernel, by optimizers that are far from its bytes."""
    model, sizes = next(iter((TINY_GPT if run.tiny else GPTS).items()))
    rows = muons(run) | others()
    for name in PROFILED:
        label = f"{model}: {name}"
        if not run.has_time(label, SECONDS_OF_ONE):
            continue
        with run.check(label):
            kernels = kernels_of(rows[name][0], shapes_of(sizes), run)
            run.figures[label] = [{"kernel": x.name, "ms": x.ms, "calls": x.calls} for x in kernels]
            most = ", ".join(f"{x.ms:.3g} ms in {x.calls:.0f} of {x.name[:40]}" for x in kernels[:4])
            calls = sum(x.calls for x in kernels)
            run.tell(label, sum(x.ms for x in kernels), "ms", f"{calls:.0f} kernels: {most}")


class Kernel(NamedTuple):
    """What a kernel takes in a step, in all of its calls."""

    name: str
    ms: float
    calls: float


def kernels_of(build: Build, shapes: Sequence[Shape], run: Run) -> list[Kernel]:
    """The kernels of a step, the longest first; without a GPU the operations of the CPU."""
    optimizer = build(parameters_of(shapes, run.device))
    in_a_row(optimizer.step, 3, run.device)
    with torch.profiler.profile() as profiled:
        for _ in range(PROFILED_STEPS):
            optimizer.step()
        wait(run.device)
    del optimizer
    free(run)
    found = []
    for event in profiled.key_averages():
        on_gpu = event.device_type == DeviceType.CUDA
        # torch marks the whole step on the GPU, too
        if on_gpu == run.on_gpu and not event.key.startswith("Optimizer.step"):
            microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            found.append(Kernel(event.key, microseconds / 1e3 / PROFILED_STEPS, event.count / PROFILED_STEPS))
    return sorted(found, key=lambda kernel: -kernel.ms)


def allocated(run: Run) -> int:
    """Bytes of tensors on the GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated() if run.on_gpu else 0
