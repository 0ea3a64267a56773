"""Which form of Newton-Schulz costs less: the standard one or the Gram form."""

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


def can_iterate_gram(dtype: torch.dtype) -> bool:
    """Whether the Gram form may run in a dtype: fp32 and fp64 today, never bf16, whose rounding it amplifies."""
    return dtype in (torch.float32, torch.float64)


def choose_form(
    rows: int, cols: int, schedule: Sequence[Coefficients], restarts: Sequence[int] | None, dtype: torch.dtype
) -> Form:
    """The form that costs fewer operations, of those that are safe.

    Args:
        rows: short side.
        cols: long side.
        schedule: one ``(a, b, c)`` per step.
        restarts: those of the Gram form; None where it is not safe for the schedule.
        dtype: of the products.
    """
    if restarts is None or not can_iterate_gram(dtype):
        return "standard"
    gram, standard = gram_flops(rows, cols, schedule, restarts), standard_flops(rows, cols, schedule)
    return "gram" if gram < standard else "standard"
