"""The standard form of Newton-Schulz: every step multiplies the matrix itself."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.symmetric import Dense, Products, square_work


def iterate(
    X: Tensor,
    schedule: Sequence[Coefficients],
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    products: Products | None = None,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Apply the polynomials of a schedule to a normalized ``X``, iterating on the Gram matrix of its rows.

    Args:
        X: (rows x cols) or (n x rows x cols), best with the short side first; written to.
        schedule: one ``(a, b, c)`` per step.
        all_reduce: sums a Gram matrix over the ranks that hold the other columns of ``X``.
        products: computes the symmetric products; plainly where None is given.
        watch: is shown the number of each step, from 0, and the Gram matrix before it.
    """
    fused = torch.baddbmm if X.ndim == 3 else torch.addmm
    products = products or Dense()
    gram, factor = square_work(X, 2)
    # torch multiplies a stack in bf16 into a transposed result some thousand times more slowly than into a plain one
    X = X.contiguous() if X.ndim == 3 else X
    Y = torch.empty_like(X)
    for step, (a, b, c) in enumerate(schedule):
        A = products.gram(X, out=gram)
        if all_reduce is not None:
            A = all_reduce(A)
        if watch is not None:
            watch(step, A)
        if c == 0:
            X, Y = fused(X, A, X, beta=a, alpha=b, out=Y), X
        else:
            X, Y = fused(X, products.addmm(A, A, A, beta=b, alpha=c, out=factor), X, beta=a, out=Y), X
    return X
