"""The two forms of Newton-Schulz: their arithmetic, what they cost, and where the Gram form restarts."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients, CoefficientType
from megatron_eopt.orthogonalize.products import Products, square_work

Restarts = tuple[int, ...]
"""Steps of a schedule, counted from 1, after which the Gram form computes its Gram matrix anew."""

Preset = Literal["fast", "default", "accurate"]

# By name of a set and number of steps: the necessary restarts, and those of the preset accurate, one more; None: the
# standard form. Necessary are the fewest that keep fp16 as exact as the standard form is in bf16, by the simulation
# that the tests repeat (tests/orthogonalize/simulation.py). cubic5 goes without, which is what it is for, at an error
# of up to 2.6 times that of its own standard form in bf16; that is below quintic's in bf16 on all spectra but
# harmonic.
RESTARTS: dict[tuple[str, int], tuple[Restarts | None, Restarts | None]] = {
    ("simple", 5): ((3,), (1, 3)),
    ("quintic", 5): ((3,), (2, 3)),
    ("polar_express", 5): ((2, 3), (2, 3, 4)),
    ("polar_express", 8): ((2, 4), (2, 3, 4)),
    ("cans", 5): ((1, 3), (1, 2, 3)),
    ("aol", 4): ((2,), (1, 3)),
    ("deepseekv4", 10): (None, None),
    ("cubic5", 5): ((), (3,)),
}

# Set, steps and extra restarts of a preset; the default here with the default set.
PRESETS: dict[Preset, tuple[str, int, int]] = {
    "fast": ("cubic5", 5, 0),
    "default": ("quintic", 5, 0),
    "accurate": ("quintic", 5, 1),
}

Watch = Callable[[int, Tensor], None]
"""Is shown the number of a step, from 0, and the Gram matrix before it, which is overwritten later."""


def nonzero(norm: Tensor) -> Tensor:
    """1 in place of zeros: a zero matrix divided by 1 stays zero, without asking the device whether it is one."""
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def scaled(
    x: Tensor, propagate_nan: bool = True, dtype: torch.dtype | None = None, own: bool = False
) -> tuple[Tensor, Tensor]:
    """Matrices divided by the powers of two next to the sums of their magnitudes; a zero matrix stays zero.

    The division rounds nothing. Squares of entries below 1e-19 vanish in fp32, and those of entries above 1e19
    overflow: after this no square that matters does.

    ``x`` has at least one entry. Without ``propagate_nan`` a matrix with entries that are not finite gives zero. The
    memory of ``x`` may be taken for the result with ``own``.

    Returns:
        A contiguous tensor in ``dtype``, fp32 (fp64 for an fp64 ``x``) by default, and the divisors, (1 x 1) or
        (n x 1 x 1) in that default: not finite where an entry is not.
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


def normalized(
    x: Tensor,
    dtype: torch.dtype,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    propagate_nan: bool = True,
    unit: float = 1.0,
    own: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices divided by their Frobenius norms, times ``unit``, in ``dtype``; a zero matrix stays zero.

    ``all_reduce`` sums squared norms over the ranks that hold the other shards of ``x``. ``own`` is as in
    :func:`scaled`.

    Returns:
        A contiguous tensor, and two factors of the norm, whose product may exceed fp32.
    """
    # what is in bf16, and shall have 16 bits again, needs no more in between
    narrow = x.dtype == torch.bfloat16 and dtype.itemsize == 2
    x, power = scaled(x, propagate_nan, torch.bfloat16 if narrow else None, own)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=power.dtype)
    if all_reduce is not None:
        squared = all_reduce((norm.double() * power.double()).square())
        norm = (squared.sqrt() / power.double()).to(power.dtype)
    # the norm is 0 or, as magnitudes add up to 1 or more, at least one over the root of their number
    divisor = norm.clamp(min=2.0**-30)
    if unit != 1:
        divisor = divisor / unit
    # each entry takes the place of its own, perhaps as another 16 bits
    result = x.view(dtype) if x.dtype.itemsize == dtype.itemsize else torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.div(x, divisor, out=result), norm, power


def iterate_standard(
    X: Tensor,
    schedule: Sequence[Coefficients],
    products: Products,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """Apply the polynomials of a schedule to a normalized ``X``, iterating on the Gram matrix of its rows.

    In each step ``X <- a X + (b A + c A^2) X``, ``A = X X^T``, with ``(a, b, c)`` of the schedule. ``all_reduce`` sums
    ``A`` over the ranks that hold the other columns of ``X``. ``X``, (rows x cols) or (n x rows x cols), best with the
    short side first, is written to.
    """
    fused = torch.baddbmm if X.ndim == 3 else torch.addmm
    gram, factor = square_work(X, 2)
    Y = torch.empty_like(X)
    for step, (a, b, c) in enumerate(schedule):
        A = products.gram(X, out=gram)
        if all_reduce is not None:
            A = all_reduce(A)
        if watch is not None:
            watch(step, A)
        Z, scale = (A, b) if c == 0 else (products.addmm(A, A, A, beta=b, alpha=c, out=factor), 1)
        X, Y = fused(X, Z, X, beta=a, alpha=scale, out=Y), X
    return X


def iterate_gram(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    products: Products,
    apply: Callable[..., Tensor] | None = None,
    watch: Watch | None = None,
    normalize: bool = False,
) -> Tensor:
    """Apply the polynomials of a schedule to ``X`` of Frobenius norm 1 through its Gram matrix.

    The standard form multiplies ``X`` by ``P = a I + Z``, ``Z = b R + c R^2``, ``R = X X^T``, in every step. All these
    matrices are polynomials of ``R``: they commute, and the next Gram matrix is ``P R P``. So the product ``Q`` of all
    ``P`` is gathered on the short side and applied at the end: ``X <- Q X``.

    Rounding makes the smallest eigenvalues of ``R`` slightly negative, and each step multiplies a small one by about
    ``a^2``. A restart computes ``R`` anew from ``Q X`` before that grows.

    Args:
        X: (rows x cols) or (n x rows x cols) with ``rows <= cols``, in fp32 or fp16; never bf16, whose rounding the
            form amplifies to errors of 0.3 and more. Written to where there are restarts.
        restarts: steps after which the Gram matrix is computed anew; ascending, below the number of steps.
        apply: ``(Q, X, out=)``, computes ``Q X``; plainly where None is given.
        normalize: ``X`` has another norm, as :func:`scaled` leaves it. The norm is divided out on the short side: its
            square is the trace of the first Gram matrix, which ``watch`` is shown as it is.
    """
    apply = apply or (torch.bmm if X.ndim == 3 else torch.mm)
    R, *work = square_work(X, 4)
    Y = torch.empty_like(X)
    for start, end in zip([0, *restarts], [*restarts, len(schedule)], strict=True):
        R = products.gram(X, out=R)
        if watch is not None:
            watch(start, R)
        if normalize and start == 0:
            squared = nonzero(R.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None])
            Q = gram_factor(R.div_(squared), schedule[:end], products, work, watch).mul_(squared.rsqrt())
        else:
            Q = gram_factor(R, schedule[start:end], products, work, watch, start)
        X, Y = apply(Q, X, out=Y), X
    return X


def iterate_gram_fp16(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    products: Products,
    apply: Callable[..., Tensor] | None = None,
    watch: Watch | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`iterate_gram` for ``X`` in fp16 of norm :data:`UNIT_IN_FP16`; the result, in ``dtype``, as for norm 1."""
    unit = UNIT_IN_FP16
    wanted = None if watch is None else (lambda step, R: watch(step, R.float() / unit**2))
    schedule = [(a, b / unit**2, c / unit**4) for a, b, c in schedule]
    return iterate_gram(X, schedule, restarts, products, apply, wanted).to(dtype).div_(unit)


UNIT_IN_FP16 = 128.0
"""The norm that matrices have in fp16. The Gram matrix of a large one of norm 1 has entries of 1e-6, which fp16 keeps
two digits of. With this the trace of the first Gram matrix is 2^14, and no later one has an entry of 65504, the largest
number of fp16, while singular values stay below 1.99."""


def gram_factor(
    R: Tensor,
    segment: Sequence[Coefficients],
    products: Products,
    work: Sequence[Tensor],
    watch: Watch | None = None,
    start: int = 0,
) -> Tensor:
    """The product ``Q`` of the polynomials of one segment between restarts, which begins at step ``start`` with ``R``.

    ``R``, (rows x rows) or (n x rows x rows), and the three further tensors ``work`` are written to; one of these is
    returned. ``watch`` is not shown the first ``R``.
    """
    Z, T, Q = work
    for index, (a, b, c) in enumerate(segment):
        if watch is not None and index > 0:
            watch(start + index, R)
        Z = torch.mul(R, b, out=Z) if c == 0 else products.addmm(R, R, R, beta=b, alpha=c, out=Z)
        if index + 1 < len(segment):
            # P (P R), not P^2 R: squaring P first costs up to five times the error
            T = products.addmm(R, Z, R, beta=a, alpha=1.0, out=T)
            R = products.addmm(T, Z, T, beta=a, alpha=1.0, out=R)
        if index == 0:
            Z.diagonal(dim1=-2, dim2=-1).add_(a)
            Q, Z = Z, Q
        else:
            Q, T = products.addmm(Q, Q, Z, beta=a, alpha=1.0, out=T), Q
    return Q


def standard_flops(rows: int, cols: int, schedule: Sequence[Coefficients], share: float = 1.0) -> float:
    """Floating-point operations of the standard form for a matrix with ``rows <= cols``.

    A step is a Gram matrix, its square where the polynomial is of fifth order, and the product with ``X``; ``share`` is
    the part of a symmetric product that is computed, between 1/2 and 1.
    """
    squares = sum(c != 0 for _, _, c in schedule)
    return len(schedule) * (2 * share + 2) * rows**2 * cols + squares * 2 * share * rows**3


def gram_flops(
    rows: int, cols: int, schedule: Sequence[Coefficients], restarts: Sequence[int], share: float = 1.0
) -> float:
    """Floating-point operations of the Gram form, as :func:`standard_flops`.

    Each segment between restarts is a Gram matrix and a product with ``X``; each step squares ``R`` where its
    polynomial is of fifth order, multiplies ``Q`` but in the first of a segment, and advances ``R`` by two products but
    in the last.
    """
    segments = len(restarts) + 1
    cubes = sum(c != 0 for _, _, c in schedule) + 3 * (len(schedule) - segments)
    return segments * (2 * share + 2) * rows**2 * cols + cubes * 2 * share * rows**3


def iteration_bytes(rows: int, cols: int, restarts: Restarts | None, itemsize: int) -> int:
    """Memory that an iteration of one matrix takes, ``rows <= cols``; in the standard form where there are no restarts.

    That is ``X``, its successor, the Gram matrix and its square, in the Gram form four of that size, and one to make
    products symmetric.
    """
    return (2 * rows * cols + (3 if restarts is None else 5) * rows * rows) * itemsize


def restarts_for(coefficient_type: CoefficientType, steps: int, extra: int = 0) -> Restarts | None:
    """Restarts of the Gram form for a schedule; None where the Gram form is not safe, or no table has it.

    ``extra`` ones, 0 or 1 as in the preset ``accurate``, are added to those that are necessary.
    """
    if not isinstance(coefficient_type, str):
        return None
    return RESTARTS.get((coefficient_type, steps), (None, None))[extra]
