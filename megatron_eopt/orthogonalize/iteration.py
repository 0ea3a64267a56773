"""A Newton-Schulz iteration of which everything is decided, and the figures of health that it can tell."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.forms import (
    Restarts,
    iterate_gram,
    iterate_gram_fp16,
    iterate_standard,
    normalized,
    scaled,
)
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.products import Products


@dataclass(frozen=True)
class Health:
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


class Figures:
    """Gathers the figures of one run of an iteration.

    Args:
        steps: how many steps the iteration has.
    """

    def __init__(self, steps: int) -> None:
        self._last = steps - 1
        self._of_step: dict[int, tuple[Tensor, Tensor, int]] = {}

    def watch(self, step: int, R: Tensor) -> None:
        """Take the trace and the norm of ``R``, the Gram matrix before ``step``, of the first and of the last step."""
        if step in (0, self._last):
            trace = R.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
            squares = torch.linalg.vector_norm(R.float(), dim=(-2, -1)).double().square()
            self._of_step[step] = trace, squares, R.size(-1)

    def of_input(self, largest: Tensor, norm: Tensor | None) -> None:
        """Take the norm of the input as two factors; without the second the first trace is the square of it."""
        trace = self._of_step[0][0]
        root = trace.sqrt() if norm is None else norm.double().reshape(trace.shape)
        self._norm = largest.double().reshape(trace.shape) * root

    def health(self) -> Health:
        """The figures."""
        trace, squares, _ = self._of_step[0]
        last_trace, last_squares, rows = self._of_step[self._last]
        return Health(
            norm=self._norm,
            effective_rank=torch.where(squares == 0, 0, trace.square() / squares),
            residual=((last_squares - 2 * last_trace + rows).clamp(min=0) / rows).sqrt(),
            finite=self._norm.isfinite(),
        )


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
            return torch.cat([self(part) for part in x.split(self.chunk)])
        return self.run(x)

    def in_precision(self) -> AbstractContextManager[None]:
        """In which products of fp32 tensors have this iteration's precision."""
        return nullcontext() if self.precision is None else fp32_products(self.precision)

    def with_health(self, x: Tensor) -> tuple[Tensor, Health]:
        """The orthogonal factors, and what the Gram matrices tell of each matrix."""
        if x.ndim == 3 and x.size(0) > self.chunk:
            factors, healths = zip(*map(self.with_health, x.split(self.chunk)), strict=True)
            return torch.cat(factors), _joined(healths)
        if x.numel() == 0:
            return torch.empty_like(x), _health_of_nothing(x)
        figures = Figures(len(self.schedule))
        return self.run(x, figures), figures.health()

    def run(self, x: Tensor, figures: Figures | None = None) -> Tensor:
        """The same as calling it, for as much at once as it is given.

        Args:
            x: (rows x cols) or (n x rows x cols), ``n`` at most :attr:`chunk`.
            figures: take the health of what is computed.
        """
        if x.numel() == 0:
            return torch.empty_like(x)
        X = x.mT if self.transposed else x
        watch = None if figures is None else figures.watch
        with self.in_precision():
            if self.restarts is None or self.dtype == torch.float16:
                N, norm, largest = normalized(X, propagate_nan=self.propagate_nan)
                if self.restarts is None:
                    factor = iterate_standard(N.to(self.dtype), self.schedule, self.products, watch=watch)
                else:
                    factor = iterate_gram_fp16(N, self.schedule, self.restarts, self.products, watch=watch)
            else:
                (N, largest), norm = scaled(X, self.propagate_nan), None
                factor = iterate_gram(N, self.schedule, self.restarts, self.products, watch=watch, normalize=True)
        if figures is not None:
            figures.of_input(largest, norm)
        return (factor.mT if self.transposed else factor).to(x.dtype)


def _health_of_nothing(x: Tensor) -> Health:
    """The figures of matrices without entries, which are those of zero matrices."""
    zeros = torch.zeros(x.shape[:-2], dtype=torch.float64, device=x.device)
    return Health(zeros, zeros, zeros + 1, zeros == 0)


def _joined(healths: Sequence[Health]) -> Health:
    """The figures of a stack from those of its chunks."""
    return Health(*(torch.cat([getattr(health, field.name) for health in healths]) for field in fields(Health)))
