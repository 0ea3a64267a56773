"""Time orthogonalization against its public peers on the same matrices, in one run: a part of ``make bench``.

On the CPU in fp32, and on a GPU, where there is one, at full size and in medium precision.

Every contestant gets the same matrices in fp32, in turn, several times; the medians are compared. The table has, for
each: least and most of the rounds, the precision of its products, how many times as fast as emerging-optimizers it is,
what it computes per second for the operations of its form, also as a share of this machine's measured matmul rate, and
its error against its own polynomial in fp64. The same goes to bench-out/ as JSON and as a picture. A peer that is not
installed is left out.
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quiet import Load, add_flag
from torch import Tensor

from megatron_eopt.kernels.choice import products_for
from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize import get_coefficients, newton_schulz
from megatron_eopt.orthogonalize.forms import PRESETS, gram_flops, restarts_for, standard_flops

OUT = Path(__file__).resolve().parents[2] / "bench-out"

# Layers of Llama-3 8B and 70B and of Qwen3-30B-A3B at an eighth of their width (a sixteenth for 70B), for a CPU.
CPU_SHAPES = {
    "square": (1024, 1024),
    "Llama-3 8B gate, up, down / 8": (1792, 512),
    "Llama-3 8B k, v / 8": (128, 512),
    "Llama-3 70B gate, up, down / 16": (1792, 512),
    "aspect 7": (3584, 512),
    "Qwen3-30B-A3B q / 8": (512, 256),
    "64 experts": (64, 128, 64),
    "128 experts": (128, 96, 256),
}

EXPERT = (768, 2048)  # of Qwen3-30B-A3B
GPU_SHAPES = {
    "Llama-3 8B gate, up, down": (14336, 4096),
    "aspect 3.5": (7168, 2048),
    **{f"{n} experts": (n, *EXPERT) for n in (128, 8, 64, 384)},
    "Llama-3 70B gate, up, down": (28672, 8192),
    "square": (4096, 4096),
    "Llama-3 8B k, v": (1024, 4096),
    "aspect 7": (28672, 4096),
    "Qwen3-30B-A3B q": (4096, 2048),
}
SYRK_ROWS = 5000  # from which its kernel tunes few tiles: for smaller ones it compiles some 180 kernels a shape


@dataclass(frozen=True)
class Setup:
    """Where it runs, and how products of fp32 matrices are computed: in fp32 on the CPU, in half precision on a GPU."""

    device: torch.device
    like_gpu: bool = False  # whether a CPU has the settings of a GPU, to try them

    @property
    def on_gpu(self) -> bool:
        """Whether the settings are those of a GPU."""
        return self.device.type == "cuda" or self.like_gpu

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What is orthogonalized."""
        return GPU_SHAPES if self.on_gpu else CPU_SHAPES

    @property
    def precision(self) -> MatmulPrecision:
        """Of our products."""
        return "medium" if self.on_gpu else "highest"

    @property
    def dtype(self) -> torch.dtype:
        """What the machine's rate is measured in."""
        return torch.bfloat16 if self.on_gpu else torch.float32


class Contestant(NamedTuple):
    """What orthogonalizes a matrix or a stack in fp32."""

    function: Callable[[Tensor], Tensor]
    coefficients: str
    extra: int  # restarts beyond the default; -1 for the standard form
    precision: str  # of products


@dataclass(frozen=True)
class Row:
    """One contestant on one shape."""

    device: str
    matrices: str
    shape: tuple[int, ...]
    contestant: str
    precision: str
    milliseconds: float  # median of the rounds
    least: float
    most: float
    ratio: float  # NaN without emerging-optimizers
    teraflops: float
    rate: float
    error: float


def torch_muon(x: Tensor) -> Tensor:
    """The iteration of torch.optim.Muon, in bf16; it takes one matrix."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function of one matrix to every matrix of a stack."""
    return lambda x: function(x) if x.ndim == 2 else torch.stack([function(matrix) for matrix in x])


def contestants(setup: Setup, shape: tuple[int, ...]) -> dict[str, Contestant]:
    """All by name, the peers that are installed first."""
    medium = setup.precision == "medium"
    found: dict[str, Contestant] = {}
    with suppress(ImportError):
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz as emerging

        def peer(x: Tensor, use_syrk: bool = False) -> Tensor:
            with fp32_products(setup.precision, as_torch=True):  # by which it chooses its dtype
                return emerging(x, 5, use_syrk=use_syrk)

        has = "bf16" if medium else "fp32"
        found["emerging-optimizers"] = Contestant(each(peer), "quintic", -1, has)
        if len(shape) == 3:
            found["emerging-optimizers, its batch"] = Contestant(peer, "quintic", -1, has)
        elif setup.on_gpu and min(shape) >= SYRK_ROWS:
            found["emerging-optimizers, syrk"] = Contestant(lambda x: peer(x, use_syrk=True), "quintic", -1, has)
    with suppress(ImportError):
        from gram_newton_schulz import GramNewtonSchulz

        settings: dict[str, Any] = {} if setup.device.type == "cuda" else {"ns_use_kernels": False}
        settings |= {"gram_newton_schulz_reset_iterations": list(restarts_for("quintic", 5, setup.precision) or ())}
        theirs = GramNewtonSchulz(ns_coefficients=[list(abc) for abc in get_coefficients("quintic", 5)], **settings)
        found["gram-newton-schulz"] = Contestant(theirs, "quintic", 0, "fp16")
    found["torch.optim.Muon"] = Contestant(each(torch_muon), "simple", -1, "bf16")

    def ours(kind: str, extra: int, precision: MatmulPrecision = setup.precision, **settings: Any) -> Contestant:
        settings = {"fp32_matmul_prec": precision, **settings}
        in_gram = "fp16" if extra >= 0 and setup.device.type == "cuda" else "bf16"
        told = in_gram if precision == "medium" else "fp32"
        return Contestant(lambda x: newton_schulz(x, **settings), kind, extra, told)

    found["ours, standard"] = ours("quintic", -1, form="standard")
    for preset, (kind, _, extra) in PRESETS.items():
        found[f"ours, {preset}"] = ours(kind, extra, preset=preset)
    other: MatmulPrecision = "highest" if setup.on_gpu else "medium"
    extra = 0 if other == "highest" else -1
    return found | {f"ours, {other}": ours("quintic", extra, other, products=None)}


def medians(functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median wall-clock seconds of each function, as :func:`in_turns` takes them."""
    return {name: statistics.median(taken) for name, taken in in_turns(functions, rounds, device).items()}


def in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Wall-clock seconds of each function, called in turn, after one call that does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def flops(setup: Setup, shape: tuple[int, ...], coefficient_type: str, extra: int) -> float:
    """Operations of the form that is taken, every product counted whole."""
    rows, cols = sorted(shape[-2:])
    schedule = get_coefficients(coefficient_type, 5)
    count = standard_flops(rows, cols, schedule)
    if extra >= 0:
        restarts = restarts_for(coefficient_type, 5, setup.precision, extra)
        of_gram = torch.float16 if setup.on_gpu else torch.float32
        share = products_for(None, setup.device, of_gram, setup.precision).share(rows)
        if restarts is not None:
            cheaper = gram_flops(rows, cols, schedule, restarts, share) < standard_flops(rows, cols, schedule, share)
            count = gram_flops(rows, cols, schedule, restarts) if cheaper else count
    return count * (shape[0] if len(shape) == 3 else 1)


def matmul_rate(setup: Setup) -> float:
    """Operations per second of a product of two large matrices."""
    rows = 8192 if setup.device.type == "cuda" else 2048
    x = torch.randn(rows, rows, device=setup.device).to(setup.dtype)
    return 2 * rows**3 / medians({"x": lambda: x @ x}, 5, setup.device)["x"]


def exact(x: Tensor, coefficient_type: str) -> Tensor:
    """The same polynomial in fp64, by the formula."""
    X = x.double()
    X = X.mT if X.size(-2) > X.size(-1) else X
    X = X / torch.linalg.matrix_norm(X, keepdim=True)
    for a, b, c in get_coefficients(coefficient_type, 5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X if X.shape == x.shape else X.mT


def measure(setup: Setup, name: str, shape: tuple[int, ...], rate: float, rounds: int) -> list[Row]:
    """Every contestant on one shape."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(setup.device)
    everyone = contestants(setup, shape)
    taken = in_turns({key: partial(one.function, x) for key, one in everyone.items()}, rounds, setup.device)
    seconds = {key: statistics.median(of_rounds) for key, of_rounds in taken.items()}
    references = {kind: exact(x, kind) for kind in {one.coefficients for one in everyone.values()}}
    rows = []
    for key, one in everyone.items():
        reference = references[one.coefficients]
        error = torch.linalg.vector_norm(one.function(x).double() - reference) / torch.linalg.vector_norm(reference)
        computed = flops(setup, shape, one.coefficients, one.extra) / seconds[key]
        ratio = seconds.get("emerging-optimizers", math.nan) / seconds[key]
        of_rounds = taken[key]
        rows.append(
            Row(
                device=setup.device.type,
                matrices=name,
                shape=shape,
                contestant=key,
                precision=one.precision,
                milliseconds=seconds[key] * 1e3,
                least=min(of_rounds) * 1e3,
                most=max(of_rounds) * 1e3,
                ratio=ratio,
                teraflops=computed / 1e12,
                rate=computed / rate,
                error=error.item(),
            )
        )
    return rows


def pyplot() -> Any:
    """What draws pictures, if it is installed."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot

    return pyplot


def draw(rows: list[Row], picture: Path) -> None:
    """Bars of the ratios, one group for each shape."""
    plt = pyplot()
    names = list(dict.fromkeys(row.contestant for row in rows))
    groups = list(dict.fromkeys(row.matrices for row in rows))
    figure, axes = plt.subplots(figsize=(12, 6))
    for index, name in enumerate(names):
        found = {row.matrices: row.ratio for row in rows if row.contestant == name}
        places = [group + (index - len(names) / 2) * 0.1 for group in range(len(groups))]
        axes.bar(places, [found.get(group, 0.0) for group in groups], width=0.1, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right")
    axes.set_ylabel("times as fast as emerging-optimizers 0.3.0")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def run(setup: Setup, rounds: int, load: Load) -> tuple[dict[str, Any], list[Row]]:
    """Measure and print on one device."""
    rate = matmul_rate(setup)
    where = f"{torch.get_num_threads()} threads of {platform.processor() or 'a CPU'}"
    where = torch.cuda.get_device_name(setup.device) if setup.on_gpu else where
    machine = {
        "device": where,
        "torch": torch.__version__,
        "matmul_gflops": rate / 1e9,
        "matmul_dtype": str(setup.dtype),
    }
    print(
        f"torch {torch.__version__}, {where}: {setup.dtype} matmul {rate / 1e9:.0f} GFLOP/s; precision "
        f"{setup.precision} unless said"
    )
    rows = []
    for name, shape in setup.shapes.items():
        print(f"\n{name}: {' x '.join(map(str, shape))}")
        of_times = f"{'ms':>8} {'least':>8} {'most':>8}"
        print(f"  {'':32} {'':4} {of_times} {'times as fast':>14} {'TFLOP/s':>8} {'of matmul rate':>15} {'error':>9}")
        measured = measure(setup, name, shape, rate, rounds)
        load.check()
        for row in measured:
            rows.append(row)
            ms = f"{row.milliseconds:8.2f} {row.least:8.2f} {row.most:8.2f}"
            speed = f"{ms} {row.ratio:14.2f} {row.teraflops:8.2f} {row.rate:15.0%}"
            print(f"  {row.contestant:32} {row.precision:4} {speed} {row.error:9.1e}")
    return machine, rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Time Newton-Schulz against its public peers where this runs.")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each contestant (default: %(default)s)")
    add_flag(parser)
    arguments = parser.parse_args()
    load = Load(torch.get_num_threads(), arguments.any_load)
    OUT.mkdir(exist_ok=True)
    found = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        machine, rows = run(Setup(torch.device(device)), arguments.rounds, load)
        machine["load"] = load.words
        found.append({"machine": machine, "rows": [asdict(row) for row in rows]})
        draw(rows, OUT / f"newton_schulz_{device}.png")
        print(f"\n{load.words}\nWritten: {OUT / f'newton_schulz_{device}.png'}\n")
    (OUT / "newton_schulz.json").write_text(json.dumps(found, indent=1))
    print(f"Written: {OUT / 'newton_schulz.json'}")


if __name__ == "__main__":
    main()
