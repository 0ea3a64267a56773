"""Orthonormal bases of the columns of stacked matrices, and of the eigenvectors of symmetric ones.

A GPU has a QR decomposition of one matrix alone, and takes longer for it than for the products that do the same for a
stack: Gram-Schmidt by halves, down to panels whose products have a Cholesky decomposition.
"""

import torch
from torch import Tensor

from megatron_eopt.kernels.precision import fp32_products

PANEL = 128  # columns of a panel
PASSES = 3  # twice is enough for columns that span; the third is for those that are rounding of others
PASSES_OF_FP32 = 2  # of fp32 columns in fp64, whose own rounding is far above that of the products
SHIFT = 1e-13  # of the squares of a panel's columns, in fp64, so that rounding cannot make their products indefinite
# The part of the columns of ``near`` that is added: so far above rounding that no column is in the span of others.
ADDED = {torch.float32: 1e-4, torch.float64: 1e-7}
# Of a symmetric matrix whose largest entry is near 1, added to its diagonal: far below rounding of all but zeros.
EIGEN_SHIFT = 1e-30


def eigenvectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices, the largest first.

    LAPACK's fp32 decomposition ends in an error, or in NaN without one, for some matrices with rows of exact zeros. A
    tiny shift keeps it from that: without it 170 of 1680 degenerate matrices failed, with it none. What fails all the
    same is decomposed in fp64. Matrices are scaled by powers of two, which changes no bits of what is returned.

    Args:
        x: (... x n x n) in fp32 or fp64.

    Raises:
        torch.linalg.LinAlgError: for matrices that are not finite.
    """
    peaks = torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True)
    exponents = torch.frexp(peaks.clamp_(min=torch.finfo(x.dtype).tiny)).exponent
    scaled = torch.ldexp(x, -exponents)
    scaled.diagonal(dim1=-2, dim2=-1).add_(EIGEN_SHIFT)
    try:
        values, vectors = torch.linalg.eigh(scaled)
        found = x.is_cuda or bool(vectors.isfinite().all())  # a GPU has been asked by torch
    except torch.linalg.LinAlgError:
        found = False
    if not found:
        values, vectors = torch.linalg.eigh(scaled.double())
    values = torch.ldexp(values.to(x.dtype), exponents[..., 0])
    return values.flip(-1), vectors.to(x.dtype).flip(-1)


def orthonormal_columns(x: Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``Q`` and the diagonal of ``R`` of QR decompositions ``X = Q R``.

    By LAPACK on a CPU, and by products, without a question to the device, on a GPU: see :func:`by_products`.

    Args:
        x: (n x rows x cols) in fp32 or fp64, with at least as many rows as columns.
        near: orthonormal columns that an iteration of them has come from, of the same shape.
    """
    if x.is_cuda:
        return by_products(x, near)
    Q, R = torch.linalg.qr(x)
    return Q, R.diagonal(dim1=1, dim2=2)


def by_products(x: Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`orthonormal_columns` by Gram-Schmidt; ``R`` has a diagonal of at least 0.

    With ``near``, a ten-thousandth of its columns is added to those of ``x``, scaled to length 1 (1e-7 in fp64). That
    leaves eigenvectors as they are, and slows an iteration towards them only where a column is nearly all in the span
    of those before it. Where ``x`` is zero, ``Q`` is ``near``. ``Q`` is then orthonormal whatever ``x`` is, as long as
    it is finite and ``near^T X`` is positive semidefinite up to rounding. Without ``near``, columns in the span of
    those before them are whatever rounding makes of them, or zero.

    Products are in fp64 without ``near``, and exact fp32 of fp32 columns with it, whatever precision is set: rounding
    of TF32 would hide all but the largest columns.
    """
    dtype = torch.float64 if near is None else x.dtype
    tiny = torch.finfo(x.dtype).tiny  # by which zeros are divided
    peaks = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=tiny).to(dtype)
    Q = x / peaks  # so that no square that matters vanishes or overflows
    lengths = torch.linalg.vector_norm(Q, dim=1, keepdim=True).clamp_(min=tiny)
    Q.div_(lengths)
    if near is not None:
        Q.add_(near, alpha=ADDED[x.dtype])
    diagonal = (peaks * lengths)[:, 0]
    identity = torch.eye(min(PANEL, x.size(2)), dtype=torch.float64, device=x.device)
    identity.mul_((1 + SHIFT) ** 0.5)  # columns of length 1 keep it
    with fp32_products("highest"):
        for _ in range(PASSES if dtype == x.dtype else PASSES_OF_FP32):
            diagonal.mul_(torch.cat(_gram_schmidt(Q, identity), 1))
    return Q.to(x.dtype), diagonal.to(x.dtype)


def _gram_schmidt(x: Tensor, identity: Tensor) -> list[Tensor]:
    """Make columns orthonormal in place, as exactly as one pass can; the diagonal of ``R`` in parts (n x cols)."""
    cols = x.size(2)
    if cols <= PANEL:
        return [_cholesky_panel(x, identity[:cols, :cols])]
    half = -(-cols // (2 * PANEL)) * PANEL
    left = x[..., :half]
    right = x[..., half:]
    of_left = _gram_schmidt(left, identity)
    right.baddbmm_(left, left.mT @ right, alpha=-1)
    return of_left + _gram_schmidt(right, identity)


def _cholesky_panel(x: Tensor, identity: Tensor) -> Tensor:
    """``X <- X L^-T`` with ``L L^T = X^T X``, in fp64; the diagonal of ``L``."""
    wide = x.double()
    products = wide.mT @ wide
    # relative to each column, as rounding is; and so that a column of zeros, which stays as it is, divides nothing by 0
    diagonal = products.diagonal(dim1=1, dim2=2)
    tiny = torch.tensor(torch.finfo(wide.dtype).tiny, dtype=wide.dtype)
    torch.add(tiny, diagonal, alpha=1 + SHIFT, out=diagonal)
    L = torch.linalg.cholesky_ex(products).L  # without a question to the device
    inverse = torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False)
    x.copy_(wide @ inverse.mT)
    return L.diagonal(dim1=1, dim2=2)
