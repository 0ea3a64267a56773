"""The Newton-Schulz iteration in its standard form, for one matrix or a stack of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients, get_coefficients
from megatron_eopt.orthogonalize.precision import (
    MatmulPrecision,
    fp32_products,
    product_dtype,
    validate_matmul_precision,
)


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficient_type: str | Sequence[Coefficients] = "quintic",
    *,
    fp32_matmul_prec: MatmulPrecision = "highest",
) -> Tensor:
    """Orthogonal factor of a matrix, approximately: ``U p(S) V^T`` for ``x = U S V^T``, with ``p(S)`` near 1.

    With the short side of ``X = x / ||x||_F`` first, each step is ``X <- a X + (b A + c A^2) X``, ``A = X X^T``
    (Jordan et al., 2024; https://kellerjordan.github.io/posts/muon/). The norm of the input does not matter, however
    small: there is no epsilon that would stop layers whose gradients were clipped hard. A zero matrix gives zero.

    Args:
        x: matrix (rows x cols) or stack of matrices (n x rows x cols), of any floating dtype; may be empty.
        steps: number of steps; see :func:`~megatron_eopt.orthogonalize.coefficients.get_coefficients` for what a set
            can serve.
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        fp32_matmul_prec: precision of the products: ``medium`` (or ``low``) bf16 with fp32 accumulation, ``high`` TF32
            where the device has it, ``highest`` fp32. An fp64 input stays in fp64.

    Returns:
        A new tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: if ``x`` is not floating point.
        ValueError: if ``x`` is neither 2-D nor 3-D, or for a schedule or a precision that does not exist.
    """
    check_matrices(x)
    validate_matmul_precision(fp32_matmul_prec)
    schedule = get_coefficients(coefficient_type, steps)
    if x.numel() == 0:
        return torch.empty_like(x)
    transposed = x.size(-2) > x.size(-1)
    X = x.mT if transposed else x
    X = normalized(X, squared_norm(X)).to(product_dtype(X.dtype, fp32_matmul_prec))
    with fp32_products(fp32_matmul_prec):
        X = iterate(X, schedule)
    return (X.mT if transposed else X).to(x.dtype)


def check_matrices(x: Tensor) -> None:
    """Check that ``x`` is a matrix or a stack of matrices of floating dtype.

    Raises:
        TypeError: for another dtype.
        ValueError: for another number of dimensions.
    """
    if not x.is_floating_point():
        raise TypeError(f"only floating-point matrices can be orthogonalized, got {x.dtype}")
    if x.ndim not in (2, 3):
        raise ValueError(f"expected a matrix or a stack of matrices (2-D or 3-D), got shape {tuple(x.shape)}")


def squared_norm(x: Tensor) -> Tensor:
    """Squared Frobenius norm of each matrix, (1 x 1) or (n x 1 x 1), in fp64.

    Taken of ``x`` divided by its largest entry, because squares of entries below 1e-19 vanish in fp32, and those of
    entries above 1e19 overflow.
    """
    x = x.to(_wide(x.dtype))
    dims = (-2, -1)
    # the norm of order infinity, which torch reduces ten times more slowly
    largest = torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True))
    norm = torch.linalg.vector_norm(x / _divisor(largest), dim=dims, keepdim=True)
    return (norm.double() * largest.double()).square()


def normalized(x: Tensor, squared: Tensor) -> Tensor:
    """``x`` divided by the root of ``squared``, in fp32 (fp64 for an fp64 ``x``); zero where ``squared`` is zero."""
    dtype = _wide(x.dtype)
    return x.to(dtype) / _divisor(squared.sqrt().to(dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _divisor(norm: Tensor) -> Tensor:
    # a zero matrix divided by 1 stays zero, without asking the device whether it is one
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def iterate(
    X: Tensor, schedule: Sequence[Coefficients], all_reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Apply the polynomials of a schedule to a normalized ``X``, iterating on the Gram matrix of its rows.

    Args:
        X: (rows x cols) or (n x rows x cols), best with the short side first.
        schedule: one ``(a, b, c)`` per step.
        all_reduce: sums a Gram matrix over the ranks that hold the other columns of ``X``.
    """
    fused = torch.baddbmm if X.ndim == 3 else torch.addmm
    for a, b, c in schedule:
        A = X @ X.mT
        if all_reduce is not None:
            A = all_reduce(A)
        if c == 0:
            X = fused(X, A, X, beta=a, alpha=b)
        else:
            X = fused(X, fused(A, A, A, beta=b, alpha=c), X, beta=a)
    return X
