"""The Gram form of Newton-Schulz: everything but the first and the last product happens on the short side."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.symmetric import Products


def iterate_gram(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int],
    products: Products,
    apply: Callable[..., Tensor] = torch.matmul,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Apply the polynomials of a schedule to a normalized ``X`` through its Gram matrix.

    The standard form multiplies ``X`` by ``P = a I + Z``, ``Z = b R + c R^2``, ``R = X X^T``, in every step. All these
    matrices are polynomials of ``R``: they commute, and the next Gram matrix is ``P R P``. So the product ``Q`` of all
    ``P`` is gathered on the short side and applied at the end: ``X <- Q X``.

    Rounding makes the smallest eigenvalues of ``R`` slightly negative, and each step multiplies a small one by about
    ``a^2``. A restart computes ``R`` anew from ``Q X`` before that grows.

    Args:
        X: (rows x cols) or (n x rows x cols) with ``rows <= cols``, in fp32 or fp16; never bf16, whose rounding the
            form amplifies to errors of 0.3 and more. Written to where there are restarts.
        schedule: one ``(a, b, c)`` per step.
        restarts: steps, counted from 1, after which the Gram matrix is computed anew; ascending, below the number of
            steps.
        products: computes the symmetric products.
        apply: ``(Q, X, out=)``, computes ``Q X``.
        watch: is shown the number of each step, from 0, and the Gram matrix before it.

    Returns:
        A tensor of the shape of ``X``, which may be ``X``.
    """
    R, *work = (X.new_empty(*X.shape[:-1], X.size(-2)) for _ in range(5))
    Y = torch.empty_like(X)
    for start, end in zip([0, *restarts], [*restarts, len(schedule)], strict=True):
        Q = _factor(products.gram(X, out=R), schedule[start:end], products, work, start, watch)
        X, Y = apply(Q, X, out=Y), X
    return X


def _factor(
    R: Tensor,
    segment: Sequence[Coefficients],
    products: Products,
    work: Sequence[Tensor],
    start: int,
    watch: Callable[[int, Tensor], None] | None,
) -> Tensor:
    """The product ``Q`` of the polynomials of one segment, of the Gram matrix ``R``, which is written to."""
    Z, T, Q, spare = work
    for index, (a, b, c) in enumerate(segment):
        if watch is not None:
            watch(start + index, R)
        Z = torch.mul(R, b, out=Z) if c == 0 else products.addmm(R, R, R, beta=b, alpha=c, out=Z)
        if index == 0:
            Q.copy_(Z).diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q, spare = products.addmm(Q, Q, Z, beta=a, alpha=1.0, out=spare), Q
        if index + 1 < len(segment):
            # P (P R), not P^2 R: squaring P first costs up to five times the error
            T = products.addmm(R, Z, R, beta=a, alpha=1.0, out=T)
            R = products.addmm(T, Z, T, beta=a, alpha=1.0, out=R)
    return Q
