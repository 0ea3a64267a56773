"""Which form of Newton-Schulz may run, and which costs less: the standard one or the Gram form."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients

Form = Literal["auto", "standard", "gram"]


def validate_form(form: str) -> None:
    """Check the name of a form.

    Raises:
        ValueError: for an unknown name, naming the known ones.
    """
    check_choice("form", form, get_args(Form))


def standard_flops(rows: int, cols: int, schedule: Sequence[Coefficients], share: float = 1.0) -> float:
    """Floating-point operations of the standard form for a matrix with ``rows <= cols``.

    A step is a Gram matrix, its square where the polynomial is of fifth order, and the product with ``X``; ``share`` is
    the part of a symmetric product that is computed, between 1/2 and 1.
    """
    squares = sum(c != 0 for _, _, c in schedule)
    return len(schedule) * (2 * share + 2) * rows**2 * cols + squares * 2 * share * rows**3


def gram_flops(
    rows: int, cols: int, schedule: Sequence[Coefficients], restarts: Sequence[int], share: float = 1.0
) -> float:
    """Floating-point operations of the Gram form, as :func:`standard_flops`.

    Each segment between restarts is a Gram matrix and a product with ``X``; each step squares ``R`` where its
    polynomial is of fifth order, multiplies ``Q`` but in the first of a segment, and advances ``R`` by two products but
    in the last.
    """
    segments = len(restarts) + 1
    cubes = sum(c != 0 for _, _, c in schedule) + 3 * (len(schedule) - segments)
    return segments * (2 * share + 2) * rows**2 * cols + cubes * 2 * share * rows**3


def gram_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The dtype of the Gram form where products are asked for in ``dtype``; None where it must not or should not run.

    Never bf16, whose rounding it amplifies: where that is asked for, fp16, which GPUs multiply as fast. CPUs do not.
    """
    if dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float16 if device.type == "cuda" else None


def choose_form(
    rows: int, cols: int, schedule: Sequence[Coefficients], restarts: Sequence[int], share: float = 1.0
) -> Literal["standard", "gram"]:
    """The form that costs fewer operations.

    Args:
        rows: short side.
        cols: long side.
        schedule: one ``(a, b, c)`` per step.
        restarts: those of the Gram form.
        share: the part of a symmetric product that is computed.
    """
    gram, standard = gram_flops(rows, cols, schedule, restarts, share), standard_flops(rows, cols, schedule, share)
    return "gram" if gram < standard else "standard"
