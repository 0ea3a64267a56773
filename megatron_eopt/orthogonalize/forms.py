"""The two forms of Newton-Schulz: arithmetic, cost and restarts."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients, CoefficientType
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.products import Products, square_work

Restarts = tuple[int, ...]  # steps, counted from 1, after which the Gram form computes its Gram matrix anew

Preset = Literal["fast", "default", "accurate"]

# By set and number of steps: the necessary restarts, and those of the preset accurate, one more; None: the standard
# form. Necessary are the fewest that keep fp16 as exact as the standard form in bf16, by the simulation that the tests
# repeat (tests/orthogonalize/simulation.py). cubic5 needs none, at up to 2.6 times the error of its own standard form
# in bf16, which is below quintic's on all spectra but harmonic.
RESTARTS: dict[tuple[str, int], tuple[Restarts | None, Restarts | None]] = {
    ("simple", 5): ((3,), (1, 3)),
    ("quintic", 5): ((3,), (2, 3)),
    ("polar_express", 5): ((2, 3), (2, 3, 4)),
    ("polar_express", 8): ((2, 4), (2, 3, 4)),
    ("cans", 5): ((2, 3), (2, 3, 4)),
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

# In fp16 and TF32 these sets need others. With those above, rounding takes singular values of matrices near low rank
# out of range, of quintic to infinity, by the same simulation. Those of quintic are as many as above. With them it has
# up to three times the error of bf16 on square Gaussian matrices (0.02), and less than bf16 elsewhere.
RESTARTS_IN_LOWER_PRECISION: dict[tuple[str, int], tuple[Restarts, Restarts]] = {
    ("quintic", 5): ((2,), (2, 3)),
    ("polar_express", 5): ((1, 3), (1, 2, 3)),
    ("polar_express", 8): ((1, 3, 4), (1, 2, 3, 4)),
    ("cans", 5): ((1, 2, 3), (1, 2, 3, 4)),
    ("cubic5", 5): ((3,), (2, 3)),
}

Watch = Callable[[int, Tensor], None]  # gets a step, from 0, and the Gram matrix before it, overwritten later


def nonzero(norm: Tensor) -> Tensor:
    """1 in place of zeros, without asking the device."""
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def iterate_standard(
    X: Tensor, schedule: Sequence[Coefficients], products: Products, watch: Watch | None = None
) -> Tensor:
    """Apply a schedule to a normalized ``X``, step by step.

    ``X <- a X + (b A + c A^2) X``, ``A = X X^T``, for each ``(a, b, c)``. ``X``, (rows x cols) or (n x rows x cols),
    best with the short side first, is overwritten.
    """
    fused = torch.baddbmm if X.ndim == 3 else torch.addmm
    gram, factor = square_work(X, 2)
    Y = torch.empty_like(X)
    for step, (a, b, c) in enumerate(schedule):
        A = products.gram(X, out=gram)
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
    """Apply a schedule through the Gram matrix of ``X``.

    ``X`` has Frobenius norm 1. The standard form multiplies it by ``P = a I + Z``, ``Z = b R + c R^2``, ``R = X X^T``,
    in every step. All of these are polynomials of ``R``: they commute, and the next Gram matrix is ``P R P``. So the
    product ``Q`` of all ``P`` is gathered on the short side and applied at the end: ``X <- Q X``.

    Rounding makes the smallest eigenvalues of ``R`` slightly negative, and each step multiplies a small one by about
    ``a^2``. A restart computes ``R`` anew from ``Q X`` before that grows.

    Args:
        X: (rows x cols) or (n x rows x cols), ``rows <= cols``, in fp32 or fp16; never bf16, whose rounding the form
            amplifies to errors of 0.3 and more. Overwritten where there are restarts.
        restarts: steps after which the Gram matrix is computed anew; ascending, below the number of steps.
        apply: ``(Q, X, out=)`` computes ``Q X``; by default torch.
        normalize: ``X`` has any norm, as :func:`scaled` leaves it. It is divided out on the short side: its square is
            the trace of the first Gram matrix, which ``watch`` sees undivided.
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
    """:func:`iterate_gram` for fp16 ``X`` of norm :data:`UNIT_IN_FP16`."""
    unit = UNIT_IN_FP16
    wanted = None if watch is None else (lambda step, R: watch(step, R.float() / unit**2))
    schedule = [(a, b / unit**2, c / unit**4) for a, b, c in schedule]
    return products.rescaled(iterate_gram(X, schedule, restarts, products, apply, wanted), dtype, unit)


UNIT_IN_FP16 = 128.0
"""The norm of matrices in fp16. With norm 1 a large Gram matrix has entries of 1e-6, of which fp16 keeps two digits.
With this the first trace is 2^14, and no later entry reaches 65504, fp16's largest number, while singular values stay
below 1.99."""


def gram_factor(
    R: Tensor,
    segment: Sequence[Coefficients],
    products: Products,
    work: Sequence[Tensor],
    watch: Watch | None = None,
    start: int = 0,
) -> Tensor:
    """``Q``, the product of the polynomials between two restarts.

    ``R`` before step ``start``, (rows x rows) or (n x rows x rows), and the three tensors ``work`` are overwritten; one
    of these is returned. ``watch`` does not see the first ``R``.
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
    """Operations of the standard form, ``rows <= cols``.

    ``share`` is the computed part of a symmetric product, 1/2 to 1. Polynomials of third order need no square.
    """
    squares = sum(c != 0 for _, _, c in schedule)
    return len(schedule) * (2 * share + 2) * rows**2 * cols + squares * 2 * share * rows**3


def gram_flops(
    rows: int, cols: int, schedule: Sequence[Coefficients], restarts: Sequence[int], share: float = 1.0
) -> float:
    """Operations of the Gram form, as :func:`standard_flops`.

    All steps but the first of a segment multiply ``Q``, all but its last advance ``R`` by two products.
    """
    segments = len(restarts) + 1
    cubes = sum(c != 0 for _, _, c in schedule) + 3 * (len(schedule) - segments)
    return segments * (2 * share + 2) * rows**2 * cols + cubes * 2 * share * rows**3


def iteration_bytes(rows: int, cols: int, restarts: Restarts | None, itemsize: int) -> int:
    """Memory of an iteration; ``restarts`` None is the standard form."""
    return (2 * rows * cols + (3 if restarts is None else 5) * rows * rows) * itemsize


def restarts_for(
    coefficient_type: CoefficientType, steps: int, precision: MatmulPrecision, extra: int = 0
) -> Restarts | None:
    """Restarts, with ``extra`` (0 or 1) more; None: standard form."""
    if not isinstance(coefficient_type, str):
        return None
    schedule = coefficient_type, steps
    if precision != "highest" and schedule in RESTARTS_IN_LOWER_PRECISION:
        return RESTARTS_IN_LOWER_PRECISION[schedule][extra]
    return RESTARTS.get(schedule, (None, None))[extra]
