"""This rank's pieces in the Gram form: their part of the Gram matrices, and the factors applied to them."""

import math

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.products import Products

_LARGEST_SQUARE = 14
"""No entry of a first Gram matrix of one rank exceeds 2^14, a quarter of fp16's range."""

_LARGEST_SHIFT = 100


class LocalGram:
    """Pieces of a stack of matrices, of any norm at first, of norm ``unit`` (all ranks' together) from then on.

    Squares of small entries vanish, and those of large ones overflow, in fp16 very soon. So each piece is multiplied by
    a power of two of its own, which is exact and is undone in fp32 on its Gram matrix. The norm of the whole may lie
    between 1e-15 and 1e18.

    Attributes:
        dtype: of the iteration, fp16 or wider.
        unit: 128 in fp16, as :func:`~megatron_eopt.orthogonalize.forms.iterate_gram_fp16` has it and for its reasons,
            and 1 otherwise.
    """

    def __init__(self, stack: Tensor, *, transposed: bool, dtype: torch.dtype) -> None:
        """Take a stack of pieces.

        Args:
            stack: (n x rows x cols); columns may be missing.
            transposed: whether the columns are the side whose Gram matrix is taken, the one that is not cut.
            dtype: of the iteration.
        """
        self.dtype = dtype
        self.unit = 128.0 if dtype == torch.float16 else 1.0
        self._transposed = transposed
        self._dtype_of_pieces = stack.dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        shift = self._shift(stack)
        self._X = (stack.to(self._wide) * _power_of_two(shift, self._wide)).to(dtype)
        self._undo: Tensor | None = _power_of_two(-shift, self._wide)

    @property
    def oriented(self) -> Tensor:
        """The pieces with the side first that is not cut: (n x rows x cols) or its transposes, a view."""
        return self._X.mT if self._transposed else self._X

    def gram(self, products: Products) -> Tensor:
        """Gram matrices of the pieces, a new stack in fp32 (fp64 for such pieces); to be summed over the ranks."""
        gram = products.gram(self.oriented).to(self._wide)
        return gram if self._undo is None else gram.mul_(self._undo).mul_(self._undo)

    def apply(self, Q: Tensor) -> None:
        """Multiply by symmetric factors (n x rows x rows); the first ones also divide the norm out."""
        if self._undo is not None:
            Q = Q * self._undo * self.unit
            self._undo = None
        Q = Q.to(self.dtype)
        self._X = torch.bmm(self._X, Q) if self._transposed else torch.bmm(Q, self._X)

    def results(self, factor: float) -> list[Tensor]:
        """The pieces as they are now, in their own dtype, times ``factor`` for matrices of norm 1."""
        X = self._X if self.unit == 1 else self._X.float().div_(self.unit)
        return list(X.to(self._dtype_of_pieces).mul_(factor).unbind())

    def _shift(self, stack: Tensor) -> Tensor:
        """Exponents (n x 1 x 1) of the powers of two; 0 for a piece that is empty, zero or not finite."""
        if stack.numel() == 0:
            return torch.zeros(stack.size(0), 1, 1, dtype=torch.int32, device=stack.device)
        largest = torch.maximum(stack.amax((-2, -1), keepdim=True), -stack.amin((-2, -1), keepdim=True)).float()
        largest = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        # an entry of the Gram matrix is at most the number of columns times the largest square
        columns = stack.size(-2 if self._transposed else -1)
        room = (_LARGEST_SQUARE - math.ceil(math.log2(columns))) // 2
        return (room - torch.frexp(largest).exponent).clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """``2^exponent`` for int32 exponents of normal fp32 numbers, exactly: powers need not be rounded so."""
    return ((exponent + 127) << 23).view(torch.float32).to(dtype)
