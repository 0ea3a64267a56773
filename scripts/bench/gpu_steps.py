"""The parts of ``make gpu`` on whole steps: their bounds, every optimizer beside its peers, and kernel by kernel."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from gpu_run import Run, needs, without_waiting
from models import CASES, SETS, declared
from timing import copy_rate, in_a_row, matmul_rate, of_host, wait
from torch import Tensor, nn
from torch.autograd import DeviceType

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Work, whole_flops
from megatron_eopt.settings.execution import gathered

Build = Callable[[Sequence[Tensor]], Any]

Shapes = Sequence[tuple[int, ...]]
TINY: dict[str, Shapes] = {
    "124M": [(96, 32), (32, 32), (128, 32), (32, 128)],
    "small": [(32, 32)] * 4,
    "experts": [(4, 32, 48)] * 2,
}
# Symmetric products are counted half.
WORK = Work(NewtonSchulz(), torch.bfloat16, torch.device("meta"))  # of a GPU, which need not be here
ENTRY_BYTES = 28  # of a step of Muon in fp32, as tests/optimizers/test_step_kernels_cost.py counts them
OVER_LIMIT, HOST_MS = 1.4, 6.0
SECONDS_OF_ONE = 10  # an optimizer is not begun in the last of a part
SLOW = 0.5  # seconds of a step, above which few are timed
PROFILED_STEPS = 2
ADAMW = "AdamW, fused"
MEDIUM: dict[str, Any] = {"fp32_matmul_prec": "medium"}
EMERGING, DION, GRAM = "emerging-optimizers", "dion, Gram form", "gram-newton-schulz"
PROFILED = ("muon", "adamuon", "normuon", "namo", "soap", "shampoo", "spectron", "dion", "psgd_kron")


def peer(name: str, params: Sequence[Tensor]) -> Any:
    """An optimizer that is not ours; its compiler may take longer than a part."""
    if name == ADAMW:
        return torch.optim.AdamW(params, lr=1e-4, fused=True)
    if name == "torch.optim.Muon":
        return torch.optim.Muon(params, lr=1e-4)
    if name == EMERGING:
        needs("emerging_optimizers")
        from emerging_optimizers.orthogonalized_optimizers import Muon

        return Muon(params, lr=1e-4, fp32_matmul_prec="medium")  # without its syrk, which tunes for minutes
    if name == GRAM:
        needs("gram_newton_schulz")
        from gram_newton_schulz import Muon

        return Muon(params, lr=1e-4)
    needs("dion")
    from dion.muon import Muon

    return Muon(params, lr=1e-4, use_gram_newton_schulz=True)


def peers(*names: str) -> dict[str, Build]:
    """Peers by name."""
    return {name: partial(peer, name) for name in names}


def muons(run: Run) -> dict[str, Build]:
    """Our Muon in all ways to keep and to make its step."""
    ways: dict[str, dict[str, Any]] = {
        "muon": {},
        "muon, preset fast": {"coefficient_type": "cubic5"},
        "muon, momenta in bf16": {"momentum_dtype": torch.bfloat16},
        "muon, momenta in host memory": {"offload_fraction": 1.0},
        "muon, as a graph": {"cuda_graphs": True},
        "muon, elementwise work by torch": {"step_kernels": "torch"},
        "muon, in fp32": {"fp32_matmul_prec": "highest"},
    }
    if not run.on_gpu:
        del ways["muon, as a graph"]
    return {name: ours("muon", MEDIUM | way) for name, way in ways.items()}


def relatives() -> dict[str, Build]:
    """The other optimizers of the family."""
    found = {}
    for label, (name, settings) in CASES.items():
        precision = MEDIUM if OPTIMIZERS[name].takes("fp32_matmul_prec") else {}
        found[label] = ours(name, precision | settings)
    del found["muon"]
    return found


def ours(name: str, settings: dict[str, Any]) -> Build:
    """An optimizer of the family."""
    cls: Any = OPTIMIZERS[name].cls
    return partial(cls, lr=1e-4, **gathered(cls, settings))


def sets_of(run: Run) -> Mapping[str, Shapes]:
    """The parameters of steps."""
    return TINY if run.tiny else SETS


def parameters_of(shapes: Shapes, device: torch.device) -> list[nn.Parameter]:
    """Parameters with gradients, the same in every call."""
    torch.manual_seed(0)
    parameters = [declared(nn.Parameter(torch.randn(shape, device=device))) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    wait(device)
    return parameters


def steps(run: Run) -> None:
    """Steps of Muon against what the GPU can do at its rates of products and copies; 600 matrices on the host."""
    rate = matmul_rate(run.device, torch.bfloat16)
    copied = copy_rate(run.device)
    run.figures["rates"] = {"matmul": rate, "copy": copied}
    for name, shapes in sets_of(run).items():
        with run.check(f"{name}: step of the matrices"):
            bound = OVER_LIMIT * limit(shapes, rate, copied)
            optimizer = TensorParallelMuon(parameters_of(shapes, run.device), lr=1e-4, weight_decay=0.1)
            in_a_row(optimizer.step, 3, run.device)
            with run.check(f"{name}: nothing waits for the GPU"), without_waiting(run.device):
                optimizer.step()
                run.judge(f"{name}: nothing waits for the GPU", True if run.on_gpu else None, "no error")
            seconds = in_a_row(optimizer.step, 2 if run.tiny else 30, run.device)
            run.at_most(f"{name}: step of the matrices", seconds * 1e3, bound * 1e3, "ms", of_gpu=True)
            host = of_host(optimizer.step, 2 if run.tiny else 20, run.device)
            if name == "small":
                run.at_most(f"{name}: time of the host", host.median * 1e3, HOST_MS, "ms", of_gpu=True)
            else:
                run.tell(f"{name}: time of the host", host.median * 1e3, "ms")
            del optimizer


def limit(shapes: Shapes, rate: float, copied: float) -> float:
    """Seconds that a step of Muon takes at the rates of the device: its operations, and after them its bytes."""
    flops = sum(prod(stack) * whole_flops((rows, cols), WORK) for *stack, rows, cols in shapes)
    moved = ENTRY_BYTES * sum(map(prod, shapes))
    return flops / rate + moved / copied


def family(run: Run) -> None:
    """Whole steps of every optimizer at medium beside fused AdamW and other Muons: time, time of the host, memory."""
    plan = []
    for model in sets_of(run):
        known = peers(ADAMW) if model == "experts" else peers(ADAMW, "torch.optim.Muon", EMERGING)  # no stacks
        known |= muons(run) | (relatives() if model == "124M" else {})
        plan += [(model, name, build) for name, build in known.items()]
    plan += [("124M", name, build) for name, build in peers(GRAM, DION).items()]  # last: they compile
    adamw: dict[str, float] = {}
    for model, name, build in plan:
        label = f"{model}: {name}"
        if not run.has_time(label, SECONDS_OF_ONE):
            continue
        with run.check(label):
            found = run.figures[label] = measured(build, sets_of(run)[model], run)
            times = found["ms"] / adamw.setdefault(model, found["ms"])  # the first
            whole = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
            run.tell(label, found["ms"], "ms", f"{whole}; {times:.2f} of AdamW's time")


def measured(build: Build, shapes: Shapes, run: Run) -> dict[str, float]:
    """Milliseconds of a step and of the host in it, and GiB of state and of the step's peak beside it."""
    parameters = parameters_of(shapes, run.device)
    before = allocated(run)
    optimizer = build(parameters)
    seconds = in_a_row(optimizer.step, 2, run.device)
    gc.collect()
    state, calls = allocated(run) - before, 2 if run.tiny or seconds > SLOW else 10
    found = {
        "ms": in_a_row(optimizer.step, calls, run.device) * 1e3,
        "host ms": of_host(optimizer.step, calls, run.device).median * 1e3,
        "GiB of state": state / 2**30,
        "GiB at the peak of a step": peak_of(optimizer.step, run) / 2**30,
    }
    del optimizer, parameters
    free(run)
    return found


def allocated(run: Run) -> int:
    """Bytes of tensors on the GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated() if run.on_gpu else 0


def peak_of(step: Callable[[], object], run: Run) -> int:
    """Bytes that a call takes at its peak beside what is there before it; 0 without a GPU."""
    wait(run.device)
    before = allocated(run)
    if run.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step()
    wait(run.device)
    return torch.cuda.max_memory_allocated() - before if run.on_gpu else 0


def free(run: Run) -> None:
    """Give back what nobody refers to."""
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()


class Kernel(NamedTuple):
    """What a kernel takes in a step, in all of its calls."""

    name: str
    ms: float
    calls: float


def profile(run: Run) -> None:
    """Where the device time of a step goes, kernel by kernel: Muon everywhere, its relatives for 124M."""
    everyone = muons(run) | relatives()
    sets = sets_of(run)
    plan = [("124M", name) for name in PROFILED] + [(model, "muon") for model in sets if model != "124M"]
    for model, name in plan:
        label = f"{model}: {name}"
        if not run.has_time(label, SECONDS_OF_ONE):
            continue
        with run.check(label):
            kernels = kernels_of(everyone[name], sets[model], run)
            run.figures[label] = [each._asdict() for each in kernels]
            most = ", ".join(f"{x.ms:.3g} ms in {x.calls:.0f} of {x.name[:40]}" for x in kernels[:4])
            calls = sum(x.calls for x in kernels)
            run.tell(label, sum(x.ms for x in kernels), "ms", f"{calls:.0f} kernels: {most}")


def kernels_of(build: Build, shapes: Shapes, run: Run) -> list[Kernel]:
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
