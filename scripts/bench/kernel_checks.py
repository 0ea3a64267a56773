"""Whether products are right, beside torch's in fp32 or fp64: what ``make gpu`` asks of every kernel."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_eopt.kernels.precision import in_precision
from megatron_eopt.kernels.products import Fp32Precision, Products

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
