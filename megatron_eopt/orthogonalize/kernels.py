"""Which kernel computes symmetric products: the fastest correct one.

It is chosen once, on all ranks, and kept in the checkpoint: another one rounds differently. A choice is a text, a name
perhaps with tiles, or several by the rows of the products: ``torch, triton/128x64x8x4x3 from 2048``.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.precision import in_precision
from megatron_eopt.orthogonalize.products import Blocked, Fp32Precision, Products

Shapes = Sequence[tuple[int, ...]]  # of matrices (rows, cols) or stacks of them (n, rows, cols)

# Error of an entry, relative to itself (two units in the last place) and to the largest entry (sums of up to 1e5
# terms, which tensor cores cut off instead of rounding).
_TOLERANCES = {
    torch.float16: (2.0**-10, 2.0**-12),
    torch.bfloat16: (2.0**-7, 2.0**-12),
    torch.float32: (2.0**-22, 2.0**-16),
    torch.float64: (2.0**-51, 2.0**-45),
}
_TF32_TOLERANCE = (2.0**-9, 2.0**-10)

MOST_ENTRIES = 2**26  # of the factors of a check, but for square ones
KEPT = 128  # columns left out are a multiple of it: what is left ends inside a tile where the whole does


@dataclass(frozen=True)
class Kernel:
    """One way to compute symmetric products."""

    make: Callable[..., Products]  # of a precision of fp32 products, and of tiles if the choice has them
    missing: Callable[[torch.device], str | None] = lambda device: None  # why it cannot run on a device
    # whether it is tried unasked
    suits: Callable[[Shapes, torch.dtype, torch.device], bool] = lambda shapes, dtype, device: True


Dtypes = Sequence[torch.dtype]


class Choice(NamedTuple):
    """The kernel that was chosen."""

    kernel: str  # the text that a checkpoint keeps
    dropped: Mapping[str, str]  # kernels that failed on any rank, with the reason


def _make_triton(fp32_precision: Fp32Precision, *tiles: int) -> Products:
    from megatron_eopt.orthogonalize.triton_kernel import Tiles, Triton

    return Triton(fp32_precision, Tiles(*tiles) if tiles else None)


def _triton_missing(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        from megatron_eopt.orthogonalize.triton_kernel import INTERPRETED

        return None if INTERPRETED else "no GPU: the matrices are on the CPU"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"no GPU that triton can use: the matrices are on {device.type!r}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, and 8.0 is needed"


def _suits_blocked(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> bool:
    large = any(min(shape[-2:]) >= Blocked.smallest for shape in shapes)
    return device.type == "cpu" and dtype == torch.float32 and large


# The fastest first. The reference is what the others are checked against; it is always there.
KERNELS: dict[str, Kernel] = {
    "triton": Kernel(
        _make_triton, _triton_missing, lambda shapes, dtype, device: device.type != "cpu" and dtype != torch.float64
    ),
    "blocked": Kernel(lambda fp32_precision: Blocked(), suits=_suits_blocked),
    "torch": Kernel(lambda fp32_precision: Products()),
}
REFERENCE = "torch"


def choose(
    shapes: Shapes,
    dtype: torch.dtype | Dtypes,
    device: torch.device | str,
    *,
    kernel: str | None = None,
    kept: str | None = None,
    timed: str | None = None,
    fp32_precision: Fp32Precision = "ieee",
    agree: Callable[[Tensor], Tensor] | None = None,
    take_turns: Callable[[Callable[[], list[str | None]]], list[str | None]] = lambda check: check(),
) -> Choice:
    """Choose the kernel for ``shapes``, the same on every rank.

    A kernel that is missing, raises or gives wrong numbers on any rank is dropped on all; the rank that found it warns.
    ``kernel``, or else ``kept``, that of the checkpoint, replaces the first that serves: a ``RuntimeError`` on all
    ranks if it cannot serve on one, a ``ValueError`` if ``kernel`` is unknown. Without them ``timed``, the fastest, is
    tried first, and then torch. ``fp32_precision`` is for kernels that do not follow torch's setting. ``agree``, called
    once, takes the element-wise minimum over the ranks of an int32 tensor on the CPU; ``take_turns`` calls what checks
    kernels, and so compiles them.
    """
    if kernel is not None:
        _entries(kernel)
    device = torch.device(device)
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else dtype
    asked = kept if kernel is None else kernel
    if asked is None and timed is not None:
        names = tried = list(dict.fromkeys((timed, REFERENCE)))
    elif asked is None:
        names = list(KERNELS)
        tried = [name for name in names if all(KERNELS[name].suits(shapes, x, device) for x in dtypes)]
    else:
        names = tried = [asked]
    checked = [name for name in tried if name != REFERENCE]
    found = take_turns(lambda: [reason_against(name, shapes, dtypes, device, fp32_precision) for name in checked])
    reasons = {name: reason for name, reason in zip(checked, found, strict=True) if reason}
    serves = torch.tensor([name in tried and name not in reasons for name in names]).int()
    if agree is not None:
        serves = agree(serves)
    agreed = [name for name, on_all in zip(names, serves.tolist(), strict=True) if on_all]
    dropped = {name: reasons.get(name, "it fails on another rank") for name in tried if name not in agreed}
    if asked in dropped:
        hint = "without a name (symmetric_products, --muon-use-syrk) the fastest that serves is taken"
        if kernel is None:
            hint = (
                "it is the kernel of the checkpoint, and with another one the run would not go on bit-equal: resume "
                "where it can serve, or name one that serves here as symmetric_products"
            )
        raise RuntimeError(f"the kernel {asked!r} of symmetric products cannot serve: {dropped[asked]}; {hint}")
    chosen = agreed[0]
    for name, reason in reasons.items():
        warnings.warn(f"symmetric products: {name} is dropped, {chosen} serves: {reason}", stacklevel=2)
    return Choice(chosen, dropped)


def made(choice: str, rows: int, fp32_precision: Fp32Precision = "ieee") -> Products:
    """What computes (rows x rows) products, by a choice."""
    serving = [entry for entry in _entries(choice) if entry.least <= rows]
    return serving[-1].kernel.make(fp32_precision, *serving[-1].tiles)


class _Entry(NamedTuple):
    least: int  # rows from which it serves
    kernel: Kernel
    tiles: list[int]


def _entries(choice: str) -> list[_Entry]:
    """The kernels of a choice, ascending."""
    entries: list[_Entry] = []
    for entry in choice.split(", "):
        found = re.fullmatch(r"(\w+)(?:/((?:\d+x){4}\d+))?(?: from (\d+))?", entry)
        if not found or found[1] not in KERNELS or bool(found[3]) != bool(entries):
            raise ValueError(f"unknown kernel {choice!r} of symmetric products: expected one of {', '.join(KERNELS)}")
        tiles = [int(number) for number in found[2].split("x")] if found[2] else []
        entries.append(_Entry(int(found[3] or 0), KERNELS[found[1]], tiles))
    return entries


def reason_against(
    choice: str,
    shapes: Shapes,
    dtypes: Dtypes,
    device: torch.device,
    precision: Fp32Precision,
) -> str | None:
    """Why a choice cannot serve on this rank, or None."""
    try:
        for entry in _entries(choice):
            reason = entry.kernel.missing(device)
            if reason:
                return reason
        for shape in shapes:
            products = made(choice, min(shape[-2:]), precision)
            for dtype in dtypes:
                reason = check(products, [shape], dtype, device, fp32_precision=precision)
                if reason:
                    return reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def check(
    products: Products,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    fp32_precision: Fp32Precision = "ieee",
) -> str | None:
    """Why products, or matrices over their norms, are wrong, or None.

    ``|got - expected| <= u |expected| + v max|expected|`` for every entry of a product, with ``u`` and ``v`` of the
    table above.
    """
    device = torch.device(device)
    tf32 = dtype == torch.float32 and fp32_precision == "tf32"
    relative, absolute = _TF32_TOLERANCE if tf32 else _TOLERANCES[dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape in dict.fromkeys(map(_checked, shapes)):
        if 0 in shape:
            continue
        for name, multiply, matrices in _trials(shape, dtype, device):
            short = min(shape[-2:])
            out = torch.empty((*shape[:-2], short, short), dtype=dtype, device=device)
            with in_precision(dtype, "high" if tf32 else "highest"):
                for _ in range(2):  # a kernel may launch otherwise what it has launched before
                    out.fill_(torch.nan)  # so that an entry that is not written is wrong
                    got = multiply(products, out, *matrices)
            if got is not out:
                return f"{name} of {shape} in {dtype} is not written to out"
            with in_precision(wide, "highest"):
                expected = multiply(Products(), None, *(matrix.to(wide) for matrix in matrices))
            error = (got.to(wide) - expected).abs()
            largest = expected.abs().max()
            if not bool((error <= relative * expected.abs() + absolute * largest).all()):
                off = (error.max() / largest).item()
                return f"{name} of {shape} in {dtype} is off by {off:.1e} of the largest entry"
        if dtype.itemsize == 2 and (reason := _wrong_norms(products, shape, dtype, device)):
            return reason
    return None


def _wrong_norms(
    products: Products,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why matrices over their norms are wrong, or None."""
    x = _random(shape, device, seed=1).bfloat16()
    length = torch.linalg.vector_norm(x.float(), dim=(-2, -1), keepdim=True)
    found = products.normalized(x, dtype, unit=16.0)
    expected = x / length
    relative, _ = _TOLERANCES[dtype]
    bound = relative * expected.abs() + 2.0**-27
    if not bool(((found.float() / 16 - expected).abs() <= bound).all()):
        return f"matrices over their norms, of {shape} in {dtype}, are wrong"
    return None


def _random(shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """As the iterations take it: the short side first, without a copy."""
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return x.mT if x.size(-2) > x.size(-1) else x


def _checked(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A stack of two, with as many columns as have room."""
    stack = [min(2, n) for n in shape[:-2]]
    short, long = sorted(shape[-2:])
    most = max(short, MOST_ENTRIES // max(1, short * math.prod(stack)))
    if long > most:
        long -= math.ceil((long - most) / KEPT) * KEPT
    if shape[-2] > shape[-1]:
        return (*stack, long, short)
    return (*stack, short, long)


def _trials(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]]:
    x = _random(shape, device, seed=0)
    x = x.div_(math.sqrt(x.size(-1)))  # rows of norm 1: squares of 65504 columns would overflow fp16
    a = (x @ x.mT).to(dtype).tril()
    a = a + a.tril(-1).mT
    # with a diagonal of ones, b = a / 2 + 1 / 4 is exact in every dtype: the two commute to the last bit
    a.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    b = a / 2
    b.diagonal(dim1=-2, dim2=-1).fill_(0.75)
    c = a.flip(-2, -1)

    def gram(products: Products, out: Tensor | None, x: Tensor) -> Tensor:
        return products.gram(x, out)

    def addmm(
        products: Products,
        out: Tensor | None,
        c: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> Tensor:
        return products.addmm(c, a, b, beta=-1.5, alpha=0.75, out=out)

    def square(products: Products, out: Tensor | None, r: Tensor) -> Tensor:
        return products.addmm(
            r,
            r,
            r,
            beta=-4.775 / 2**14,
            alpha=2.0315 / 2**28,
            out=out,
        )

    yield "X X^T", gram, (x.to(dtype),)
    yield "beta C + alpha A B", addmm, (c, a, b)
    if dtype == torch.float16:  # the Gram form's numbers, of norm near 2^14: their sums overflow anything but fp32
        u = x[..., :1] / 2
        u[..., 0, :] = 0.85
        yield "beta R + alpha R^2", square, ((2**14 * u * u.mT).to(dtype),)
