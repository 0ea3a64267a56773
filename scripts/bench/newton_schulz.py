"""Time orthogonalization against its public peers on the same matrices, in one run: a part of ``make bench``.

On a GPU, where there is one, at full size and in medium precision; else on the CPU in fp32. Every contestant gets the
same matrices in fp32, in turn. The table has the median of the rounds with the least and the most, the precision of
products, how many times as fast as emerging-optimizers it is, what it computes per second for the operations of its
form, the share of this machine's matmul rate, and the error against its own polynomial in fp64. A peer that is not
installed is left out.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from models import NEWTON_SCHULZ
from timing import Load, in_turns, machine, matmul_rate, parser_of, write
from torch import Tensor

from megatron_eopt.kernels.choice import products_for
from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize import get_coefficients, newton_schulz
from megatron_eopt.orthogonalize.forms import PRESETS, gram_flops, restarts_for, standard_flops

PEER = "emerging-optimizers"
SYRK_ROWS = 5000  # from which its kernel tunes few tiles: for smaller ones it compiles some 180 kernels a shape


class Contestant(NamedTuple):
    """What orthogonalizes a matrix or a stack in fp32."""

    function: Callable[[Tensor], Tensor]
    coefficients: str
    extra: int  # restarts beyond the default; -1 for the standard form
    precision: str  # of products


def precision_on(device: torch.device) -> MatmulPrecision:
    """Of our products."""
    return "medium" if device.type == "cuda" else "highest"


def torch_muon(x: Tensor) -> Tensor:
    """The iteration of torch.optim.Muon, in bf16; it takes one matrix."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function of one matrix to every matrix of a stack."""
    return lambda x: function(x) if x.ndim == 2 else torch.stack([function(matrix) for matrix in x])


def peers(device: torch.device, shape: tuple[int, ...]) -> dict[str, Contestant]:
    """Those that are installed."""
    precision = precision_on(device)
    found: dict[str, Contestant] = {}
    with suppress(ImportError):
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz as emerging

        def peer(x: Tensor, use_syrk: bool = False) -> Tensor:
            with fp32_products(precision, as_torch=True):  # by which it chooses its dtype
                return emerging(x, 5, use_syrk=use_syrk)

        has = "bf16" if precision == "medium" else "fp32"
        found[PEER] = Contestant(each(peer), "quintic", -1, has)
        if len(shape) == 3:
            found[f"{PEER}, its batch"] = Contestant(peer, "quintic", -1, has)
        elif device.type == "cuda" and min(shape) >= SYRK_ROWS:
            found[f"{PEER}, syrk"] = Contestant(partial(peer, use_syrk=True), "quintic", -1, has)
    with suppress(ImportError):
        from gram_newton_schulz import GramNewtonSchulz

        settings: dict[str, Any] = {} if device.type == "cuda" else {"ns_use_kernels": False}
        settings["gram_newton_schulz_reset_iterations"] = list(restarts_for("quintic", 5, precision) or ())
        theirs = GramNewtonSchulz(ns_coefficients=[list(abc) for abc in get_coefficients("quintic", 5)], **settings)
        found["gram-newton-schulz"] = Contestant(theirs, "quintic", 0, "fp16")
    found["torch.optim.Muon"] = Contestant(each(torch_muon), "simple", -1, "bf16")
    return found


def ours(device: torch.device) -> dict[str, Contestant]:
    """This package in its forms, presets and precisions."""
    precision = precision_on(device)

    def made(kind: str, extra: int, precision: MatmulPrecision = precision, **settings: Any) -> Contestant:
        half = "fp16" if extra >= 0 and device.type == "cuda" else "bf16"
        function = partial(newton_schulz, fp32_matmul_prec=precision, **settings)
        return Contestant(function, kind, extra, half if precision == "medium" else "fp32")

    found = {"ours, standard": made("quintic", -1, form="standard")}
    for preset, (kind, _, extra) in PRESETS.items():
        found[f"ours, {preset}"] = made(kind, extra, preset=preset)
    if precision == "medium":
        return found | {"ours, highest": made("quintic", 0, "highest")}
    return found | {"ours, medium": made("quintic", -1, "medium")}


def flops(device: torch.device, shape: tuple[int, ...], one: Contestant) -> float:
    """Operations of the form that is taken, every product counted whole."""
    rows, cols = sorted(shape[-2:])
    schedule = get_coefficients(one.coefficients, 5)
    count = standard_flops(rows, cols, schedule)
    if one.extra >= 0:
        of_gram = torch.float16 if device.type == "cuda" else torch.float32
        share = products_for(None, device, of_gram, precision_on(device)).share(rows)
        restarts = restarts_for(one.coefficients, 5, precision_on(device), one.extra)
        if restarts is not None:
            cheaper = gram_flops(rows, cols, schedule, restarts, share) < standard_flops(rows, cols, schedule, share)
            count = gram_flops(rows, cols, schedule, restarts) if cheaper else count
    return count * (shape[0] if len(shape) == 3 else 1)


def exact(x: Tensor, coefficient_type: str) -> Tensor:
    """The same polynomial in fp64, by the formula."""
    X = x.double()
    X = X.mT if X.size(-2) > X.size(-1) else X
    X = X / torch.linalg.matrix_norm(X, keepdim=True)
    for a, b, c in get_coefficients(coefficient_type, 5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X if X.shape == x.shape else X.mT


def off(found: Tensor, expected: Tensor) -> float:
    """The relative error in Frobenius norm; not a number where an entry is none."""
    return (torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected)).item()


def measure(device: torch.device, shape: tuple[int, ...], rate: float, rounds: int) -> list[dict[str, Any]]:
    """Print and return a row of each contestant."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    everyone = peers(device, shape) | ours(device)
    times = in_turns({name: partial(one.function, x) for name, one in everyone.items()}, rounds, device)
    references = {kind: exact(x, kind) for kind in {one.coefficients for one in everyone.values()}}
    print(f"  {'':32} {'':4} {'ms':>24} {'times as fast':>14} {'TFLOP/s':>8} {'of matmul rate':>15} {'error':>9}")
    rows = []
    for name, one in everyone.items():
        seconds = times[name].median
        computed = flops(device, shape, one) / seconds
        ratio = times[PEER].median / seconds if PEER in times else None
        error = off(one.function(x), references[one.coefficients])
        speed = f"{'-' if ratio is None else f'{ratio:.2f}':>14} {computed / 1e12:8.2f} {computed / rate:15.0%}"
        print(f"  {name:32} {one.precision:4} {times[name].words('.2f'):>24} {speed} {error:9.1e}", flush=True)
        figures = {"ratio": ratio, "flops": computed, "share": computed / rate, "error": error}
        rows.append({"contestant": name, "precision": one.precision, "seconds": times[name], **figures})
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--only", default="", metavar="WORD", help="shapes whose names have it")
    arguments = parser.parse_args()
    load = Load(torch.get_num_threads(), arguments.any_load)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rate = matmul_rate(device, dtype)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()
    print(f"{where}: {dtype} matmul {rate / 1e9:.0f} GFLOP/s; precision {precision_on(device)} unless said")
    found = {}
    for name, shape in NEWTON_SCHULZ[device.type].items():
        if arguments.only in name:
            print(f"\n{name}: {' x '.join(map(str, shape))}")
            found[name] = measure(device, shape, rate, arguments.rounds)
            load.check()
    print(f"\n{load.words}")
    write("newton_schulz", {"machine": where, "load": load.words, "matmul rate": rate, "shapes": found})


if __name__ == "__main__":
    main()
