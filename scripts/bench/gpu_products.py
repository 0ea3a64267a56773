"""The parts of ``make gpu`` on products: the Gram form in fp16, Newton-Schulz and its kernels against peers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import newton_schulz as bench
import torch
from gpu_verdicts import Run, draw, in_a_row, needs
from torch import Tensor

from megatron_eopt.kernels.choice import triton_missing
from megatron_eopt.kernels.precision import fp32_products
from megatron_eopt.kernels.products import Products
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Work, whole_flops

if TYPE_CHECKING:
    from megatron_eopt.kernels.triton_kernel import Fp32Precision

Shape = tuple[int, int]

WORK = Work(schedule=NewtonSchulz().schedule, restarts=NewtonSchulz().restarts, share=0.5, itemsize=2)
FP16_SHAPES: tuple[Shape, ...] = ((128, 128), (1024, 4096), (4096, 4096), (4096, 14336), (8192, 28672))
ASPECT, SMALLEST = 3.5, 2048  # the shapes that the targets of Newton-Schulz are for: long over short side, short side
DEFAULT_RATIO, FAST_RATIO, RATE, EXPERTS_RATIO = 1.8, 2.5, 0.8, 5.0

TINY_SHAPES: dict[str, tuple[int, ...]] = {"aspect 3.5": (28, 8), "2 experts": (2, 8, 24)}
SECONDS_OF_SHAPE = 20  # a shape is not begun in the last of a part

SWEEP_ROWS, SWEEP_STACKS = (512, 768, 1024, 1408, 2048, 4096, 8192), (1, 8, 64)
SWEEP_KINDS: dict[str, tuple[torch.dtype, "Fp32Precision", float]] = {
    # dtype, how fp32 is multiplied, and operations per second about which no more than a fifth of a second is tried
    "bf16": (torch.bfloat16, "ieee", 5e14),
    "fp16": (torch.float16, "ieee", 5e14),
    "tf32": (torch.float32, "tf32", 2.5e14),
    "fp32": (torch.float32, "ieee", 3e13),
}
LOST = 1.1  # a table of tiles may take so many times the time of the best


def fp16(run: Run) -> None:
    """Errors of the Gram form in fp16 on eight spectra, 128 x 128 to 8192 x 28672, with each kernel."""
    published = import_module("tests.orthogonalize.simulation").PUBLISHED_ERRORS["default"][torch.float16]
    for rows, cols in ((64, 64),) if run.tiny else FP16_SHAPES:
        with run.check(f"{rows} x {cols}"):
            samples = {name: (x.float(), bench.exact(x, "quintic")) for name, x in spectra(rows, cols, run.device)}
            bounds = {
                # of spectra that no table has: what the standard form has in bf16
                name: published.get(name) or error(gram_form(x, "torch", standard=True), exact)
                for name, (x, exact) in samples.items()
            }
            for kernel in ("triton", "torch"):
                if missing := (triton_missing(run.device) if kernel == "triton" else None):
                    run.judge(f"{rows} x {cols}, {kernel}", None, "", reason=missing)
                    continue
                for reduced in (False, True):
                    name = f"{rows} x {cols}, {kernel}, reduced sums {'allowed' if reduced else 'forbidden'}"
                    with run.check(name), fp16_sums(reduced):
                        errors = {key: error(gram_form(x, kernel), exact) for key, (x, exact) in samples.items()}
                        run.figures[name] = {key: (found, bounds[key]) for key, found in errors.items()}
                        worst = max(errors, key=lambda key: errors[key] / bounds[key] if errors[key] < 1e9 else 1e9)
                        run.at_most(f"{name}: error on {worst}", errors[worst], bounds[worst])
                name = f"{rows} x {cols}, {kernel}, bf16 taken over in place"
                with run.check(name):
                    errors = {key: taken_over(x, kernel) for key, (x, _) in samples.items()}
                    run.figures[name] = errors
                    # and half a unit in the last place of what comes out
                    worst = max(errors, key=lambda key: errors[key] - bounds[key] if errors[key] < 1e9 else 1e9)
                    run.at_most(f"{name}: error on {worst}", errors[worst], bounds[worst] + 2.0**-9)


def spectra(rows: int, cols: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and matrix in fp64 of each spectrum of the simulation of restarts, and of rank 1 and an orthogonal one."""
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
    yield "gaussian", gaussian(rows, cols)
    yield from ((name, (left * s) @ right) for name, s in values.items())


def gram_form(x: Tensor, kernel: str, standard: bool = False) -> Tensor:
    """The Gram form in fp16 as it is on a GPU, or the standard form in bf16, by the products of a kernel."""
    settings = NewtonSchulz(products=kernel)
    iteration = settings.compile(x.shape, x.dtype, x.device, "standard" if standard else "gram")
    return (iteration if standard else replace(iteration, dtype=torch.float16))(x)


def taken_over(x: Tensor, kernel: str) -> float:
    """The error against fp64 of a step's path: bf16, in whose memory the iteration works in fp16."""
    x = x.to(torch.bfloat16)
    expected = bench.exact(x, "quintic")
    settings = NewtonSchulz(products=kernel)
    iteration = replace(settings.compile(x.shape, x.dtype, x.device, "gram"), dtype=torch.float16)
    mine = x.clone()
    return error(iteration.run(mine, out=mine.view(iteration.dtype)), expected)


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, in Frobenius norm; not a number where an entry is none."""
    return (torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)).item()


@contextmanager
def fp16_sums(reduced: bool) -> Iterator[None]:
    """In which cuBLAS may, or may not, add parts of sums in fp16."""
    settings: Any = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
    before = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    for name in before:
        setattr(settings, name, reduced)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def newton_schulz(run: Run) -> None:
    """Newton-Schulz against emerging-optimizers, gram-newton-schulz and torch.optim.Muon, at shapes of real models."""
    setup = bench.Setup(run.device, like_gpu=True)
    rate = run.figures["matmul rate"] = bench.matmul_rate(setup)
    rows: list[bench.Row] = []
    for package in ("emerging_optimizers", "gram_newton_schulz"):
        with run.check(package):
            needs(package)
    for name, shape in TINY_SHAPES.items() if run.tiny else bench.GPU_SHAPES.items():
        if not run.has_time(name, SECONDS_OF_SHAPE):
            continue
        with run.check(name):
            found = bench.measure(setup, name, shape, rate, 1 if run.tiny else 5)
            rows += found
            run.figures[name] = [asdict(row) for row in found]
            judge(run, name, shape, {row.contestant: row for row in found}, rate)
    with run.check("a picture of the ratios"):
        if rows:
            bench.draw(rows, run.out / "newton_schulz.png")


def judge(run: Run, name: str, shape: tuple[int, ...], rows: dict[str, bench.Row], rate: float) -> None:
    """The verdicts of a shape, and the row of every contestant."""
    for key, row in rows.items():
        said = f"{row.precision}, {row.teraflops:.4g} TFLOP/s, {row.rate:.0%} of the matmul rate, error {row.error:.1e}"
        run.tell(f"{name}: {key}", row.milliseconds, "ms", said)
    default, fast = (rows[key] for key in ("ours, default", "ours, fast"))
    if peer := rows.get("emerging-optimizers"):
        run.at_most(f"{name}: error, against the peer's", default.error, peer.error, of_gpu=True)
    if len(shape) == 3:
        if peer:
            run.at_least(f"{name}: times as fast as the peer's loop", default.ratio, EXPERTS_RATIO, of_gpu=True)
    elif max(shape) == ASPECT * min(shape) and (run.tiny or min(shape) >= SMALLEST):
        if peer:
            run.at_least(f"{name}: times as fast as the peer", default.ratio, DEFAULT_RATIO, of_gpu=True)
            run.at_least(f"{name}: the same, preset fast", fast.ratio, FAST_RATIO, of_gpu=True)
        share = share_of_rate(cast(Shape, shape), default.milliseconds / 1e3, rate)
        run.at_least(f"{name}: share of the matmul rate", share, RATE, of_gpu=True)


def share_of_rate(shape: Shape, seconds: float, rate: float) -> float:
    """Operations of the cheaper form, symmetric products counted half, per second; over a rate of matmuls."""
    return whole_flops(shape, WORK) / seconds / rate


def sweep(run: Run) -> None:
    """The kernel against cuBLAS over rows, stacks and dtypes, its tiles against others; a picture."""
    if missing := triton_missing(run.device):
        run.judge("sweep", None, "", reason=missing)
        return
    rows, stacks = ((64,), (2,)) if run.tiny else (SWEEP_ROWS, SWEEP_STACKS)
    faster: dict[str, dict[str, dict[int, float]]] = {}
    for number, (kind, (dtype, precision, rate)) in enumerate(SWEEP_KINDS.items()):
        found: dict[str, dict[str, float]] = {}
        until = share_of_time(run, len(SWEEP_KINDS) - number)  # each kind compiles its tiles
        with run.check(kind):
            for n, width in product(stacks, sorted(rows, reverse=True)):
                if n * 2 * width**3 < 0.2 * rate and time.monotonic() < until:
                    with suppress(torch.OutOfMemoryError):
                        x = torch.randn(n, width, width, device=run.device).to(dtype)
                        found[f"{n} x {width}"] = seconds = with_all_tiles(x, precision, run.tiny, until)
                        of_stack = faster.setdefault(kind, {}).setdefault(f"{n} at once", {})
                        of_stack[width] = seconds["cuBLAS"] / seconds["best"]
            run.figures[kind] = found
            for other, bound in (("cuBLAS", 1.0), ("best", LOST)):
                ratios = {at: seconds["table"] / seconds[other] for at, seconds in found.items()}
                worst = max(ratios, key=lambda at: ratios[at], default=None)
                name = f"{kind}, {worst}: time with the table's tiles, over {other}"
                if worst is None:
                    run.judge(name, None, "", reason="no time was left")
                else:
                    run.at_most(name, ratios[worst], bound, of_gpu=True)
    with run.check("a picture of the sweep"):
        if faster:
            draw(faster, "rows", "times as fast as cuBLAS, best tiles", run.out / "sweep.png")


def share_of_time(run: Run, parts: int) -> float:
    """When the first of so many equal parts of the time that is left ends."""
    now = time.monotonic()
    return now + (run.until - now) / parts


def with_all_tiles(x: Tensor, precision: "Fp32Precision", tiny: bool, until: float) -> dict[str, float]:
    """Seconds of ``X X^T`` by cuBLAS, with the tiles of the table, with all that there is time for, and the best."""
    from megatron_eopt.kernels.triton_kernel import Tiles, symmetric_product, tiles_for

    out, calls = torch.empty_like(x), 1 if tiny else 10
    with fp32_products("high" if precision == "tf32" else "highest"):
        cublas = in_a_row(lambda: Products().gram(x, out), calls, x.device)

    def seconds(tiles: Tiles) -> float:
        return in_a_row(
            lambda: symmetric_product(x, x, out=out, input_precision=precision, tiles=tiles), calls, x.device
        )

    found = {"table": seconds(tiles_for(x.size(-1), x.dtype, precision))}
    depths = (16, 32) if x.dtype == torch.float32 else (32, 64)
    for width, depth, warps, stages in [(32, 16, 4, 3)] if tiny else product((64, 128), depths, (4, 8), (3, 4)):
        if time.monotonic() > until:
            break
        with suppress(Exception):  # more shared memory or registers than there are
            found[f"{width}/{depth}/{warps}/{stages}"] = seconds(Tiles(width, depth, warps=warps, stages=stages))
    return {"cuBLAS": cublas, "best": min(found.values()), **found}
