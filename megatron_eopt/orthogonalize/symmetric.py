"""Products whose result is known to be symmetric: half of it need not be computed.

Two of them are all that Newton-Schulz and its Gram form need beside plain ones: the Gram matrix ``X X^T``, and
``beta C + alpha A B`` for symmetric matrices that commute (polynomials of one matrix do).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SMALLEST_BLOCKED = 512
"""Rows from which on :class:`Blocked` is taken for fp32 on a CPU: about where it begins to pay on two cores."""


class Products(Protocol):
    """A way to compute symmetric products of one matrix or a stack of them.

    ``out`` is written to and returned; it must be none of the inputs. Without it the result is a new tensor: on a CPU
    fresh memory costs a good part of a product of this size, so loops bring their own.
    """

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``X X^T``, (rows x rows) or (n x rows x rows), for ``X`` (rows x cols) or (n x rows x cols)."""
        ...

    def addmm(self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
        """``beta C + alpha A B`` for symmetric ``A``, ``B`` that commute and symmetric ``C``, all (rows x rows)."""
        ...


@dataclass(frozen=True)
class Dense:
    """Plain products by torch: everything is computed."""

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`Products`."""
        return torch.matmul(x, x.mT, out=out)

    def addmm(self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
        """See :class:`Products`."""
        return (torch.baddbmm if c.ndim == 3 else torch.addmm)(c, a, b, beta=beta, alpha=alpha, out=out)


@dataclass(frozen=True)
class Blocked:
    """Products of one matrix by torch in blocks: of two mirrored blocks one is computed and copied.

    A matrix is cut into halves, whose diagonal blocks are cut again, ``levels`` times in all. With one, two and three
    levels three quarters, five eighths and nine sixteenths of the products are left. Blocks of one size are computed as
    one stack, so that each core has blocks of its own.

    Matrices whose rows are no multiple of ``2^levels``, and stacks, are computed whole.
    """

    levels: int = 2

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`Products`."""
        if not self._serves(x):
            return Dense().gram(x, out)
        out = x.new_empty(x.size(0), x.size(0)) if out is None else out
        return self._fill(out, x, x, beta=0.0, alpha=1.0)

    def addmm(self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
        """See :class:`Products`."""
        if not self._serves(c):
            return Dense().addmm(c, a, b, beta=beta, alpha=alpha, out=out)
        out = torch.empty_like(c) if out is None else out
        return self._fill(out.copy_(c), a, b, beta=beta, alpha=alpha)

    def _serves(self, x: Tensor) -> bool:
        return x.ndim == 2 and x.size(0) % 2**self.levels == 0

    def _fill(self, out: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> Tensor:
        """``out <- beta out + alpha A B^T``, which is symmetric."""
        for level in range(self.levels):
            # above the diagonal: the rows of the first half of each pair, the columns of the second
            pairs = 2**level
            rows, cols = (x.unflatten(0, (pairs, 2, -1)) for x in (a, b))
            upper = _stack(out, pairs, 2 * pairs, 0, 1)
            upper.baddbmm_(rows[:, 0], cols[:, 1].mT, beta=beta, alpha=alpha)
            _stack(out, pairs, 2 * pairs, 1, 0).copy_(upper.mT)
        rows, cols = (x.unflatten(0, (2**self.levels, -1)) for x in (a, b))
        _stack(out, 2**self.levels, 2**self.levels, 0, 0).baddbmm_(rows, cols.mT, beta=beta, alpha=alpha)
        return out


def _stack(x: Tensor, count: int, parts: int, row: int, col: int) -> Tensor:
    """``count`` square blocks along the diagonal of ``x`` cut into ``parts``, the first at (row, col), as a stack."""
    size, stride = x.size(0) // parts, x.stride()
    step = size * parts // count * (stride[0] + stride[1])
    return x.as_strided(
        (count, size, size), (step, *stride), x.storage_offset() + size * (row * stride[0] + col * stride[1])
    )
