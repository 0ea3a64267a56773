"""What the Gram matrices of an iteration tell about its input and its result, without further products."""

from dataclasses import dataclass

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
