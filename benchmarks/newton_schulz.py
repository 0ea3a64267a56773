"""Time orthogonalization against its public peers on the same matrices, in one run: ``make bench``.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz as emerging
from torch import Tensor

from megatron_eopt.orthogonalize import get_coefficients, newton_schulz
from megatron_eopt.orthogonalize.form import choose_form, gram_flops, standard_flops
from megatron_eopt.orthogonalize.restarts import PRESETS, Preset, restarts_for
from megatron_eopt.orthogonalize.symmetric import default_products

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OUT = Path(__file__).resolve().parent.parent / "bench-out"

# Layers of Llama-3 8B and 70B and of Qwen3-30B-A3B at an eighth of their width (a sixteenth for 70B), for a CPU.
SHAPES = {
    "square": (1024, 1024),
    "Llama-3 8B gate, up, down / 8": (1792, 512),
    "Llama-3 8B k, v / 8": (128, 512),
    "Llama-3 70B gate, up, down / 16": (1792, 512),
    "aspect 7": (3584, 512),
    "Qwen3-30B-A3B q / 8": (512, 256),
    "64 experts": (64, 128, 64),
    "128 experts": (128, 96, 256),
}


@dataclass(frozen=True)
class Row:
    """One contestant on one shape."""

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


def contestants() -> dict[str, tuple[Callable[[Tensor], Tensor], str, Preset | None]]:
    """Name -> function, its coefficient set, and the preset where it is ours."""
    ours = {
        f"ours, {preset}": (lambda x, preset=preset: newton_schulz(x, preset=preset), PRESETS[preset][0], preset)
        for preset in PRESETS
    }
    return {
        "emerging-optimizers": (each(lambda x: emerging(x, 5)), "quintic", None),
        "emerging-optimizers, its batch": (lambda x: emerging(x, 5), "quintic", None),
        "torch.optim.Muon (bf16)": (each(torch_muon), "simple", None),
        "ours, standard": (lambda x: newton_schulz(x, form="standard"), "quintic", None),
        **ours,
        "ours, medium (bf16)": (lambda x: newton_schulz(x, fp32_matmul_prec="medium"), "quintic", None),
    }


def medians(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median wall-clock seconds of each function, called in turn, after one call that does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def flops(shape: tuple[int, ...], coefficient_type: str, preset: Preset | None) -> float:
    """Operations of the form that is taken, every product counted whole."""
    rows, cols = sorted(shape[-2:])
    schedule = get_coefficients(coefficient_type, 5)
    count = standard_flops(rows, cols, schedule)
    if preset is not None:
        restarts = restarts_for(coefficient_type, 5, extra=PRESETS[preset][2])
        share = default_products(torch.device("cpu"), torch.float32).share(rows)
        if restarts is not None and choose_form(rows, cols, schedule, restarts, share) == "gram":
            count = gram_flops(rows, cols, schedule, restarts)
    return count * (shape[0] if len(shape) == 3 else 1)


def matmul_rate() -> float:
    """Operations per second of an fp32 product of two matrices of 2048."""
    x = torch.randn(2048, 2048)
    return 2 * 2048**3 / medians({"x": lambda: x @ x}, 5)["x"]


def exact(x: Tensor, coefficient_type: str) -> Tensor:
    """The same polynomial of the singular values, in fp64."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for a, b, c in get_coefficients(coefficient_type, 5):
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vh


def measure(name: str, shape: tuple[int, ...], rate: float, rounds: int) -> list[Row]:
    """Every contestant on one shape."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    everyone = contestants()
    if len(shape) == 2:
        del everyone["emerging-optimizers, its batch"]
    seconds = medians({key: lambda f=f: f(x) for key, (f, _, _) in everyone.items()}, rounds)  # type: ignore[misc]
    rows = []
    for key, (function, coefficient_type, preset) in everyone.items():
        reference = exact(x, coefficient_type)
        error = torch.linalg.vector_norm(function(x).double() - reference) / torch.linalg.vector_norm(reference)
        reached = flops(shape, coefficient_type, preset) / seconds[key] / rate
        ratio = seconds["emerging-optimizers"] / seconds[key]
        rows.append(Row(name, shape, key, seconds[key] * 1e3, ratio, reached, error.item()))
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


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Time Newton-Schulz against its public peers on this CPU.")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each contestant (default: %(default)s)")
    rounds = parser.parse_args().rounds
    OUT.mkdir(exist_ok=True)
    rate = matmul_rate()
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads of {platform.processor() or 'a CPU'}"
    print(f"{machine}, fp32 matmul {rate / 1e9:.0f} GFLOP/s; fp32 products unless said")
    rows = []
    for name, shape in SHAPES.items():
        print(f"\n{name}: {' x '.join(map(str, shape))}")
        print(f"  {'':32} {'ms':>8} {'times as fast':>14} {'of matmul rate':>15} {'error':>9}")
        for row in measure(name, shape, rate, rounds):
            rows.append(row)
            print(f"  {row.contestant:32} {row.milliseconds:8.2f} {row.ratio:14.2f} {row.rate:15.0%} {row.error:9.1e}")
    found = {"machine": machine, "matmul_gflops": rate / 1e9, "rows": [asdict(row) for row in rows]}
    (OUT / "newton_schulz.json").write_text(json.dumps(found, indent=1))
    draw(rows, OUT / "newton_schulz.png")
    print(f"\nWritten: {OUT / 'newton_schulz.json'} and {OUT / 'newton_schulz.png'}")


if __name__ == "__main__":
    main()
