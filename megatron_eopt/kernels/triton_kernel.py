"""A Triton kernel that computes half of a symmetric product.

Only in files named ``triton_`` does an iteration import triton. On a CPU kernels are interpreted, for tests, if
TRITON_INTERPRET=1 is set before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_eopt.kernels import triton_norms
from megatron_eopt.kernels.products import Fp32Precision, Products
from megatron_eopt.kernels.triton_launch import Call, Launcher


@dataclass(frozen=True)
class Tiles:
    """How the result is cut into tiles."""

    width: int  # rows and columns of a tile of the result; a power of two, at least 16
    depth: int  # columns of A and B taken at once; the same
    band: int = 8  # rows of tiles walked down column by column: programs at work together share the L2 cache
    warps: int = 4  # per program
    stages: int = 3  # steps of depth that are loaded ahead


def tiles_for(rows: int, dtype: torch.dtype, input_precision: Fp32Precision = "ieee") -> Tiles:
    """Tiles of a (rows x rows) result.

    Reasoned for Hopper, not measured. They ignore the stack, so that a matrix gives the same bits alone and in a stack.

    - Half precision: two programs of 128 x 128 fit on a multiprocessor (96 KiB in three stages); below 2048 rows an
      H100 would have more multiprocessors than there are such tiles.
    - TF32: the same in bytes; the large tile takes twice the warps, or it spills registers.
    - fp32: runs on the ordinary cores, where 64 x 64 fits into the registers.
    """
    if dtype == torch.float32 and input_precision == "ieee":
        return Tiles(width=64, depth=16)
    depth, warps = (32, 8) if dtype == torch.float32 else (64, 4)
    return (
        Tiles(width=64, depth=depth)
        if rows < 2048
        else Tiles(
            width=128,
            depth=depth,
            warps=warps,
        )
    )


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    input_precision: Fp32Precision = "ieee",
    tiles: Tiles | None = None,
) -> Tensor:
    """``alpha A B^T + beta C``, known to be symmetric.

    So for ``A = B``, and for symmetric ``A`` and ``B`` that commute, with a symmetric ``C``. Entries on and below the
    diagonal are computed, in fp32, and copied above it: ``t (t + 1) / 2`` of ``t`` x ``t`` tiles.

    ``a`` and ``b`` are (rows x cols) or (n x rows x cols), both in fp16, bf16 or fp32. ``c``, not read where ``beta``
    is 0, and ``out``, none of the inputs, are (rows x rows) or (n x rows x rows), of any floating dtype. All may have
    any strides.
    """
    if out is None:
        out = a.new_empty(*a.shape[:-1], a.size(-2))
    if out.numel() == 0:
        return out
    # torch does not read c either where beta is 0; the kernel gets something with strides instead
    use_c = c is not None and beta != 0.0
    addend = c if c is not None and use_c else out
    _launch((a, b, addend, out), (float(alpha), float(beta)), use_c, input_precision, tiles)
    return out


def _call(tensors: Sequence[Tensor], use_c: bool, input_precision: Fp32Precision, tiles: Tiles | None) -> Call:
    a = tensors[0]
    rows, cols = a.shape[-2:]
    tiles = tiles or tiles_for(rows, a.dtype, input_precision)
    side = -(-rows // tiles.width)
    per_matrix = side * (side + 1) // 2
    stack = a.size(0) if a.ndim == 3 else 1
    # from matrix to matrix, row to row and column to column
    strides: list[int] = []
    for x in tensors:
        strides += (x.stride(0) if x.ndim == 3 else 0, *x.stride()[-2:])
    constants = {
        "USE_C": use_c,
        "EVEN": rows % tiles.width == 0 and cols % tiles.depth == 0,
        "PRECISION": input_precision,
        "WIDTH": tiles.width,
        "DEPTH": tiles.depth,
        "BAND": tiles.band,
        "WIDEN": INTERPRETED and a.dtype == torch.bfloat16,
    }
    # releases of triton differ in the default of the last one, and so would bits
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    return Call(stack * per_matrix, (rows, cols, per_matrix, *strides), constants, options)


@dataclass(frozen=True)
class Triton(Products):
    """Products by :func:`symmetric_product`, symmetric to the last bit."""

    input_precision: Fp32Precision = "ieee"  # of fp32 factors; torch's own setting does not reach the kernel
    tiles: Tiles | None = None  # those of the fixed table where there are none

    def share(self, rows: int) -> float:
        """See :class:`~megatron_eopt.kernels.products.Products`."""
        return 0.5

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`~megatron_eopt.kernels.products.Products`."""
        return symmetric_product(
            x,
            x,
            out=out,
            input_precision=self.input_precision,
            tiles=self.tiles,
        )

    def addmm(
        self,
        c: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        beta: float,
        alpha: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :class:`~megatron_eopt.kernels.products.Products`."""
        # b is symmetric: A B = A B^T
        precision = self.input_precision
        tiles = self.tiles
        return symmetric_product(
            a,
            b,
            c,
            alpha=alpha,
            beta=beta,
            out=out,
            input_precision=precision,
            tiles=tiles,
        )

    def normalized(
        self,
        x: Tensor,
        dtype: torch.dtype,
        *,
        unit: float = 1.0,
        propagate_nan: bool = True,
        into: Tensor | None = None,
    ) -> Tensor:
        """See :class:`~megatron_eopt.kernels.products.Products`."""
        serves = triton_norms.normalized if dtype.itemsize == 2 and x.numel() else super().normalized
        return serves(x, dtype, unit=unit, propagate_nan=propagate_nan, into=into)


@triton.jit
def _row_and_column(index):  # type: ignore[no-untyped-def]
    """Row and column of an entry of a lower triangle."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # the root is rounded: it may be one row off
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def _tile(index, side, BAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column, in tiles, of the ``index``-th program.

    Bands of ``BAND`` rows are a rectangle, walked by columns, and a triangle at the diagonal, walked by rows.
    """
    row, _ = _row_and_column(index)
    first = row // BAND * BAND
    height = tl.minimum(BAND, side - first)
    index -= first * (first + 1) // 2
    row, column = _row_and_column(tl.maximum(index - first * height, 0))
    in_rectangle = index < first * height
    row = first + tl.where(in_rectangle, index % height, row)
    column = tl.where(in_rectangle, index // height, first + column)
    return row, column


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    out,
    alpha,
    beta,
    rows,
    cols,
    per_matrix,
    a_matrix,
    a_row,
    a_col,
    b_matrix,
    b_row,
    b_col,
    c_matrix,
    c_row,
    c_col,
    out_matrix,
    out_row,
    out_col,
    USE_C: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A mirrored tile of ``alpha A B^T + beta C``."""
    program = tl.program_id(0)
    # where a matrix, a tile and a step begin is counted in 64 bits, what lies inside a tile in 32
    matrix = (program // per_matrix).to(tl.int64)
    row, column = _tile(program % per_matrix, tl.cdiv(rows, WIDTH), BAND)
    top = row.to(tl.int64) * WIDTH
    left = column.to(tl.int64) * WIDTH
    inside = tl.arange(0, WIDTH)
    deep = tl.arange(0, DEPTH)
    in_rows = inside < rows - row * WIDTH
    in_columns = inside < rows - column * WIDTH

    a += matrix * a_matrix + top * a_row + (inside[:, None] * a_row + deep[None, :] * a_col)
    b += matrix * b_matrix + left * b_row + (inside[None, :] * b_row + deep[:, None] * b_col)
    total = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    for done in range(0, cols, DEPTH):
        if EVEN:
            of_a = tl.load(a)
            of_b = tl.load(b)
        else:
            of_a = tl.load(a, mask=in_rows[:, None] & (deep[None, :] < cols - done), other=0.0)
            of_b = tl.load(b, mask=in_columns[None, :] & (deep[:, None] < cols - done), other=0.0)
        if WIDEN:
            of_a = of_a.to(tl.float32)
            of_b = of_b.to(tl.float32)
        total = tl.dot(of_a, of_b, total, input_precision=PRECISION)
        a += DEPTH * a_col
        b += DEPTH * b_col

    total *= alpha
    bounds = in_rows[:, None] & in_columns[None, :]
    if USE_C:
        c += matrix * c_matrix + top * c_row + left * c_col + (inside[:, None] * c_row + inside[None, :] * c_col)
        if EVEN:
            total += beta * tl.load(c).to(tl.float32)
        else:
            total += beta * tl.load(c, mask=bounds, other=0.0).to(tl.float32)

    result = total.to(out.dtype.element_ty)
    out += matrix * out_matrix
    here = out + top * out_row + left * out_col + (inside[:, None] * out_row + inside[None, :] * out_col)
    mirrored = out + left * out_row + top * out_col + (inside[None, :] * out_row + inside[:, None] * out_col)
    if row == column:
        # a tile on the diagonal is symmetric but for rounding: its lower half is stored twice
        bounds = bounds & (inside[:, None] >= inside[None, :])
        tl.store(here, result, mask=bounds)
        tl.store(mirrored, result, mask=bounds)
    elif EVEN:
        tl.store(here, result)
        tl.store(mirrored, result)
    else:
        tl.store(here, result, mask=bounds)
        tl.store(mirrored, result, mask=bounds)


_launch = Launcher(_kernel, _call)

# Whether TRITON_INTERPRET was set when triton was imported. Its interpreter (3.9) multiplies the bits of bf16 as
# integers, so the kernel widens them first, which is exact.
INTERPRETED = not isinstance(_kernel, triton.JITFunction)
