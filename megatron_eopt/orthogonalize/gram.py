"""The Gram form of Newton-Schulz: everything but the first and the last product happens on the short side."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.normalize import nonzero
from megatron_eopt.orthogonalize.symmetric import Products, square_work

_FP16_SCALE = 128.0


def iterate_gram(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    products: Products,
    apply: Callable[..., Tensor] = torch.matmul,
    watch: Callable[[int, Tensor], None] | None = None,
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
            form amplifies to errors of 0.3 and more.
        schedule: one ``(a, b, c)`` per step.
        restarts: steps, counted from 1, after which the Gram matrix is computed anew; ascending, below the number of
            steps.
        products: computes the symmetric products.
        apply: ``(Q, X, out=)``, computes ``Q X``.
        watch: is shown the number of each step, from 0, and the Gram matrix before it.
        normalize: whether ``X`` has another norm, which is divided out on the short side: the trace of the Gram matrix,
            which ``watch`` is shown as it is, is the square of it. For what
            :func:`~megatron_eopt.orthogonalize.normalize.scaled` made.

    Returns:
        A new tensor of the shape of ``X``.
    """
    R, *work = square_work(X, 4)
    Y = torch.empty_like(X)
    spare = torch.empty_like(X) if restarts else Y
    for start, end in zip([0, *restarts], [*restarts, len(schedule)], strict=True):
        R = products.gram(X, out=R)
        if watch is not None:
            watch(start, R)
        if normalize and start == 0:
            squared = nonzero(R.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None])
            Q = factor(R.div_(squared), schedule[:end], products, work, watch).mul_(squared.rsqrt())
        else:
            Q = factor(R, schedule[start:end], products, work, watch, start)
        X = apply(Q, X, out=Y)
        Y, spare = spare, Y
    return X


def iterate_gram_fp16(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    products: Products,
    apply: Callable[..., Tensor] = torch.matmul,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """:func:`iterate_gram` in fp16, for ``X`` of norm 1 in fp32; the result is in fp32.

    The Gram matrix of a large ``X`` of norm 1 has entries of 1e-6, which fp16 keeps two digits of. So ``X`` is taken
    128 times as large, and the coefficients accordingly. The trace of the first Gram matrix is 2^14 then, and no later
    one has an entry of 65504, the largest number of fp16, while singular values stay below 1.99.
    """
    wanted = None if watch is None else (lambda step, R: watch(step, R.float() / _FP16_SCALE**2))
    scaled = [(a, b / _FP16_SCALE**2, c / _FP16_SCALE**4) for a, b, c in schedule]
    X = iterate_gram((X * _FP16_SCALE).half(), scaled, restarts, products, apply, wanted)
    return X.float() / _FP16_SCALE


def factor(
    R: Tensor,
    segment: Sequence[Coefficients],
    products: Products,
    work: Sequence[Tensor],
    watch: Callable[[int, Tensor], None] | None,
    start: int = 0,
) -> Tensor:
    """The product ``Q`` of the polynomials of one segment between restarts.

    Args:
        R: Gram matrix at the start of the segment, (rows x rows) or (n x rows x rows); written to.
        segment: ``(a, b, c)`` of its steps.
        products: computes the symmetric products.
        work: three further tensors like ``R``, one of which is returned.
        watch: is shown the number of each step but the first, and the Gram matrix before it.
        start: number of the first step.
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
