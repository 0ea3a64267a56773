"""Triton kernels for the elementwise half of a step, and for second moments.

Each does for many shards at once what :mod:`~megatron_eopt.step.foreach` does in several passes, and rounds where
that rounds. A table in memory of the device has a row of numbers for each piece: see
:class:`~megatron_eopt.step.momenta.step_kernels.Piece`. With TRITON_INTERPRET=1 they are interpreted, for tests.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_eopt.kernels.triton_launch import Call, Launcher

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # only fma() is fused, as torch's lerp and add are

# What stands where in a row of the table: see Piece.
ROWS = tl.constexpr(0)
COLS = tl.constexpr(1)
OF_GRADIENT = tl.constexpr(2)  # address, distance of rows, distance of columns
OF_MOMENTUM = tl.constexpr(5)
OF_WEIGHT = tl.constexpr(8)
OF_OTHER = tl.constexpr(11)
OF_MOMENT = tl.constexpr(14)
OF_PREVIOUS = tl.constexpr(17)
MATRIX = tl.constexpr(20)
SCALE = tl.constexpr(21)
FIELDS = tl.constexpr(22)

LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32


@triton.jit
def _fma(a, b, c, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``a * b + c``, rounded once; the interpreter would round twice."""
    if WIDE:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _rounded(x, TO: tl.constexpr, BY_HAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round fp32 to the nearest, ties to even; the interpreter cuts off bits."""
    if BY_HAND and tl.bfloat16 == TO:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(x == x, nearest, 0x7FC0)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TO)


@triton.jit
def _lerp(a, b, weight, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``a + weight (b - a)``, from the nearer end, as torch does."""
    return tl.where(weight < 0.5, _fma(b - a, weight, a, WIDE), _fma(a - b, 1.0 - weight, b, WIDE))


@triton.jit
def _number_of(x, ON_DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number in fp32: given, or what a pointer has."""
    if ON_DEVICE:
        return tl.load(x)
    else:
        return tl.full((), x, tl.float32)


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """fmix32 of MurmurHash3, as in :func:`~megatron_eopt.step.rounding.murmur_mix`."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def _number(row, FIELD: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number of a table's row."""
    number = tl.load(row + FIELD)
    if ALIGNED:  # of addresses and of distances between rows, where all of them are
        number = tl.multiple_of(number, 16)
    return number


@triton.jit
def _tile(index, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column numbers of a tile, and what of it lies inside."""
    across = tl.cdiv(cols, WIDTH)
    r = (index // across) * HEIGHT + tl.arange(0, HEIGHT)
    c = (index % across) * WIDTH + tl.arange(0, WIDTH)
    return r, c, (r < rows)[:, None] & (c < cols)[None, :]


@triton.jit
def _piece(table, program, tiles, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of a program's piece in the table, and its tile."""
    row = table + (program // tiles) * FIELDS
    cols = _number(row, COLS, ALIGNED)
    r, c, inside = _tile((program % tiles).to(tl.int64), tl.load(row + ROWS), cols, HEIGHT, WIDTH)
    return row, r, c, inside


@triton.jit
def _entries(row, FIELD: tl.constexpr, r, c, ALIGNED: tl.constexpr, LIE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a tile's entries lie, counted from a piece's first."""
    if LIE == 1:  # entries of a row lie side by side
        return r[:, None] * _number(row, FIELD + 1, ALIGNED) + c[None, :]
    elif LIE == 0:  # those of a column do
        return r[:, None] + c[None, :] * _number(row, FIELD + 2, ALIGNED)
    else:
        return r[:, None] * tl.load(row + FIELD + 1) + c[None, :] * tl.load(row + FIELD + 2)


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    row, FIELD: tl.constexpr, DTYPE: tl.constexpr, r, c, ALIGNED: tl.constexpr, LIE: tl.constexpr
):
    """Addresses of a tile's entries."""
    start = tl.load(row + FIELD).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start + _entries(row, FIELD, r, c, ALIGNED, LIE)


@triton.jit
def _factor(  # type: ignore[no-untyped-def]
    factors,
    row,
    r,
    c,
    inside,
    PARAMETER: tl.constexpr,
    ALIGNED: tl.constexpr,
    OTHERS_LIE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of factors in fp32, rounded to the dtype of the parameter."""
    of_x = factors + _number(row, OF_OTHER, ALIGNED) + _entries(row, OF_OTHER, r, c, ALIGNED, OTHERS_LIE)
    x = tl.load(of_x, mask=inside, other=0.0).to(tl.float32)
    return _rounded(x, PARAMETER, INTERPRETED).to(tl.float32)


@triton.jit
def _norm(x):  # type: ignore[no-untyped-def]
    """The norm of a tile in fp64, whatever the order of its entries."""
    wide = x.to(tl.float64)
    return tl.sqrt(tl.sum(tl.sum(wide * wide, 1), 0))


@triton.jit
def _store_products(norms, x, y):  # type: ignore[no-untyped-def]
    """Roots of a tile's sums of positive products, and behind all tiles' of negative ones, in fp64."""
    products = x.to(tl.float64) * y.to(tl.float64)
    positive = tl.where(products > 0, products, 0.0)
    negative = positive - products
    tl.store(norms, tl.sqrt(tl.sum(tl.sum(positive, 1), 0)))
    tl.store(norms + tl.num_programs(0), tl.sqrt(tl.sum(tl.sum(negative, 1), 0)))


@triton.jit
def _divided(x, v, eps):  # type: ignore[no-untyped-def]
    """``x / (sqrt(v) + eps)``, rounded as torch does."""
    return tl.div_rn(x, tl.sqrt_rn(v) + eps)


@triton.jit
def _corrected(g, previous, row, corrections, AVERAGE: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of ``previous + weight (g - previous)`` times a factor; ``corrections`` have both of each matrix."""
    corrections += tl.load(row + MATRIX) * 2
    c = _rounded(_lerp(previous, g, tl.load(corrections), INTERPRETED), AVERAGE, INTERPRETED).to(tl.float32)
    return _rounded(c * tl.load(corrections + 1), AVERAGE, INTERPRETED).to(tl.float32)


@triton.jit(do_not_specialize=["tiles"])
def corrections_kernel(  # type: ignore[no-untyped-def]
    table,
    corrections,
    norms,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    PREVIOUS: tl.constexpr,
    AVERAGE: tl.constexpr,
    LIE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The norm of a tile of corrected gradients."""
    program = tl.program_id(0)
    row, r, c, inside = _piece(table, program, tiles, HEIGHT, WIDTH, ALIGNED)
    g = tl.load(_places(row, OF_GRADIENT, GRADIENT, r, c, ALIGNED, LIE), mask=inside, other=0.0).to(tl.float32)
    before = tl.load(_places(row, OF_PREVIOUS, PREVIOUS, r, c, ALIGNED, LIE), mask=inside, other=0.0).to(tl.float32)
    g = _rounded(g, AVERAGE, INTERPRETED).to(tl.float32)
    tl.store(norms + program, _norm(_corrected(g, before, row, corrections, AVERAGE, INTERPRETED)))


@triton.jit(do_not_specialize=["step", "tiles"])
def momentum_kernel(  # type: ignore[no-untyped-def]
    table,
    flag,
    out,
    norms,
    corrections,
    beta,
    weight,
    weight_decay,
    step,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTUM: tl.constexpr,
    PARAMETER: tl.constexpr,
    AVERAGE: tl.constexpr,
    L2: tl.constexpr,
    DECAY_ON_DEVICE: tl.constexpr,
    HEAVY: tl.constexpr,
    NESTEROV: tl.constexpr,
    AT_RANDOM: tl.constexpr,
    MEASURED: tl.constexpr,
    AVERAGED: tl.constexpr,
    PREVIOUS: tl.constexpr,
    LIE: tl.constexpr,
    OTHERS_LIE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Momentum, look-ahead and cast of a tile, from gradient to bucket.

    Norms of its gradients, and behind them of all tiles' updates, if they are measured. Where momenta are ``AVERAGED``
    already, ``out`` has factors of their updates, and only their products with these are measured. With the dtype
    of ``PREVIOUS`` gradients these are corrected, and new ones kept.
    """
    program = tl.program_id(0)
    row, r, c, inside = _piece(table, program, tiles, HEIGHT, WIDTH, ALIGNED)
    of_g = _places(row, OF_GRADIENT, GRADIENT, r, c, ALIGNED, LIE)
    of_m = _places(row, OF_MOMENTUM, MOMENTUM, r, c, ALIGNED, LIE)
    g = tl.load(of_g, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(of_m, mask=inside, other=0.0).to(tl.float32)
    old = m.to(tl.uint32, bitcast=True)
    g = _rounded(g, AVERAGE, INTERPRETED).to(tl.float32)
    ok = tl.load(flag) != 0
    if PREVIOUS is not None:
        of_previous = _places(row, OF_PREVIOUS, PREVIOUS, r, c, ALIGNED, LIE)
        before = tl.load(of_previous, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_previous, _rounded(tl.where(ok, g, before), PREVIOUS, INTERPRETED), mask=inside)
        g = _corrected(g, before, row, corrections, AVERAGE, INTERPRETED)
    if MEASURED:
        tl.store(norms + program, _norm(g))
    WORK: tl.constexpr = tl.float32 if AT_RANDOM else AVERAGE  # the dtype that averages are rounded to
    if L2:
        of_p = _places(row, OF_WEIGHT, PARAMETER, r, c, ALIGNED, LIE)
        p = tl.load(of_p, mask=inside, other=0.0).to(tl.float32)
        g += _rounded(p * _number_of(weight_decay, DECAY_ON_DEVICE), PARAMETER, INTERPRETED).to(tl.float32)
        g = _rounded(g, WORK, INTERPRETED).to(tl.float32)
    beta = _number_of(beta, False)
    weight = _number_of(weight, False)
    if HEAVY:
        g = tl.where(ok, g, 0.0)
        decayed = tl.where(ok, _rounded(m * beta, WORK, INTERPRETED).to(tl.float32), m)
        m = _rounded(decayed + g, WORK, INTERPRETED).to(tl.float32)
        u = _fma(m, beta, g, INTERPRETED) if NESTEROV else m
    else:
        g = tl.where(ok, g, m)  # averaged with itself a momentum stays as it is
        if not AVERAGED:
            m = _rounded(_lerp(m, g, weight, INTERPRETED), WORK, INTERPRETED).to(tl.float32)
        u = _lerp(g, m, beta, INTERPRETED) if NESTEROV else m
    if AT_RANDOM and not AVERAGED:
        bits = m.to(tl.uint32, bitcast=True)
        noise = _mixed(_mixed(old | (bits >> 16)) + step.to(tl.uint32)) >> 16
        bits += tl.where(tl.abs(m) < 3.3895313892515355e38, noise, 0)  # the largest of bf16: what is finite stays so
        tl.store(of_m, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    elif not AVERAGED:
        tl.store(of_m, _rounded(m, MOMENTUM, INTERPRETED), mask=inside)
    u = _rounded(_rounded(u, WORK, INTERPRETED).to(tl.float32), PARAMETER, INTERPRETED).to(tl.float32)
    if MEASURED:
        tl.store(norms + tl.num_programs(0) + program, _norm(tl.where(inside, u, 0.0)))
    if AVERAGED:
        x = _factor(out, row, r, c, inside, PARAMETER, ALIGNED, OTHERS_LIE, INTERPRETED)
        _store_products(norms + program, u, x)
    else:
        of_u = out + _number(row, OF_OTHER, ALIGNED) + _entries(row, OF_OTHER, r, c, ALIGNED, OTHERS_LIE)
        tl.store(of_u, _rounded(u, out.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def moment_kernel(  # type: ignore[no-untyped-def]
    table,
    flag,
    factors,
    norms,
    weight,
    eps,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARAMETER: tl.constexpr,
    MEASURED: tl.constexpr,
    LIE: tl.constexpr,
    OTHERS_LIE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Average a tile's squared factors.

    Norms of its factors, and behind them of all tiles' factors divided by roots, if they are measured.
    """
    program = tl.program_id(0)
    row, r, c, inside = _piece(table, program, tiles, HEIGHT, WIDTH, ALIGNED)
    of_v = _places(row, OF_MOMENT, tl.float32, r, c, ALIGNED, LIE)
    v = tl.load(of_v, mask=inside, other=0.0)
    x = _factor(factors, row, r, c, inside, PARAMETER, ALIGNED, OTHERS_LIE, INTERPRETED)
    square = x * x
    square = tl.where(square > LARGEST, LARGEST, square)
    square = tl.where(tl.load(flag) != 0, square, v)
    v = _lerp(v, square, _number_of(weight, False), INTERPRETED)
    tl.store(of_v, v, mask=inside)
    if MEASURED:
        tl.store(norms + program, _norm(x))
        tl.store(norms + tl.num_programs(0) + program, _norm(_divided(x, v, _number_of(eps, False))))


@triton.jit(do_not_specialize=["tiles"])
def lines_kernel(  # type: ignore[no-untyped-def]
    table,
    factors,
    norms,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARAMETER: tl.constexpr,
    LINES: tl.constexpr,
    OTHERS_LIE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Norms in fp64 of a tile's rows, (rows x tiles), or columns, (tiles x columns)."""
    program = tl.program_id(0)
    piece = program // tiles
    index = (program % tiles).to(tl.int64)
    row = table + piece * FIELDS
    rows = tl.load(row + ROWS)
    cols = _number(row, COLS, ALIGNED)
    r, c, inside = _tile(index, rows, cols, HEIGHT, WIDTH)
    x = _factor(factors, row, r, c, inside, PARAMETER, ALIGNED, OTHERS_LIE, INTERPRETED).to(tl.float64)
    across = tl.cdiv(cols, WIDTH)
    if LINES == 1:
        of_lines = norms + (piece * rows + r) * across + index % across
        tl.store(of_lines, tl.sqrt(tl.sum(x * x, 1)), mask=r < rows)
    else:
        of_lines = norms + (piece * tl.cdiv(rows, HEIGHT) + index // across) * cols + c
        tl.store(of_lines, tl.sqrt(tl.sum(x * x, 0)), mask=c < cols)


@triton.jit(do_not_specialize=["tiles"])
def products_kernel(  # type: ignore[no-untyped-def]
    table,
    factors,
    norms,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARAMETER: tl.constexpr,
    LIE: tl.constexpr,
    OTHERS_LIE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Norms of a tile's weights, of its factors, and of their products, each behind all tiles' of the one before."""
    program = tl.program_id(0)
    row, r, c, inside = _piece(table, program, tiles, HEIGHT, WIDTH, ALIGNED)
    p = tl.load(_places(row, OF_WEIGHT, PARAMETER, r, c, ALIGNED, LIE), mask=inside, other=0.0).to(tl.float32)
    x = _factor(factors, row, r, c, inside, PARAMETER, ALIGNED, OTHERS_LIE, INTERPRETED)
    norms += program
    tl.store(norms, _norm(p))
    tl.store(norms + tl.num_programs(0), _norm(x))
    _store_products(norms + 2 * tl.num_programs(0), p, x)


@triton.jit(do_not_specialize=["tiles"])
def subtract_kernel(  # type: ignore[no-untyped-def]
    table,
    flag,
    factors,
    lr,
    decay,
    scale,
    eps,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARAMETER: tl.constexpr,
    DECAYS: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    RATES_ON_DEVICE: tl.constexpr,
    SCALED: tl.constexpr,
    SCALES_ON_DEVICE: tl.constexpr,
    LINES: tl.constexpr,
    DIVIDED: tl.constexpr,
    ON_SPHERE: tl.constexpr,
    LIE: tl.constexpr,
    OTHERS_LIE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Decay a tile of weights, and subtract its scaled factors.

    There is one scale for all, for each matrix, or for each of its rows (``LINES`` 1) or columns (2).
    """
    program = tl.program_id(0)
    row = table + (program // tiles) * FIELDS
    rows = tl.load(row + ROWS)
    cols = _number(row, COLS, ALIGNED)
    rows = tl.where(tl.load(flag) != 0, rows, 0)
    if ON_SPHERE:
        scale += tl.load(row + MATRIX) * 3
        rows = tl.where(tl.load(scale) > 0, rows, 0)
    r, c, inside = _tile((program % tiles).to(tl.int64), rows, cols, HEIGHT, WIDTH)
    of_p = _places(row, OF_WEIGHT, PARAMETER, r, c, ALIGNED, LIE)
    p = tl.load(of_p, mask=inside, other=0.0).to(tl.float32)
    x = _factor(factors, row, r, c, inside, PARAMETER, ALIGNED, OTHERS_LIE, INTERPRETED)
    if ON_SPHERE:
        moved = _rounded((p - x * tl.load(scale + 1)) * tl.load(scale + 2), PARAMETER, INTERPRETED)
        tl.store(of_p, moved, mask=inside)
    else:
        if DIVIDED:
            of_v = _places(row, OF_MOMENT, tl.float32, r, c, ALIGNED, LIE)
            x = _divided(x, tl.load(of_v, mask=inside, other=0.0), _number_of(eps, False))
        if SCALES_ON_DEVICE:
            scale += tl.load(row + SCALE)
        if LINES == 1:
            x *= tl.load(scale + r, mask=r < rows, other=0.0)[:, None]
        elif LINES == 2:
            x *= tl.load(scale + c, mask=c < cols, other=0.0)[None, :]
        elif SCALED:
            x *= _number_of(scale, SCALES_ON_DEVICE)
        x = _rounded(x, PARAMETER, INTERPRETED).to(tl.float32)
        if DECAYS:
            decayed = _rounded(p * _number_of(decay, RATES_ON_DEVICE), PARAMETER, INTERPRETED).to(tl.float32)
            if CAUTIOUS:
                decayed = tl.where(((p > 0) & (x < 0)) | ((p < 0) & (x > 0)), p, decayed)
            p = decayed
        x = _rounded(x * _number_of(lr, RATES_ON_DEVICE), PARAMETER, INTERPRETED).to(tl.float32)
        tl.store(of_p, _rounded(p - x, PARAMETER, INTERPRETED), mask=inside)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _call(tensors: Sequence[Tensor], programs: int, constants: tuple[tuple[str, Any], ...]) -> Call:
    return Call(programs, (), dict(constants), OPTIONS)


launchers = {
    kernel: Launcher(kernel, _call)
    for kernel in (
        corrections_kernel,
        momentum_kernel,
        moment_kernel,
        lines_kernel,
        products_kernel,
        subtract_kernel,
    )
}

INTERPRETED = not isinstance(momentum_kernel, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when triton was imported."""
