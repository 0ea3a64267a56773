"""A Newton-Schulz iteration of which everything is decided, and the figures of health that it can tell."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.forms import (
    Restarts,
    Watch,
    iterate_gram,
    iterate_gram_fp16,
    iterate_standard,
    normalized,
    scaled,
)
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.products import Products


class Health(NamedTuple):
    """Figures of one matrix (0-D) or of each in a stack (1-D), on the device of the matrices.

    Attributes:
        norm: Frobenius norm of the input; not a number where it has entries that are not finite.
        effective_rank: ``trace(R)^2 / ||R||_F^2`` of the input's Gram matrix ``R``: between 1 and the short side, which
            an orthogonal input has.
        residual: ``||R - I||_F / sqrt(short side)`` of the last Gram matrix that was computed, that before the last
            step: 0 for an orthogonal one. The result is closer, but telling how close would take another product.
        finite: False where the input had entries that are not finite; the result is zero there.
    """

    norm: Tensor
    effective_rank: Tensor
    residual: Tensor
    finite: Tensor


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The iteration for matrices of one shape and dtype on one device: all is decided, calling it only computes.

    Attributes:
        schedule: one ``(a, b, c)`` per step.
        restarts: of the Gram form; None for the standard form.
        dtype: of the products.
        products: computes the symmetric ones.
        precision: of the products of fp32 tensors; None where there are none, so that torch's setting can stay.
        transposed: whether the matrices have more rows than columns.
        chunk: so many matrices of a stack are worked on at once.
        one_by_one: whether matrices are computed faster each by itself than stacked.
        propagate_nan: whether a matrix with entries that are not finite gives no numbers, or zero.
    """

    schedule: tuple[Coefficients, ...]
    restarts: Restarts | None
    dtype: torch.dtype
    products: Products
    precision: MatmulPrecision | None
    transposed: bool
    chunk: int
    one_by_one: bool
    propagate_nan: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The orthogonal factor of a matrix (rows x cols), or of each of a stack (n x rows x cols), a new tensor."""
        if x.ndim == 3 and x.size(0) > self.chunk:
            return torch.cat([self.run(part) for part in x.split(self.chunk)])
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """The same as calling it, for a stack of at most :attr:`chunk` matrices."""
        return self._run(x)[0] if x.numel() else torch.empty_like(x)

    def with_health(self, x: Tensor) -> tuple[Tensor, Health]:
        """The orthogonal factors, and what the Gram matrices tell of each matrix."""
        if x.ndim == 3 and x.size(0) > self.chunk:
            factors, healths = zip(*map(self.with_health, x.split(self.chunk)), strict=True)
            return torch.cat(factors), Health(*map(torch.cat, zip(*healths, strict=True)))
        if x.numel() == 0:  # the figures of zero matrices
            zeros = torch.zeros(x.shape[:-2], dtype=torch.float64, device=x.device)
            return torch.empty_like(x), Health(zeros, zeros, zeros + 1, zeros == 0)
        last = len(self.schedule) - 1
        figures: dict[int, tuple[Tensor, Tensor]] = {}  # trace and squared norm of the first and the last Gram matrix

        def watch(step: int, R: Tensor) -> None:
            if step in (0, last):
                trace = R.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
                figures[step] = trace, torch.linalg.vector_norm(R.float(), dim=(-2, -1)).double().square()

        factor, largest, norm = self._run(x, watch)
        trace, squares = figures[0]
        root = trace.sqrt() if norm is None else norm.double().reshape(trace.shape)
        whole_norm = largest.double().reshape(trace.shape) * root
        last_trace, last_squares = figures[last]
        short = min(x.shape[-2:])
        return factor, Health(
            norm=whole_norm,
            effective_rank=torch.where(squares == 0, 0, trace.square() / squares),
            residual=((last_squares - 2 * last_trace + short).clamp(min=0) / short).sqrt(),
            finite=whole_norm.isfinite(),
        )

    def in_precision(self) -> AbstractContextManager[None]:
        """In which products of fp32 tensors have this iteration's precision."""
        return nullcontext() if self.precision is None else fp32_products(self.precision)

    def _run(self, x: Tensor, watch: Watch | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The factors, and two numbers whose product is the norm of ``x``; None for the root of the first trace."""
        X = x.mT if self.transposed else x
        norm = None
        with self.in_precision():
            if self.restarts is None:
                N, norm, largest = normalized(X, propagate_nan=self.propagate_nan)
                factor = iterate_standard(N.to(self.dtype), self.schedule, self.products, watch=watch)
            elif self.dtype == torch.float16:
                N, norm, largest = normalized(X, propagate_nan=self.propagate_nan)
                factor = iterate_gram_fp16(N, self.schedule, self.restarts, self.products, watch=watch)
            else:
                N, largest = scaled(X, self.propagate_nan)
                factor = iterate_gram(N, self.schedule, self.restarts, self.products, watch=watch, normalize=True)
        return (factor.mT if self.transposed else factor).to(x.dtype), largest, norm
