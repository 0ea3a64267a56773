"""The largest singular value by power iteration, and low-rank factors."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.bases import eigenvectors
from megatron_eopt.orthogonalize.forms import nonzero

SumOverRanks = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # over the ranks with a matrix's other rows

Stack = Tensor | Callable[[], Tensor]
"""Equal matrices (... x rows x cols), or a function that makes their stack when needed, so that none is kept."""


def start_vector(size: int, seed: int = 0) -> Tensor:
    """A seeded unit vector, fp32, on the CPU."""
    x = _seeded(size, seed=seed)
    return x / nonzero(torch.linalg.vector_norm(x))


def start_basis(size: int, rank: int, seed: int = 0) -> Tensor:
    """Seeded normal columns of norm near 1 (size x rank), fp32, on the CPU."""
    return _seeded(size, rank, seed=seed) / max(1, size) ** 0.5


def _seeded(*shape: int, seed: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")


def power_iteration(matrix: Tensor, u: Tensor, steps: int = 1) -> tuple[Tensor, Tensor]:
    """Approximate singular vectors of the largest singular value of ``W``.

    Each step is ``v <- W^T u``, ``u <- W v``, both divided by their norms; ``u`` (... x rows, of norm 1) stays where it
    would become zero. The :func:`rayleigh_quotient` with the last ``v`` is the singular value, or less by the square of
    the error of ``u``. One step is enough where ``u`` is that of nearly the same matrix. Products of ``W`` (... x rows
    x cols) are in fp32 (fp64 for an fp64 matrix). Returns new ``u`` and ``v`` (... x cols), without waiting for the
    device.
    """
    ((u, v, _),) = power_iterations([matrix], [u], steps)
    return u, v


def rayleigh_quotient(matrix: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """``u^T W v``; shapes and dtypes as in :func:`power_iteration`."""
    W = _wide(matrix)
    return (u.to(W.dtype) * _times(W, v)).sum(-1)


def power_iterations(
    matrices: Sequence[Stack],
    us: Sequence[Tensor],
    steps: int,
    summed: SumOverRanks = list,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """:func:`power_iteration` of many stacks, perhaps sharded by rows.

    Returns also ``W v`` (... x rows), for quotients. ``summed`` is called twice a step, for all matrices at once.
    """
    us = list(us)
    for _ in range(steps):
        products = [_times(W, u, transposed=True) for W, u in zip(matrices, us, strict=True)]
        vs = [v / nonzero(_norm(v)).to(v.dtype) for v in summed(products)]
        images = [_times(W, v) for W, v in zip(matrices, vs, strict=True)]
        squares = summed([_norm(x).square() for x in images])
        for i, (x, squared) in enumerate(zip(images, squares, strict=True)):
            norm = squared.sqrt()
            us[i] = torch.where(norm == 0, us[i].to(x.dtype), x / nonzero(norm).to(x.dtype))
    return list(zip(us, vs, images, strict=True))


def low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the closest matrix of low rank.

    ``W ~ A B^T``, ``A = U_r sqrt(S_r)`` (m x r), ``B = V_r sqrt(S_r)`` (n x r), of the ``r`` largest singular values of
    ``W = U S V^T``, from the eigenvectors of the short side's Gram matrix in fp64: fewer operations than a
    decomposition of ``W``, and squaring leaves 1e-8 of ``||W||``, less than fp32 does. Also returns all ``S`` in fp64,
    the largest first.
    """
    transposed = matrix.size(0) > matrix.size(1)
    W = matrix.double()
    if transposed:
        W = W.mT
    squares, U = eigenvectors(W @ W.mT)
    S = squares.clamp(min=0).sqrt()
    root = S[:rank].sqrt()
    U = U[:, :rank]
    # A B^T = U U^T W whatever rounding made of a small singular value
    A = U * root
    B = W.mT @ U / nonzero(root)
    dtype = _wide(matrix).dtype
    if transposed:
        A, B = B, A
    return A.to(dtype), B.to(dtype), S


def _wide(matrix: Stack) -> Tensor:
    x = matrix if isinstance(matrix, Tensor) else matrix()
    return x if x.dtype == torch.float64 else x.float()


def _norm(x: Tensor) -> Tensor:
    # in fp64, where no square vanishes or overflows
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)


def _times(matrix: Stack, x: Tensor, transposed: bool = False) -> Tensor:
    """``W v``, or ``W^T u``."""
    W = _wide(matrix)
    if transposed:
        W = W.mT
    return (W @ x.to(W.dtype).unsqueeze(-1)).squeeze(-1)
