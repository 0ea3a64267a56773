"""Matrices divided by their Frobenius norm, whatever its size, without asking the device."""

from collections.abc import Callable

import torch
from torch import Tensor


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


def scaled(x: Tensor, propagate_nan: bool = True) -> tuple[Tensor, Tensor]:
    """Matrices divided by their largest entries; a zero matrix stays zero.

    Squares of entries below 1e-19 vanish in fp32, and those of entries above 1e19 overflow: after this no square that
    matters does.

    Args:
        x: (rows x cols) or (n x rows x cols), with at least one entry.
        propagate_nan: False gives zero for a matrix with entries that are not finite.

    Returns:
        A new tensor in fp32 (fp64 for an fp64 ``x``), and the largest magnitudes, (1 x 1) or (n x 1 x 1), which are
        not finite where an entry is not.
    """
    dims, wide = (-2, -1), torch.float64 if x.dtype == torch.float64 else torch.float32
    # the norm of order infinity, which torch reduces ten times more slowly
    largest = torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True)).to(wide)
    x = x.to(wide) / nonzero(largest)
    if not propagate_nan:
        bad = ~largest.isfinite()
        # a CPU has the answer at once, and a pass over the matrix takes longer than the question
        if x.device.type != "cpu" or bad.any():
            x.masked_fill_(bad, 0)
    return x, largest


def normalized(
    x: Tensor, all_reduce: Callable[[Tensor], Tensor] | None = None, propagate_nan: bool = True
) -> tuple[Tensor, Tensor]:
    """Matrices divided by their Frobenius norms, and the squares of these; a zero matrix stays zero.

    Args:
        x: (rows x cols) or (n x rows x cols), with at least one entry.
        all_reduce: sums squared norms over the ranks that hold the other parts of ``x``.
        propagate_nan: False gives zero for a matrix with entries that are not finite.

    Returns:
        A new tensor in fp32 (fp64 for an fp64 ``x``), and the squared norms, (1 x 1) or (n x 1 x 1) in fp64, which are
        not finite where an entry is not.
    """
    x, largest = scaled(x, propagate_nan)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    squared = (norm.double() * largest.double()).square()
    if all_reduce is not None:
        squared = all_reduce(squared)
        norm = (squared.sqrt() / nonzero(largest.double())).to(x.dtype)
    return x.div_(nonzero(norm)), squared


def nonzero(norm: Tensor) -> Tensor:
    """1 in place of zeros: a zero matrix divided by 1 stays zero, without asking the device whether it is one."""
    return torch.where(norm == 0, torch.ones_like(norm), norm)
