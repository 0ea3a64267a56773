"""The fastest kernel for each size, timed at start."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.kernels import Shapes, made, reason_against
from megatron_eopt.orthogonalize.precision import in_precision
from megatron_eopt.orthogonalize.products import Fp32Precision

_TILES = ("64x64x8x4x3", "128x32x8x4x4", "128x64x8x4x3", "128x64x8x8x3")
# Tiles in 16 bits only, where those of the fixed table are among them.
CANDIDATES = ("torch", "triton", *(f"triton/{tiles}" for tiles in _TILES))

_SIZES = 20  # each begins at a power of two
MOST_ENTRIES = 2**27  # of a stack that is timed
_RUNS = _ROUNDS = 5
_LEAST_SHARE = 1e-3  # of all operations: sizes with less are not timed
_QUIET = 2.0  # seconds after which it is told what takes time


def is_timed(device: torch.device) -> bool:
    """Whether kernels are timed on a device."""
    return device.type == "cuda"


def times(
    stacks: Shapes,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    fp32_precision: Fp32Precision = "ieee",
    tell: Callable[[str], object] = lambda message: None,
) -> Tensor:
    """Seconds of each candidate: (sizes x candidates), fp64, on CPU.

    Those of one short side are added; 0 if not timed (fp64), infinity, with a warning, if a candidate cannot serve or
    an error ends it: other ranks wait for this one's times. Each candidate is compiled for each dtype, which takes most
    of the time: of dtypes with as many bytes one is timed, which serves the others as well. ``tell`` gets a line if
    this takes long.
    """
    found = torch.zeros(_SIZES, len(CANDIDATES), dtype=torch.float64)
    if torch.float64 in dtypes:
        return found
    warned = set[str]()
    started = time.perf_counter()
    told = False
    stacks = _deciding(stacks)
    of_each_size = {dtype.itemsize: dtype for dtype in dtypes}
    for shape, dtype, (i, name) in product(stacks, of_each_size.values(), enumerate(CANDIDATES)):
        if dtype == torch.float32:
            if "/" in name:
                continue
        elif name == "triton":
            continue
        if not told and time.perf_counter() - started > _QUIET:
            told = True
            tell(
                f"kernels of symmetric products are compiled and timed, {len(CANDIDATES) - 1} for each of "
                f"{len(stacks)} shapes; later starts find them in Triton's cache"
            )
        reason = None
        taken = torch.inf
        if i > 0:  # the first is the reference
            reason = reason_against(name, [shape], [dtype], device, fp32_precision)
        if reason is None:
            try:
                taken = _time(name, shape, dtype, device, fp32_precision)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        found[_size(shape), i] += taken
        if reason is None:
            continue
        torch.cuda.empty_cache()  # of what had no room
        if reason not in warned:
            warned.add(reason)
            warnings.warn(f"symmetric products: {name} is dropped: {reason}", stacklevel=2)
    return found


def _deciding(stacks: Shapes) -> Shapes:
    """The stacks of sizes that have a share of the operations worth choosing a kernel for."""
    of_stacks = [math.prod(shape) * min(shape[-2:]) for shape in stacks]
    of_sizes = Counter[int]()
    for shape, operations in zip(stacks, of_stacks, strict=True):
        of_sizes[_size(shape)] += operations
    least = _LEAST_SHARE * of_sizes.total()
    return [shape for shape in stacks if of_sizes[_size(shape)] >= least]


def _size(shape: Sequence[int]) -> int:
    """The index of a short side: its power of two."""
    return min(shape[-2:]).bit_length() - 1


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
