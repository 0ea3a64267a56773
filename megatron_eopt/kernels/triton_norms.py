"""Triton kernels that divide matrices by their norms in one pass.

torch takes four, and is four times slower than memory where the result has another dtype than the matrix (H200, torch
2.11). A matrix is read in blocks, so that it gives the same bits alone and in a stack.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_eopt.kernels.triton_launch import Call, Launcher

_BLOCK = 8192  # entries of which a program adds the squares
_WIDE, _SIDE = 4096, 64  # entries of a tile of a quotient; a side, where one of both is transposed
_OPTIONS = {"enable_fp_fusion": True}  # releases of triton differ in the default, and so would bits


def normalized(
    x: Tensor,
    dtype: torch.dtype,
    *,
    unit: float,
    propagate_nan: bool,
    into: Tensor | None,
) -> Tensor:
    """See :class:`~megatron_eopt.kernels.products.Products`."""
    if not (x.is_contiguous() or x.mT.is_contiguous()):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device) if into is None else into
    entries = x.size(-2) * x.size(-1)
    count = x.numel() // entries
    # each in memory of its own, whose address is a multiple of 16
    powers = x.new_empty(count * -(-entries // _BLOCK), dtype=torch.float32)
    squares = torch.empty_like(powers)
    power = x.new_empty(count, dtype=torch.float32)
    norm = torch.empty_like(power)
    _launch_squares((x, powers, squares), ())
    _launch_norms((powers, squares, power, norm), ())
    _launch_quotients((x, out, power, norm), (float(unit),), propagate_nan)
    return out


def _call_squares(tensors: Sequence[Tensor]) -> Call:
    x, powers, _ = tensors
    entries = x.size(-2) * x.size(-1)
    return Call(len(powers), (entries, -(-entries // _BLOCK)), {"BLOCK": _BLOCK}, _OPTIONS)


def _call_norms(tensors: Sequence[Tensor]) -> Call:
    powers, _, power, _ = tensors
    return Call(len(power), (len(powers) // len(power),), {"WIDTH": 1024}, _OPTIONS)


def _call_quotients(tensors: Sequence[Tensor], propagate_nan: bool) -> Call:
    x, out, power, _ = tensors
    rows, cols = x.shape[-2:]
    if x.is_contiguous():
        rows, cols, height, width = 1, rows * cols, 1, _WIDE
        strides = [cols, cols, 1] * 2
    else:
        height = width = _SIDE
        strides = [s for y in (x, out) for s in (y.stride(0) if y.ndim == 3 else 0, *y.stride()[-2:])]
    across = -(-cols // width)
    per_matrix = across * -(-rows // height)
    constants = {"KEEP_BAD": propagate_nan, "HEIGHT": height, "WIDTH": width}
    return Call(len(power) * per_matrix, (rows, cols, across, per_matrix, *strides), constants, _OPTIONS)


@triton.jit
def _power(x):  # type: ignore[no-untyped-def]
    """The power of two below a positive number; infinity stays."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def _squares_of_blocks(x, powers, squares, entries, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of squares of a block over a power near its largest."""
    program = tl.program_id(0).to(tl.int64)
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + (program // blocks) * entries + at, mask=at < entries, other=0.0).to(tl.float32)
    power = _power(tl.max(tl.abs(values)))
    values = tl.div_rn(values, power)
    tl.store(powers + program, power)
    tl.store(squares + program, tl.sum(values * values))


@triton.jit
def _norms_of_matrices(powers, squares, power, norm, blocks, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each matrix the largest power, and the norm over it."""
    matrix = tl.program_id(0).to(tl.int64)
    powers += matrix * blocks
    squares += matrix * blocks
    inside = tl.arange(0, WIDTH)
    largest = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, blocks, WIDTH):
        largest = tl.maximum(largest, tl.load(powers + start + inside, mask=start + inside < blocks, other=0.0))
    of_all = tl.max(largest)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, blocks, WIDTH):
        valid = start + inside < blocks
        ratio = tl.div_rn(tl.load(powers + start + inside, mask=valid, other=0.0), of_all)
        total += tl.load(squares + start + inside, mask=valid, other=0.0) * ratio * ratio
    tl.store(power + matrix, of_all)
    tl.store(norm + matrix, tl.sqrt_rn(tl.sum(total)))


@triton.jit
def _quotients(  # type: ignore[no-untyped-def]
    x,
    out,
    power,
    norm,
    unit,
    rows,
    cols,
    across,
    per_matrix,
    x_matrix,
    x_row,
    x_col,
    out_matrix,
    out_row,
    out_col,
    KEEP_BAD: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A tile of a matrix over its norm, times ``unit``."""
    program = tl.program_id(0)
    matrix = (program // per_matrix).to(tl.int64)
    tile = program % per_matrix
    top = (tile // across).to(tl.int64) * HEIGHT
    left = (tile % across).to(tl.int64) * WIDTH
    down = tl.arange(0, HEIGHT)[:, None]
    along = tl.arange(0, WIDTH)[None, :]
    inside = (down < rows - top) & (along < cols - left)
    x += matrix * x_matrix + top * x_row + left * x_col
    values = tl.load(x + down * x_row + along * x_col, mask=inside, other=0.0).to(tl.float32)
    of_matrix = tl.load(norm + matrix)
    # the norm is 0 or, as the largest entry is near the power, at least that of the smallest number
    divisor = tl.div_rn(tl.maximum(of_matrix, 2.0**-30, propagate_nan=tl.PropagateNan.ALL), unit)
    values = tl.div_rn(tl.div_rn(values, tl.load(power + matrix)), divisor)
    if not KEEP_BAD:
        values = tl.where(of_matrix == of_matrix, values, 0.0)
    out += matrix * out_matrix + top * out_row + left * out_col
    tl.store(out + down * out_row + along * out_col, values.to(out.dtype.element_ty), mask=inside)


_launch_squares = Launcher(_squares_of_blocks, _call_squares)
_launch_norms = Launcher(_norms_of_matrices, _call_norms)
_launch_quotients = Launcher(_quotients, _call_quotients)
