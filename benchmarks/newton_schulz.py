"""Time orthogonalization against its public peers on the same matrices, in one run: a part of ``make bench``.

On the CPU in fp32, and on a GPU, where there is one, at full size and in medium precision.

Every contestant gets the same matrices, in turn, several times; the medians are compared. The table has, for each: how
many times as fast as emerging-optimizers it is, the share of this machine's measured matmul rate that it reaches for
the operations of its form, and its error against its own polynomial in fp64. The same goes to bench-out/ as JSON and as
a picture.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz as emerging
from torch import Tensor

from megatron_eopt.orthogonalize import get_coefficients, newton_schulz
from megatron_eopt.orthogonalize.forms import PRESETS, gram_flops, restarts_for, standard_flops
from megatron_eopt.orthogonalize.kernels import choose, made
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.products import Products

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OUT = Path(__file__).resolve().parent.parent / "bench-out"

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

GPU_SHAPES = {
    "square": (4096, 4096),
    "Llama-3 8B gate, up, down": (14336, 4096),
    "Llama-3 8B k, v": (1024, 4096),
    "Llama-3 70B gate, up, down": (28672, 8192),
    "aspect 7": (28672, 4096),
    "Qwen3-30B-A3B q": (4096, 2048),
    "128 experts": (128, 768, 2048),
}


@dataclass(frozen=True)
class Setup:
    """Where it runs, and how products of fp32 matrices are computed: in fp32 on the CPU, in half precision on a GPU."""

    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device.type == "cuda"

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
        """What peers are given, and what the machine's rate is measured in."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def products(self, shape: tuple[int, ...]) -> Products:
        """What an optimizer would choose at start."""
        dtypes = (torch.float16, torch.bfloat16) if self.on_gpu else (torch.float32,)
        return made(choose([shape], dtypes, self.device).kernel, min(shape[-2:]))


@dataclass(frozen=True)
class Row:
    """One contestant on one shape."""

    device: str
    matrices: str
    shape: tuple[int, ...]
    contestant: str
    milliseconds: float
    ratio: float
    rate: float
    error: float


def torch_muon(x: Tensor) -> Tensor:
    """The iteration of torch.optim.Muon, in bf16; it takes one matrix."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function of one matrix to every matrix of a stack."""
    return lambda x: function(x) if x.ndim == 2 else torch.stack([function(matrix) for matrix in x])


def contestants(setup: Setup, shape: tuple[int, ...]) -> dict[str, tuple[Callable[[Tensor], Tensor], str, int]]:
    """Name -> function, its coefficient set, and restarts beyond the default (-1 for the standard form)."""
    products = setup.products(shape)

    def ours(**settings: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: newton_schulz(x, **{"fp32_matmul_prec": setup.precision, "products": products, **settings})

    def peer(x: Tensor) -> Tensor:
        return emerging(x.to(setup.dtype), 5)

    other: MatmulPrecision = "highest" if setup.on_gpu else "medium"
    return {
        "emerging-optimizers": (each(peer), "quintic", -1),
        "emerging-optimizers, its batch": (peer, "quintic", -1),
        "torch.optim.Muon (bf16)": (each(torch_muon), "simple", -1),
        "ours, standard": (ours(form="standard"), "quintic", -1),
        **{f"ours, {preset}": (ours(preset=preset), name, extra) for preset, (name, _, extra) in PRESETS.items()},
        f"ours, {other}": (ours(fp32_matmul_prec=other, products=None), "quintic", 0 if setup.on_gpu else -1),
    }


def medians(functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median wall-clock seconds of each function, called in turn, after one call that does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def flops(setup: Setup, shape: tuple[int, ...], coefficient_type: str, extra: int) -> float:
    """Operations of the form that is taken, every product counted whole."""
    rows, cols = sorted(shape[-2:])
    schedule = get_coefficients(coefficient_type, 5)
    count = standard_flops(rows, cols, schedule)
    if extra >= 0:
        restarts = restarts_for(coefficient_type, 5, extra)
        share = setup.products(shape).share(rows)
        if restarts is not None:
            cheaper = gram_flops(rows, cols, schedule, restarts, share) < standard_flops(rows, cols, schedule, share)
            count = gram_flops(rows, cols, schedule, restarts) if cheaper else count
    return count * (shape[0] if len(shape) == 3 else 1)


def matmul_rate(setup: Setup) -> float:
    """Operations per second of a product of two large matrices."""
    rows = 8192 if setup.on_gpu else 2048
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
    if len(shape) == 2:
        del everyone["emerging-optimizers, its batch"]
    calls = {key: lambda f=f: f(x) for key, (f, _, _) in everyone.items()}
    seconds = medians(calls, rounds, setup.device)
    references = {kind: exact(x, kind) for kind in {kind for _, kind, _ in everyone.values()}}
    rows = []
    for key, (function, coefficient_type, extra) in everyone.items():
        reference = references[coefficient_type]
        error = torch.linalg.vector_norm(function(x).double() - reference) / torch.linalg.vector_norm(reference)
        reached = flops(setup, shape, coefficient_type, extra) / seconds[key] / rate
        ratio = seconds["emerging-optimizers"] / seconds[key]
        rows.append(Row(setup.device.type, name, shape, key, seconds[key] * 1e3, ratio, reached, error.item()))
    return rows


def draw(rows: list[Row], picture: Path) -> None:
    """Bars of the ratios, one group for each shape."""
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


def run(setup: Setup, rounds: int) -> tuple[dict[str, Any], list[Row]]:
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
        print(f"  {'':32} {'ms':>8} {'times as fast':>14} {'of matmul rate':>15} {'error':>9}")
        for row in measure(setup, name, shape, rate, rounds):
            rows.append(row)
            print(f"  {row.contestant:32} {row.milliseconds:8.2f} {row.ratio:14.2f} {row.rate:15.0%} {row.error:9.1e}")
    return machine, rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Time Newton-Schulz against its public peers where this runs.")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each contestant (default: %(default)s)")
    rounds = parser.parse_args().rounds
    OUT.mkdir(exist_ok=True)
    found = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        machine, rows = run(Setup(torch.device(device)), rounds)
        found.append({"machine": machine, "rows": [asdict(row) for row in rows]})
        draw(rows, OUT / f"newton_schulz_{device}.png")
        print(f"\nWritten: {OUT / f'newton_schulz_{device}.png'}\n")
    (OUT / "newton_schulz.json").write_text(json.dumps(found, indent=1))
    print(f"Written: {OUT / 'newton_schulz.json'}")


if __name__ == "__main__":
    main()
