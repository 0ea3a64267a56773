"""What the Gram matrices of an iteration tell about its input and its result, without further products."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


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


def health_of_nothing(x: Tensor) -> Health:
    """The figures of matrices without entries, which are those of zero matrices."""
    zeros = torch.zeros(x.shape[:-2], dtype=torch.float64, device=x.device)
    return Health(zeros, zeros, zeros + 1, zeros == 0)


def joined(parts: Sequence[Health]) -> Health:
    """The figures of a stack from those of its chunks."""
    return Health(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Health)))
