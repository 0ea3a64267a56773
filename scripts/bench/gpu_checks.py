"""The parts of ``make gpu`` on what is right: kernels, the Gram form in fp16, collectives, steps against the CPU."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_run import Run, needs, without_waiting
from models import CASES
from newton_schulz import exact, off
from timing import wait
from torch import Tensor, nn

from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.kernels.choice import triton_missing
from megatron_eopt.orthogonalize.bases import by_products
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel import collectives
from megatron_eopt.settings.execution import gathered

TRITON_TESTS = "tests/kernels/test_triton_kernel.py"
NATIVE_TESTS = ("tests/optimizers/test_step_kernels.py", TRITON_TESTS, "tests/optimizers/test_graphs.py")
FP16_SHAPES: tuple[tuple[int, int], ...] = ((128, 128), (1024, 4096), (4096, 14336), (8192, 28672))
# a panel alone, several panels, one matrix of several, and a last panel that is not full
BASES: tuple[tuple[int, ...], ...] = ((16, 256, 96), (8, 768, 768), (1, 4096, 1024), (3, 700, 300))
BASIS_OFF = 1e-5
STEPS, BAD, WATCHED = 10, 5, 4  # the step, from 1, with a NaN gradient, and that from which nothing may wait
# How far a path may be from that on the CPU, of its length. Gradients that are off by 3e-7 part Muon's by 1e-6 and
# SOAP's by 3e-4 (seen on a CPU); one sign of a zero that rounding decides is 4e-3.
DIFFERENCE, OF_OTHERS = 1e-4, {"soap": 2e-2, "lion": 1e-2, "signum": 1e-2}
# What lets a few steps of small matrices show what an optimizer does.
SMALL: dict[str, dict[str, Any]] = {
    "spectron": {"rank": 3},
    "soap": {"precondition_frequency": 2},
    "schedule_free_adamw": {"warmup_steps": 2},
    "shampoo": {"damping": 1e-3},
    "kl_shampoo": {"damping": 1e-3},
}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")  # cudaMemcpyAsync is none


def kernels(run: Run) -> None:
    """Tests of kernels and graphs on the GPU, the Gram form in fp16, bases by products, collectives over NCCL."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *["--collect-only"] * run.tiny]
    for name, marks in (("native tests", "not wide and not full"), ("native tests, wide", "wide and not full")):
        with run.check(name):
            needs("pytest", "hypothesis")
            passes(run, name, [*pytest, "-m", marks, *NATIVE_TESTS])
    for sizes in ((64, 64),) if run.tiny else FP16_SHAPES:
        with run.check(f"{sizes}"):
            gram_in_fp16(run, sizes)
    for shape in BASES[:1] if run.tiny else BASES:
        label = f"basis by products of {shape}"
        with run.check(label):
            from_columns, from_orthonormal = of_basis(shape, run.device)
            run.at_most(f"{label}: off from the columns", from_columns, BASIS_OFF)
            run.at_most(f"{label}: off from orthonormal", from_orthonormal, BASIS_OFF)
    with run.check("collectives"):
        of_one_rank(run)
    checker = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck"):  # they are slow
        name = f"Triton kernel under {tool}"
        if checker is None or not run.on_gpu:
            run.judge(name, None, "no error", reason="there is no GPU, or no compute-sanitizer on the PATH")
            continue
        with run.check(name):
            watched = [checker, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
            passes(run, name, [*watched, *pytest, TRITON_TESTS])


def passes(run: Run, name: str, command: list[str]) -> None:
    """Judge a program by its exit code."""
    code, said = run.execute(name, command)
    run.judge(name, code == 0, "no error", reason=said.strip().rpartition("\n")[2])


def gram_in_fp16(run: Run, shape: tuple[int, int]) -> None:
    """Judge the worst error of each kernel; bf16 is taken over in place too, as in a step."""
    published = import_module("tests.orthogonalize.simulation").PUBLISHED_ERRORS["default"][torch.float16]
    for kernel in ("triton", "torch"):
        if missing := (triton_missing(run.device) if kernel == "triton" else None):
            run.judge(f"{shape}, {kernel}", None, "", reason=missing)
            continue
        errors: dict[str, tuple[float, float]] = {}
        for name, x in spectra(*shape, run.device):
            compiled = NewtonSchulz(products=kernel).compile
            gram = replace(compiled(shape, x.dtype, x.device, "gram"), dtype=torch.float16)
            standard = compiled(shape, x.dtype, x.device, "standard")
            expected = exact(x, "quintic")
            # of spectra that no table has: what the standard form has in bf16
            bound = published.get(name) or off(standard(x), expected)
            errors[name] = off(gram(x), expected), bound
            mine = x.bfloat16()
            expected = exact(mine, "quintic")
            gram = replace(compiled(shape, mine.dtype, x.device, "gram"), dtype=torch.float16)
            # and half a unit in the last place of what comes out
            errors[f"{name}, in place"] = off(gram.run(mine, out=mine.view(gram.dtype)), expected), bound + 2.0**-9
        run.figures[f"{shape}, {kernel}"] = errors
        worst = max(errors, key=lambda name: errors[name][0] / errors[name][1] if errors[name][0] < 1e9 else 1e9)
        run.at_most(f"{shape}, {kernel}: error on {worst}", *errors[worst])


def spectra(rows: int, cols: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and matrix of each spectrum of the simulation of restarts, and of rank 1 and an orthogonal one."""
    generator = torch.Generator(device).manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64)

    i = torch.arange(rows, device=device, dtype=torch.float64)
    left, right = torch.linalg.qr(gaussian(rows, rows)).Q, torch.linalg.qr(gaussian(cols, rows)).Q.mT
    values = {
        "cond_1e3": 10 ** (-3 * i / (rows - 1)),
        "cond_1e7": 10 ** (-7 * i / (rows - 1)),
        "rank_10": (i < 10).double(),
        "spikes": 1e-3 + (1 - 1e-3) * (i < 4).double(),
        "harmonic": 1 / (i + 1),
        "rank_1": (i < 1).double(),
        "orthogonal": torch.ones_like(i),
    }
    yield "gaussian", gaussian(rows, cols).float()
    for name, s in values.items():
        yield name, ((left * s) @ right).float()


def of_basis(shape: tuple[int, ...], device: torch.device) -> tuple[float, float]:
    """How far a basis by products is from spanning the columns of stacks, and from orthonormal ones."""
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
    torch.linalg.cholesky_ex(torch.eye(2, device=device))  # a library's first call may wait
    wait(device)
    with without_waiting(device):
        Q, _ = by_products(x)
    Q = Q.double()
    left_out = x.double() - Q @ (Q.mT @ x.double())
    identity = torch.eye(shape[-1], dtype=torch.float64, device=device)
    return (left_out.norm() / x.norm()).item(), (Q.mT @ Q - identity).abs().max().item()


def of_one_rank(run: Run) -> None:
    """Judge every collective in a group of one rank, and a step of Muon in it."""
    dist.init_process_group("nccl" if run.on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, exchange in exchanges().items():
            with run.check(name):
                x = torch.arange(8, device=run.device).float()
                run.judge(name, torch.equal(exchange(x).to(x), x), "what was sent")
        groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=None)
        shared: dict[str, Any] = {
            "pg_collection": groups,
            "execution": Execution(data_parallel_group=dist.group.WORLD),
        }
        found = []
        for settings in ({}, shared):
            torch.manual_seed(0)
            p = nn.Parameter(torch.randn(64, 32, device=run.device))
            p.grad = torch.randn_like(p)
            TensorParallelMuon([p], **settings).step()
            found.append(p)
        run.judge("a step in a group of one rank", torch.equal(*found), "that without groups")
    finally:
        dist.destroy_process_group()


def exchanges() -> dict[str, Callable[[Tensor], Any]]:
    """Every collective of the package, as a function that gives back what it gets where there is one rank."""
    group: Any = dist.group.WORLD
    return {
        "all_to_all": lambda x: collectives.all_to_all(x, [x.numel()], [x.numel()], group).wait(),
        "all_gather": lambda x: collectives.all_gather(x, group).wait()[0],
        "all_reduce": lambda x: collectives.all_reduce(x.clone(), group).wait(),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x.clone(), group).wait(),
        "reduce": lambda x: collectives.reduce(x.clone(), 0, group).wait(),
        "broadcast": lambda x: collectives.broadcast(x.clone(), 0, group).wait(),
        "lowest": lambda x: collectives.lowest(x, group),
        "lowest, of the CPU": lambda x: collectives.lowest(x.cpu().int(), group),
    }


def optimizers(run: Run) -> None:
    """Ten steps of every optimizer, one with a NaN gradient: as on the CPU, and nothing waits for the GPU."""
    for label, (name, settings) in CASES.items():
        with run.check(label):
            own = settings | SMALL.get(name, {})
            start, expected, expected_skipped, _ = trajectory(name, own, torch.device("cpu"))
            _, found, skipped, optimizer = trajectory(name, own, run.device)
            difference = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected - start)
            run.at_most(f"{label}: off from the CPU", difference.item(), OF_OTHERS.get(name, DIFFERENCE))
            run.judge(f"{label}: skipped steps", skipped == expected_skipped == 1, f"{expected_skipped}")
            wait(run.device)  # for what earlier steps began, which a step may await if the device is late
            run.figures[label] = counts = profiled(optimizer)
            waits = sum(count for key, count in counts.items() if key in WAITS)
            run.at_most(f"{label}: waits in the profile", waits, 0, of_gpu=not run.on_gpu)


def trajectory(
    name: str, settings: dict[str, Any], device: torch.device
) -> tuple[Tensor, Tensor, int, torch.optim.Optimizer]:
    """All parameters in a row before and after ten steps; skipped steps; the optimizer, which has gradients."""
    generator = torch.Generator().manual_seed(0)
    row = OPTIMIZERS[name]
    shapes: list[tuple[int, ...]] = [(64, 64), (96, 64), (64, 96), (64, 64), (128, 32)]
    if name in ("soap", "shampoo", "kl_shampoo"):  # an eigenbasis of what is rank-deficient is not unique
        shapes = [(64, 64)] * 3
    elif row.owns == "all":
        shapes.append((64,))
    exact_products = {"fp32_matmul_prec": "highest"} if row.takes("fp32_matmul_prec") else {}
    before = [torch.randn(shape, generator=generator) for shape in shapes]
    parameters = [nn.Parameter(x.clone().to(device)) for x in before]
    optimizer = row.cls(parameters, **gathered(row.cls, {"lr": 0.01, **exact_products, **settings}))
    for step in range(1, STEPS + 1):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        gradients[0][1, 2] += torch.nan if step == BAD else 0
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.to(device)
        with without_waiting(device) if step >= WATCHED else nullcontext():
            optimizer.step()
    rows = [torch.cat([x.detach().cpu().flatten() for x in each]) for each in (before, parameters)]
    return rows[0], rows[1], optimizer.skipped_steps(), optimizer


def profiled(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """How often a step calls what of CUDA."""
    with torch.profiler.profile() as profile:
        optimizer.step()
    names = [str(event.name) for event in profile.events() or ()]
    return {name: names.count(name) for name in set(names) if name.startswith(("cu", "Memcpy"))}
