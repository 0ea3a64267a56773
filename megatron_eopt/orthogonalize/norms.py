"""Norms of matrices, and quotients by them, of entries of any size."""

import torch
from torch import Tensor


def nonzero(norm: Tensor) -> Tensor:
    """1 in place of zeros, without asking the device."""
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def scaled(
    x: Tensor, propagate_nan: bool = True, dtype: torch.dtype | None = None, own: bool = False
) -> tuple[Tensor, Tensor]:
    """Divide matrices by powers of two near their 1-norms.

    The division is exact. Squares of entries below 1e-19 vanish in fp32, above 1e19 they overflow: afterwards none that
    matters does. Without ``propagate_nan`` a matrix that is not finite becomes zero; with ``own`` the result may take
    the memory of ``x``, which has an entry at least. Returns a contiguous tensor in ``dtype``, fp32 (fp64 for an fp64
    ``x``) by default, and the divisors, (1 x 1) or (n x 1 x 1) in that default: not finite where an entry is not.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = torch.linalg.vector_norm(x, 1, dim=(-2, -1), keepdim=True, dtype=wide)
    # of its bits those of the exponent, but for zero those of the smallest power
    integer, exponent, least = _POWERS[wide]
    power = sums.view(integer).bitwise_and_(exponent).clamp_(min=least).view(wide)
    dtype = dtype or wide
    taken = x if own and x.dtype == dtype and x.is_contiguous() else torch.empty(x.shape, dtype=dtype, device=x.device)
    result = torch.div(x, power, out=taken)
    if not propagate_nan:
        bad = ~power.isfinite()
        # a CPU has the answer at once, and a pass over the matrix takes longer than the question
        if x.device.type != "cpu" or bad.any():
            result.masked_fill_(bad, 0)
    return result, power


# By dtype an integer of its size, the bits of its exponent, and those of its smallest normal number.
_POWERS = {
    torch.float64: (torch.int64, 0x7FF0000000000000, 0x0010000000000000),
    torch.float32: (torch.int32, 0x7F800000, 0x00800000),
}


def scaled_with_norm(
    x: Tensor, dtype: torch.dtype, propagate_nan: bool = True, own: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`scaled` for products in ``dtype``; norms before divisors.

    A norm is that of the scaled matrix. The product with its divisor may exceed fp32.
    """
    # what is in bf16, and shall have 16 bits again, needs no more in between
    narrow = x.dtype == torch.bfloat16 and dtype.itemsize == 2
    x, power = scaled(x, propagate_nan, torch.bfloat16 if narrow else None, own)
    return x, torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=power.dtype), power


def normalized(x: Tensor, norm: Tensor, dtype: torch.dtype, unit: float = 1.0) -> Tensor:
    """Scaled matrices over their norms, times ``unit``, in ``dtype``.

    A zero matrix stays zero. The result is contiguous, and takes the memory of ``x`` where it has as many bytes.
    """
    # the norm is 0 or, as magnitudes add up to 1 or more, at least one over the root of their number
    divisor = norm.clamp(min=2.0**-30)
    if unit != 1:
        divisor = divisor / unit
    # each entry takes the place of its own, perhaps as another 16 bits
    result = x.view(dtype) if x.dtype.itemsize == dtype.itemsize else torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.div(x, divisor, out=result)
