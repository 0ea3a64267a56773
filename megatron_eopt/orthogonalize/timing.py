"""The fastest kernel for each size, timed at start."""

import time
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.kernels import Shapes, made, reason_against
from megatron_eopt.orthogonalize.precision import in_precision
from megatron_eopt.orthogonalize.products import Fp32Precision

_TILES = ("64x64x8x4x3", "128x32x8x4x4", "128x64x8x4x3", "128x64x8x8x3")
CANDIDATES = ("torch", "triton", *(f"triton/{tiles}" for tiles in _TILES))  # tiles in 16 bits only

_SIZES = 20  # each begins at a power of two
MOST_ENTRIES = 2**27  # of a stack that is timed
_RUNS = _ROUNDS = 5


def is_timed(device: torch.device) -> bool:
    """Whether kernels are timed on a device."""
    return device.type == "cuda"


def times(
    stacks: Shapes,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    fp32_precision: Fp32Precision = "ieee",
) -> Tensor:
    """Seconds of each candidate: (sizes x candidates), fp64, on CPU.

    Those of one short side are added; 0 if not timed (fp64), infinity, with a warning, if a candidate cannot serve or
    an error ends it: other ranks wait for this one's times.
    """
    found = torch.zeros(_SIZES, len(CANDIDATES), dtype=torch.float64)
    if torch.float64 in dtypes:
        return found
    warned = set[str]()
    for shape, dtype, (i, name) in product(stacks, dtypes, enumerate(CANDIDATES)):
        if "/" in name and dtype == torch.float32:
            continue
        reason = None
        taken = torch.inf
        if i > 0:  # the first is the reference
            reason = reason_against(name, [shape], [dtype], device, fp32_precision)
        if reason is None:
            try:
                taken = _time(name, shape, dtype, device, fp32_precision)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        size = min(shape[-2:]).bit_length() - 1
        found[size, i] += taken
        if reason is None:
            continue
        torch.cuda.empty_cache()  # of what had no room
        if reason not in warned:
            warned.add(reason)
            warnings.warn(f"symmetric products: {name} is dropped: {reason}", stacklevel=2)
    return found


def fastest(times: Tensor) -> str | None:
    """The fastest choice for each size that was timed."""
    chosen: list[str] = []
    last = ""
    for size, of_size in enumerate(times.tolist()):
        timed = [(taken, i) for i, taken in enumerate(of_size) if taken]
        if not timed:
            continue
        _, quickest = min(timed)
        if CANDIDATES[quickest] != last:
            last = CANDIDATES[quickest]
            chosen.append(f"{last} from {2**size}" if chosen else last)
    return ", ".join(chosen) or None


def _time(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    precision: Fp32Precision,
) -> float:
    short, long = sorted(shape[-2:])
    stack = [min(n, max(1, MOST_ENTRIES // (short * long))) for n in shape[:-2]]
    numbers = torch.Generator(device).manual_seed(0)
    x = torch.empty(*stack, short, long, dtype=dtype, device=device).normal_(generator=numbers)
    r = torch.empty(*stack, short, short, dtype=dtype, device=device).normal_(generator=numbers)
    products = made(name, short, precision)
    gram = torch.empty_like(r)
    out = torch.empty_like(r)

    def run() -> None:
        products.addmm(r, r, products.gram(x, gram), beta=0.5, alpha=0.5, out=out)

    with in_precision(dtype, "high" if precision == "tf32" else "highest"):
        return seconds(run, device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one run, after a round of warm-up."""
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(_RUNS):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start) / _RUNS)
    return median(taken[1:])
