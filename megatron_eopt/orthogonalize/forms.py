"""The two forms of Newton-Schulz: arithmetic, cost and restarts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from megatron_eopt.kernels.precision import MatmulPrecision, in_precision
from megatron_eopt.kernels.products import Products, scaled, square_work
from megatron_eopt.orthogonalize.coefficients import Coefficients, CoefficientType

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

# (A, B, out, divisor) writes A B over a power of two to `out`
Apply = Callable[[Tensor, Tensor, Tensor, float], object]


def multiplied(A: Tensor, B: Tensor, out: Tensor, divisor: float = 1.0) -> Tensor:
    """``A B`` over a power of two, of matrices or stacks, written to ``out``."""
    if divisor == 1:
        product = torch.bmm if A.ndim == 3 else torch.mm
        return product(A, B, out=out)
    fused = torch.baddbmm if A.ndim == 3 else torch.addmm
    return fused(out, A, B, beta=0.0, alpha=1 / divisor, out=out)


def begins_in(out: Tensor | None, products: int) -> Tensor | None:
    """Memory of the result, if ``X`` is to begin there: with its successor in turn, it ends there.

    Only where entries of rows lie side by side: what is read as rows in each step is slower elsewhere.
    """
    return out if out is not None and out.is_contiguous() and products % 2 == 0 else None


def successor(X: Tensor, out: Tensor | None, products: int) -> Tensor:
    """Memory of what is made of ``X`` by the first of so many products."""
    if out is not None and (products == 1 or (out.is_contiguous() and products % 2)):
        return out
    return torch.empty_like(X)


def nonzero(norm: Tensor) -> Tensor:
    """1 in place of zeros, without asking the device."""
    return norm + (norm == 0)


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The decided iteration for one shape, dtype and device."""

    schedule: tuple[Coefficients, ...]  # one (a, b, c) per step
    restarts: Restarts | None  # of the Gram form; None for the standard form
    dtype: torch.dtype  # of the products
    products: Products
    precision: MatmulPrecision | None  # of fp32 products; None in bf16 and fp64
    transposed: bool  # whether the matrices have more rows than columns
    chunk: int  # matrices of a stack that are worked on at once
    one_by_one: bool  # whether single matrices are faster than a stack
    propagate_nan: bool  # whether a matrix that is not finite gives NaN, or zero

    def __call__(self, x: Tensor) -> Tensor:
        """The orthogonal factors of a matrix or a stack."""
        if x.ndim == 3 and x.size(0) > self.chunk:
            out = torch.empty_like(x)
            for part, of_part in zip(x.split(self.chunk), out.split(self.chunk), strict=True):
                self.run(part, out=of_part)
            return out
        return self.run(x)

    def run(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Orthogonalize at most ``chunk`` matrices, into ``out``.

        ``out`` may be the memory of ``x``, in the dtype of :meth:`factor_dtype`, which costs no pass. Without it the
        result is a new tensor in the dtype of ``x``.
        """
        if x.numel() == 0:
            return torch.empty_like(x) if out is None else out
        X = x.mT if self.transposed else x
        last = out.mT if out is not None and self.transposed else out  # what the last product is written to
        if last is not None and last.dtype != self.dtype:
            last = None
        products = len(self.schedule) if self.restarts is None else 1 + len(self.restarts)
        first = begins_in(last, products)
        if x.device.type == "cpu" and not X.is_contiguous():  # it transposes copies far faster
            X = X.clone(memory_format=torch.contiguous_format)
            last = None
            first = X if X.dtype == self.dtype else None
        with self.in_precision():
            factor = self._standard(X, first, last) if self.restarts is None else self._gram(X, first, last)
        if self.transposed:
            factor = factor.mT
        if out is None:
            return factor.to(x.dtype)
        if last is None:
            out.copy_(factor)
        return out

    def flops(self, rows: int, cols: int) -> float:
        """Operations of a matrix, ``rows`` first in its products."""
        share = self.products.share(rows)
        if self.restarts is None:
            return standard_flops(rows, cols, self.schedule, share)
        return gram_flops(rows, cols, self.schedule, self.restarts, share)

    def bytes(self, rows: int, cols: int) -> int:
        """Memory of a matrix at work."""
        return iteration_bytes(rows, cols, self.restarts, self.dtype.itemsize)

    def factor_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of factors of matrices in ``dtype``: that of the products, if it has as many bytes."""
        return self.dtype if self.dtype.itemsize == dtype.itemsize else dtype

    def in_precision(self) -> AbstractContextManager[None]:
        """A context in which products have this iteration's precision."""
        return nullcontext() if self.precision is None else in_precision(self.dtype, self.precision)

    def _standard(self, x: Tensor, first: Tensor | None, last: Tensor | None) -> Tensor:
        """``X <- a X + (b A + c A^2) X``, ``A = X X^T``, for each ``(a, b, c)``, from ``x`` over its norm.

        ``first`` is memory of the first ``X``, and ``last`` of the result.
        """
        products = self.products
        steps = len(self.schedule)
        X = products.normalized(x, self.dtype, propagate_nan=self.propagate_nan, into=first)
        fused = torch.baddbmm if X.ndim == 3 else torch.addmm
        gram, factor = square_work(X, 2)
        Y = successor(X, last, steps)
        for step, (a, b, c) in enumerate(self.schedule):
            if last is not None and step + 1 == steps:
                Y = last
            A = products.gram(X, out=gram)
            if c == 0:
                fused(X, A, X, beta=a, alpha=b, out=Y)
            else:
                Z = products.addmm(A, A, A, beta=b, alpha=c, out=factor)
                fused(X, Z, X, beta=a, out=Y)
            X, Y = Y, X
        return X

    def _gram(self, x: Tensor, first: Tensor | None, last: Tensor | None) -> Tensor:
        assert self.restarts is not None
        products = self.products
        keep = self.propagate_nan
        if self.dtype == torch.float16:
            X = products.normalized(x, self.dtype, unit=UNIT_IN_FP16, propagate_nan=keep, into=first)
            return iterate_gram_fp16(X, self.schedule, self.restarts, products, out=last)
        X, _ = scaled(x, self.dtype, keep, first)
        return iterate_gram(X, self.schedule, self.restarts, products, normalize=True, out=last)


def iterate_gram(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    products: Products,
    apply: Apply = multiplied,
    normalize: bool = False,
    divisor: float = 1.0,
    out: Tensor | None = None,
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
        apply: computes ``Q X`` over a number, as :func:`multiplied`.
        normalize: ``X`` has any norm, as :func:`scaled` leaves it. It is divided out on the short side: its square is
            the trace of the first Gram matrix.
        divisor: a power of two by which the result is divided.
        out: memory of the result, in the dtype of ``X``: that of ``X`` only if :func:`begins_in` says so.
    """
    R, *work = square_work(X, 4)
    Y = successor(X, out, 1 + len(restarts))
    for start, end in pairwise([0, *restarts, len(schedule)]):
        R = products.gram(X, out=R)
        if normalize and start == 0:
            squared = nonzero(R.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None])
            R.div_(squared)
        Q = gram_factor(R, schedule[start:end], products, work)
        if normalize and start == 0:
            Q.mul_(squared.rsqrt())
        is_last = end == len(schedule)
        if is_last and out is not None:
            Y = out
        apply(Q, X, Y, divisor if is_last else 1.0)
        X, Y = Y, X
    return X


def iterate_gram_fp16(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    products: Products,
    apply: Apply = multiplied,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`iterate_gram` for fp16 ``X`` of norm :data:`UNIT_IN_FP16`."""
    unit = UNIT_IN_FP16
    return iterate_gram(X, in_units(schedule, unit), restarts, products, apply, divisor=unit, out=out)


def in_units(schedule: Sequence[Coefficients], unit: float) -> list[Coefficients]:
    """A schedule for matrices of norm ``unit``."""
    return [(a, b / unit**2, c / unit**4) for a, b, c in schedule]


UNIT_IN_FP16 = 128.0
"""The norm of matrices in fp16. With norm 1 a large Gram matrix has entries of 1e-6, of which fp16 keeps two digits.
With this the first trace is 2^14, and no later entry reaches 65504, fp16's largest number, while singular values stay
below 1.99."""


def gram_factor(
    R: Tensor,
    segment: Sequence[Coefficients],
    products: Products,
    work: Sequence[Tensor],
) -> Tensor:
    """``Q``, the product of the polynomials between two restarts.

    ``R`` before them, (rows x rows) or (n x rows x rows), and the three tensors ``work`` are overwritten; one of these
    is returned.
    """
    Z, T, Q = work
    for index, (a, b, c) in enumerate(segment):
        if c == 0:
            torch.mul(R, b, out=Z)
        else:
            Z = products.addmm(R, R, R, beta=b, alpha=c, out=Z)
        if index + 1 < len(segment):
            # P (P R), not P^2 R: squaring P first costs up to five times the error
            T = products.addmm(R, Z, R, beta=a, alpha=1.0, out=T)
            R = products.addmm(T, Z, T, beta=a, alpha=1.0, out=R)
        if index == 0:
            Z.diagonal(dim1=-2, dim2=-1).add_(a)
            Q, Z = Z, Q
        else:
            T = products.addmm(Q, Q, Z, beta=a, alpha=1.0, out=T)
            Q, T = T, Q
    return Q


def standard_flops(
    rows: int,
    cols: int,
    schedule: Sequence[Coefficients],
    share: float = 1.0,
) -> float:
    """Operations of the standard form, ``rows <= cols``.

    ``share`` is the computed part of a symmetric product, 1/2 to 1. Polynomials of third order need no square.
    """
    squares = sum(c != 0 for _, _, c in schedule)
    return len(schedule) * (2 * share + 2) * rows**2 * cols + squares * 2 * share * rows**3


def gram_flops(
    rows: int,
    cols: int,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    share: float = 1.0,
) -> float:
    """Operations of the Gram form, as :func:`standard_flops`.

    All steps but the first of a segment multiply ``Q``, all but its last advance ``R`` by two products.
    """
    segments = len(restarts) + 1
    cubes = sum(c != 0 for _, _, c in schedule) + 3 * (len(schedule) - segments)
    return segments * (2 * share + 2) * rows**2 * cols + cubes * 2 * share * rows**3


def iteration_bytes(
    rows: int,
    cols: int,
    restarts: Restarts | None,
    itemsize: int,
) -> int:
    """Memory of an iteration; ``restarts`` None is the standard form."""
    squares = 3 if restarts is None else 5
    return (2 * rows * cols + squares * rows * rows) * itemsize


def restarts_for(
    coefficient_type: CoefficientType,
    steps: int,
    precision: MatmulPrecision,
    extra: int = 0,
) -> Restarts | None:
    """Restarts, with ``extra`` (0 or 1) more; None: standard form."""
    if not isinstance(coefficient_type, str):
        return None
    schedule = coefficient_type, steps
    if precision != "highest" and schedule in RESTARTS_IN_LOWER_PRECISION:
        return RESTARTS_IN_LOWER_PRECISION[schedule][extra]
    return RESTARTS.get(schedule, (None, None))[extra]
