"""The largest singular value of a matrix, by power iteration, and the best factors of low rank."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.forms import nonzero

SumOverRanks = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Sums tensors, one for each matrix, over the ranks that hold its other rows; those of whole matrices stay."""

Stack = Tensor | Callable[[], Tensor]
"""Equal matrices (... x rows x cols), or what makes the stack of them whenever it is needed, so that none is kept."""


def start_vector(size: int, seed: int = 0) -> Tensor:
    """A unit vector to start a power iteration with: the same for the same arguments, on every rank.

    (size,) normally distributed entries, in fp32, on the CPU. torch's own generators are neither asked nor moved.
    """
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    return x / nonzero(torch.linalg.vector_norm(x))


def power_iteration(matrix: Tensor, u: Tensor, steps: int = 1) -> tuple[Tensor, Tensor]:
    """Singular vectors of the largest singular value of ``W``, approximately.

    Each step is ``v <- W^T u``, ``u <- W v``, both divided by their norms. With ``v`` of the last step,
    :func:`rayleigh_quotient` is the singular value: never more than it, and off by the square of what ``u`` is off by.
    ``u`` stays as it is where it would become zero (for ``W = 0``, or ``u`` orthogonal to all columns).

    Args:
        matrix: (... x rows x cols), of any floating dtype; the products are in fp32 (fp64 for an fp64 matrix).
        u: (... x rows), of norm 1, such as :func:`start_vector`; a few entries of the true vector in it are enough.
        steps: at least 1. One is enough where ``u`` is that of a matrix that was nearly the same.

    Returns:
        ``u`` (... x rows) and ``v`` (... x cols), new tensors. Nothing waits for the device.

    Raises:
        ValueError: for fewer than one step, or shapes that do not fit.
    """
    return power_iterations([matrix], [u], steps)[0][:2]


def rayleigh_quotient(matrix: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """``u^T W v``, the singular value of ``W`` that belongs to the unit vectors ``u`` and ``v``.

    Args:
        matrix: (... x rows x cols), of any floating dtype; the products are in fp32 (fp64 for an fp64 matrix).
        u: (... x rows).
        v: (... x cols).

    Returns:
        (...), without waiting for the device.

    Raises:
        ValueError: for shapes that do not fit.
    """
    W = _wide(matrix)
    return (_fitting("u", u, W) * _times(W, v)).sum(-1)


def power_iterations(
    matrices: Sequence[Stack], us: Sequence[Tensor], steps: int, summed: SumOverRanks = list
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """:func:`power_iteration` of many stacks in step with each other, of which a rank may hold only some rows.

    Returns also ``W v`` (... x rows), for quotients. ``summed`` is called twice in each step, so that ranks exchange
    once for all matrices.
    """
    if steps < 1:
        raise ValueError(f"a power iteration has at least 1 step, got {steps}")
    for _ in range(steps):
        products = summed([_times(W, u, "u") for W, u in zip(matrices, us, strict=True)])
        vs = [v / nonzero(_norm(v)).to(v.dtype) for v in products]
        images = [_times(W, v) for W, v in zip(matrices, vs, strict=True)]
        norms = [squared.sqrt() for squared in summed([_norm(x).square() for x in images])]
        found = zip(us, images, norms, strict=True)
        us = [torch.where(norm == 0, u.to(x.dtype), x / nonzero(norm).to(x.dtype)) for u, x, norm in found]
    return list(zip(us, vs, images, strict=True))


def low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of the closest matrix of low rank: ``W ~ A B^T``, both factors with the same singular values.

    With ``W = U S V^T``: ``A = U_r sqrt(S_r)`` and ``B = V_r sqrt(S_r)``, of the ``r`` largest singular values. They
    come from the eigenvectors of the Gram matrix of the short side, in fp64: that takes fewer operations than a
    decomposition of the matrix, and squaring leaves 1e-8 of ``||W||``, less than fp32 does.

    Returns ``A`` (m x r) and ``B`` (n x r) in fp32 (fp64 for an fp64 matrix), and all singular values in fp64, the
    largest first.
    """
    if not 1 <= rank <= min(matrix.shape):
        raise ValueError(f"a matrix {tuple(matrix.shape)} has factors of rank 1 to {min(matrix.shape)}, got {rank}")
    transposed = matrix.size(0) > matrix.size(1)
    W = (matrix.mT if transposed else matrix).double()
    squares, U = torch.linalg.eigh(W @ W.mT)
    S = squares.clamp(min=0).sqrt().flip(0)
    root, U = S[:rank].sqrt(), U.flip(1)[:, :rank]
    # A B^T = U U^T W whatever rounding made of a small singular value
    A, B = U * root, W.mT @ U / nonzero(root)
    dtype = _wide(matrix).dtype
    A, B = A.to(dtype), B.to(dtype)
    return (B, A, S) if transposed else (A, B, S)


def _wide(matrix: Stack) -> Tensor:
    x = matrix if isinstance(matrix, Tensor) else matrix()
    return x if x.dtype == torch.float64 else x.float()


def _norm(x: Tensor) -> Tensor:
    # in fp64, where no square vanishes or overflows
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)


def _times(matrix: Stack, x: Tensor, name: str = "v") -> Tensor:
    """``W v``, or ``W^T u``."""
    W = _wide(matrix)
    return ((W.mT if name == "u" else W) @ _fitting(name, x, W).unsqueeze(-1)).squeeze(-1)


def _fitting(name: str, x: Tensor, W: Tensor) -> Tensor:
    """``u`` or ``v`` in the dtype of ``W``, if it is as long as the columns or the rows of ``W``."""
    shape = (*W.shape[:-2], W.size(-2 if name == "u" else -1))
    if x.shape != shape:
        raise ValueError(
            f"{name} of a matrix {tuple(W.shape)} has the shape {shape}, got {tuple(x.shape)}: leading dimensions are "
            f"of a stack"
        )
    return x.to(W.dtype)
