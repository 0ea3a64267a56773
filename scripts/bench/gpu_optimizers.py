"""The parts of ``make gpu`` on optimizers: their native tests, their steps against the CPU, time and memory."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_products import WORK
from gpu_verdicts import (
    Rates,
    Run,
    execute,
    in_a_row,
    measured_rates,
    needs,
    of_host,
    wait,
    without_waiting,
    world,
)
from kernel_checks import check
from model_matrices import MODELS, Model, matrices_of, shapes_of
from small_model import Block
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.kernels.choice import triton_missing
from megatron_eopt.kernels.products import Fp32Precision, Products
from megatron_eopt.orthogonalize.bases import by_products
from megatron_eopt.parallel.cost import step_bytes, whole_flops
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from megatron_eopt.settings.execution import gathered

TRITON_TESTS = "tests/kernels/test_triton_kernel.py"
NATIVE_TESTS = ("tests/optimizers/test_step_kernels.py", TRITON_TESTS, "tests/optimizers/test_graphs.py")

PRODUCTS: tuple[tuple[torch.dtype, Fp32Precision], ...] = (
    (torch.float16, "ieee"),
    (torch.bfloat16, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
)

# both sides odd, tall, stacked, and of two sizes of real layers
CHECKED: tuple[tuple[int, ...], ...] = ((33, 70), (4096, 14336), (2, 70, 33), (8, 768, 2048), (2048, 2048))
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
METHODS = [{"moment2_method": method} for method in ("adamuon", "normuon", "namo")]
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")  # cudaMemcpyAsync is none

GPTS = {  # GPT-2's and GPT-3's
    "124M": Model(num_layers=12, hidden_size=768, ffn_hidden_size=3072, num_attention_heads=12),
    "1.3B": Model(num_layers=24, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=16),
}
TINY_GPT = {"tiny": Model(num_layers=1, hidden_size=32, ffn_hidden_size=128, num_attention_heads=2)}
VOCABULARY, LENGTH, SEQUENCES, TOKENS = 50304, 1024, 16, 2**19
ENTRY_BYTES = 28  # of a step in fp32: gradient 4, read twice; momentum 8, update 2, factor 2, weight 8
OVER_LIMIT, OVER_ADAMW, HOST_MS = 1.4, 1.03, 6.0
LAYER: tuple[Shape, ...] = (*[(512, 512)] * 4, (2048, 512), (512, 2048))  # a hundred of them: 600 matrices
MODES: tuple[TpMode, ...] = ("duplicated", "owner", "auto")
GROWTH = 1.1  # of temporaries, from five layers to ten


def triton_products(precision: Fp32Precision) -> Products:
    """Those of the Triton kernel; triton is imported here, since it is not installed everywhere."""
    from megatron_eopt.kernels.triton_kernel import Triton

    return Triton(precision)


def kernels(run: Run) -> None:
    """Triton's products against torch's; bases; tests of kernels and graphs; the kernel under sanitizers."""
    for dtype, precision in PRODUCTS:
        label = f"triton in {dtype}".replace("torch.", "")
        if missing := triton_missing(run.device):
            run.judge(label, None, "right products", reason=missing)
            continue
        with run.check(label):
            shapes = CHECKED[:1] if run.tiny else CHECKED
            products = triton_products(precision)
            wrong = check(products, shapes, dtype, run.device, fp32_precision=precision)
            run.judge(label, wrong is None, "right products", reason=wrong or "")
    for shape in BASES[:1] if run.tiny else BASES:
        label = f"basis by products of {shape}"
        with run.check(label):
            off_from_columns, off_from_orthonormal = of_basis(shape, run.device)
            run.at_most(f"{label}: off from the columns", off_from_columns, BASIS_OFF)
            run.at_most(f"{label}: off from orthonormal", off_from_orthonormal, BASIS_OFF)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *(["--collect-only"] if run.tiny else [])]
    for name, subset in (("native tests", "not wide and not full"), ("native tests, wide", "wide and not full")):
        with run.check(name):
            needs("pytest", "hypothesis")
            try:
                code, said = execute(run, name, [*pytest, "-m", subset, *NATIVE_TESTS])
            except subprocess.TimeoutExpired:  # each compiles its kernels
                run.judge(name, None, "all pass", reason="no time was left")
                continue
            run.judge(
                name, code == 0, "are collected" if run.tiny else "all pass", reason=said.strip().rpartition("\n")[2]
            )
    checker = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        name = f"Triton kernel under {tool}"
        if checker is None or not run.on_gpu:
            run.judge(name, None, "no error", reason="there is no GPU, or no compute-sanitizer on the PATH")
            continue
        with run.check(name):
            needs("pytest", "hypothesis")
            watched = [checker, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
            try:
                code, said = execute(run, tool, [*watched, *pytest, TRITON_TESTS])
            except subprocess.TimeoutExpired:  # it is slow
                run.judge(name, None, "no error", reason="no time was left")
                continue
            run.judge(name, code == 0, "no error", reason=said.strip().rpartition("\n")[2])


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


def optimizers(run: Run) -> None:
    """Ten steps of every optimizer, one with a NaN gradient: as on the CPU, and nothing waits for the GPU."""
    variants = [(row, each) for row in OPTIMIZERS for each in (METHODS if row == "adaptive_muon" else [{}])]
    for name, settings in variants:
        label = " ".join([name, *settings.values()])
        with run.check(label):
            start, expected, expected_skipped, _ = trajectory(name, settings, torch.device("cpu"))
            _, found, skipped, optimizer = trajectory(name, settings, run.device)
            off = (torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected - start)).item()
            run.at_most(f"{label}: off from the CPU", off, OF_OTHERS.get(name, DIFFERENCE))
            run.judge(f"{label}: skipped steps", skipped == expected_skipped == 1, f"{expected_skipped}")
            wait(run.device)  # for what earlier steps began, which a step may await if the device is late
            run.figures[label] = counts = profiled(optimizer)
            waits = sum(count for key, count in counts.items() if key in WAITS)
            run.at_most(f"{label}: waits in the profile", waits, 0, of_gpu=not run.on_gpu)


def trajectory(
    name: str, settings: dict[str, str], device: torch.device
) -> tuple[Tensor, Tensor, int, torch.optim.Optimizer]:
    """All parameters in a row before and after ten steps; skipped steps; the optimizer, which has gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(64, 64), (96, 64), (64, 96), (64, 64), (128, 32)]
    if name in ("soap", "shampoo", "kl_shampoo"):  # an eigenbasis of what is rank-deficient is not unique
        shapes = [(64, 64)] * 3
    elif OPTIMIZERS[name].owns == "all":
        shapes.append((64,))
    exact = {"fp32_matmul_prec": "highest"} if OPTIMIZERS[name].takes("fp32_matmul_prec") else {}
    before = [torch.randn(shape, generator=generator) for shape in shapes]
    parameters = [nn.Parameter(x.clone().to(device)) for x in before]
    optimizer = OPTIMIZERS[name].cls(
        parameters, **gathered(OPTIMIZERS[name].cls, {"lr": 0.01, **SMALL.get(name, {}), **exact, **settings})
    )
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


def steps(run: Run) -> None:
    """Steps of Muon for 124M and 1.3B against what the GPU can do and fused AdamW; 600 matrices on the host."""
    rates = measured_rates(run.device)
    run.figures["rates"] = rates._asdict()
    for name, model in (TINY_GPT if run.tiny else GPTS).items():
        shapes = shapes_of(model)
        with run.check(f"{name}: step of the matrices"):
            optimizer, bound = muon_of(shapes, run.device), OVER_LIMIT * limit(shapes, rates)
            in_a_row(optimizer.step, 3, run.device)
            with run.check(f"{name}: nothing waits for the GPU"), without_waiting(run.device):
                optimizer.step()
                run.judge(f"{name}: nothing waits for the GPU", True if run.on_gpu else None, "no error")
            found = in_a_row(optimizer.step, 2 if run.tiny else 30, run.device)
            run.at_most(f"{name}: step of the matrices", found * 1e3, bound * 1e3, "ms", of_gpu=True)
            del optimizer
        with run.check(f"{name}: training step of 0.5M tokens"):
            run.figures[name] = times = training_seconds(model, run)
            ratio = (times["training"] + times["muon"]) / (times["training"] + times["adamw"])
            run.at_most(f"{name}: training step of 0.5M tokens, over AdamW's", ratio, OVER_ADAMW, of_gpu=True)
    with run.check("600 matrices: time of the host"):
        optimizer = muon_of(LAYER * (1 if run.tiny else 100), run.device)
        found = of_host(optimizer.step, 2 if run.tiny else 20, run.device)
        run.at_most("600 matrices: time of the host", found * 1e3, HOST_MS, "ms", of_gpu=True)


def muon_of(shapes: Sequence[Shape], device: torch.device, **settings: Any) -> TensorParallelMuon:
    """Muon, with gradients; the same parameters in every call."""
    parameters = parameters_of(shapes, device)
    for p in parameters:
        p.tensor_model_parallel, p.partition_dim = "pg_collection" in settings, 0  # type: ignore[attr-defined]
    return TensorParallelMuon(parameters, lr=1e-4, momentum=0.95, nesterov=True, weight_decay=0.1, **settings)


def parameters_of(shapes: Sequence[Shape], device: torch.device) -> list[nn.Parameter]:
    """Parameters with gradients, the same in every call."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    wait(device)
    return parameters


def limit(shapes: Sequence[Shape], rates: Rates) -> float:
    """Seconds that a step of Muon takes at the rates of the device: its operations, and after them its bytes."""
    flops = sum(whole_flops(shape, WORK) for shape in shapes)
    moved = ENTRY_BYTES * sum(rows * cols for rows, cols in shapes)
    return flops / rates.flops + moved / rates.bytes


class GPT(nn.Module):
    """A language model of the blocks of the examples; it gives its loss on tokens (batch x length)."""

    def __init__(self, model: Model, vocabulary: int) -> None:
        super().__init__()
        width = model.hidden_size
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, model.num_attention_heads) for _ in range(model.num_layers)))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of all tokens but the first, each predicted from those before it."""
        x = self.norm(self.blocks(self.embedding(tokens[:, :-1])))
        return cross_entropy(self.lm_head(x).flatten(0, 1), tokens[:, 1:].flatten())


def training_seconds(model: Model, run: Run) -> dict[str, float]:
    """Of all micro-batches of a training step, and of the steps of Muon, with AdamW beside it, and of fused AdamW."""
    vocabulary, length, sequences = (64, 16, 2) if run.tiny else (VOCABULARY, LENGTH, SEQUENCES)
    net = GPT(model, vocabulary).to(run.device)
    tokens = torch.randint(vocabulary, (sequences, length + 1), device=run.device)

    def micro_batch() -> None:
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = net(tokens)
        loss.backward()

    calls = 2 if run.tiny else 10
    found = {"training": in_a_row(micro_batch, calls, run.device) * TOKENS / (sequences * length)}
    for name in ("adamw", "muon"):
        options = {"fp32_matmul_prec": "medium"} if name == "muon" else {}
        optimizer = build_optimizer(net, OptimizerConfig(name=name, lr=1e-5, options=options))
        in_a_row(optimizer.step, 3, run.device)
        found[name] = in_a_row(optimizer.step, calls, run.device)
        del optimizer
    return found


def memory(run: Run) -> None:
    """Peak memory of a step of 70B TP8 by duplicated, owner and auto, of five and of ten layers, in a fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for mode in MODES:
        with run.check(f"70B TP8, {mode}"), world("fake", 8, FakeStore()):  # its collectives give back anything
            (five, _), (ten, bound) = (temporaries(mode, layers, run) for layers in ((1, 2) if run.tiny else (5, 10)))
            run.figures[mode] = {"GiB of five layers": five / 2**30, "GiB of ten layers": ten / 2**30}
            name = f"70B TP8, {mode}: temporaries of ten layers over"
            run.at_most(f"{name} those of five", ten / max(five, 1), GROWTH, of_gpu=True)
            run.at_most(f"{name} what the plan prints", ten / bound, 1.0, of_gpu=True)


def temporaries(mode: TpMode, layers: int, run: Run) -> tuple[int, int]:
    """Bytes that the second step of rank 0 takes at its peak beside what is there before it, and what the plan says."""
    sizes: dict[str, Any] = vars(MODELS["llama3-70b"]) | {"num_layers": layers}
    if run.tiny:
        sizes |= {"hidden_size": 256, "ffn_hidden_size": 896}
    groups: Any = SimpleNamespace(tp=dist.group.WORLD, expt_tp=None)
    parameters = []
    for matrix in chain(*matrices_of(Model(**sizes), tensor=8)):
        shard = matrix.rectangles[0].shape
        parameter: Any = nn.Parameter(torch.randn(shard, device=run.device))
        parameter.grad = torch.randn_like(parameter)
        parameter.tensor_model_parallel, parameter.partition_dim = True, int(shard[1] != matrix.shape[1])
        parameters.append(parameter)
    optimizer = TensorParallelMuon(parameters, lr=1e-4, tp_mode=mode, pg_collection=groups)
    peak_of(optimizer.step, run)
    engine = optimizer.prepare()
    return peak_of(optimizer.step, run), step_bytes(engine.plan, engine.works, engine.workspace)


def peak_of(function: Callable[[], object], run: Run) -> int:
    """Bytes that a call takes at its peak beside what is there before it; 0 without a GPU."""
    wait(run.device)
    before = torch.cuda.memory_allocated() if run.on_gpu else 0
    if run.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    function()
    wait(run.device)
    return torch.cuda.max_memory_allocated() - before if run.on_gpu else 0
