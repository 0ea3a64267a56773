"""After which steps the Gram form computes its Gram matrix anew, and what error that leaves."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Literal

import torch

from megatron_eopt.orthogonalize.coefficients import Coefficients, get_coefficients
from megatron_eopt.orthogonalize.simulate import SHAPES, SPECTRA, simulated_error

Restarts = tuple[int, ...]

Preset = Literal["fast", "default", "accurate"]

# Each one more costs a sum over the ranks. No known set that needs more than two is served by three.
MAX_RESTARTS = 2

# An error of 1 is noise as large as the result. With long schedules and matrices of low rank the standard form in bf16
# exceeds it, too: to be no worse than that is not enough.
LARGEST_ERROR = 1.0

# Restarts whose scores differ by less count as equal, and the earliest are taken: processors round differently, which
# should not move a choice.
_TIE = 1.1

# By name and number of steps; None: the standard form. Every entry is what choose_restarts says, which the tests
# repeat, save that of cubic5: to go without is what that set is for, at an error of up to 2.6 times that of its own
# standard form in bf16; it is below that of quintic in bf16 on all spectra but harmonic.
RESTARTS: dict[tuple[str, int], Restarts | None] = {
    ("simple", 5): (3,),
    ("quintic", 5): (3,),
    ("polar_express", 5): (2, 3),
    ("polar_express", 8): (2, 4),
    ("cans", 5): (1, 3),
    ("aol", 4): (2,),
    ("deepseekv4", 10): None,
    ("cubic5", 5): (),
}

# The same with one restart more.
ACCURATE_RESTARTS: dict[tuple[str, int], Restarts | None] = {
    ("simple", 5): (1, 3),
    ("quintic", 5): (2, 3),
    ("polar_express", 5): (2, 3, 4),
    ("polar_express", 8): (2, 3, 4),
    ("cans", 5): (1, 2, 3),
    ("aol", 4): (1, 3),
    ("deepseekv4", 10): None,
    ("cubic5", 5): (3,),
}

# Set, steps and extra restarts of a preset; the default here with the default set.
PRESETS: dict[Preset, tuple[str, int, int]] = {
    "fast": ("cubic5", 5, 0),
    "default": ("quintic", 5, 0),
    "accurate": ("quintic", 5, 1),
}

# Relative error of a preset by dtype and spectrum: the largest of six seeds on both shapes, times 1.25; fp16 with
# mirrored products, fp32 with either. The standard form of quintic in bf16, which it stands against, has 0.008, 0.05,
# 0.13, 0.31, 0.32, 0.014 without the 1.25. Default and accurate are below that everywhere, fast save on harmonic.
PUBLISHED_ERRORS: dict[Preset, dict[torch.dtype, dict[str, float]]] = {
    "fast": {
        torch.float16: dict(zip(SPECTRA, (0.0094, 0.025, 0.11, 0.036, 0.25, 0.03), strict=True)),
        torch.float32: dict(zip(SPECTRA, (9.9e-06, 1.8e-05, 0.00012, 3.2e-05, 0.00032, 2.9e-05), strict=True)),
    },
    "default": {
        torch.float16: dict(zip(SPECTRA, (0.0034, 0.011, 0.025, 0.044, 0.05, 0.0063), strict=True)),
        torch.float32: dict(zip(SPECTRA, (3.3e-06, 1.7e-05, 3.1e-05, 6.7e-05, 8.9e-05, 7.6e-06), strict=True)),
    },
    "accurate": {
        torch.float16: dict(zip(SPECTRA, (0.0016, 0.0069, 0.018, 0.039, 0.044, 0.0023), strict=True)),
        torch.float32: dict(zip(SPECTRA, (1.5e-06, 5e-06, 9.4e-06, 2.2e-05, 2.2e-05, 1.9e-06), strict=True)),
    },
}


def restarts_for(
    coefficient_type: str | Sequence[Coefficients] = "quintic", steps: int = 5, extra: int = 0, *, simulate: bool = True
) -> Restarts | None:
    """Restarts of the Gram form for a schedule: from the tables where they have it, else by simulation, once.

    The simulation takes a second or two. Ranks with different processors might choose differently, though only between
    restarts that are within a few percent of each other: where ranks must agree, let one decide.

    Args:
        coefficient_type: name of a set, or a list of ``(a, b, c)``.
        steps: number of steps, as for :func:`~megatron_eopt.orthogonalize.coefficients.get_coefficients`.
        extra: restarts beyond the necessary ones; 1 is the preset ``accurate``.
        simulate: whether to simulate what the tables do not have; None is returned for it otherwise.

    Returns:
        Steps, counted from 1, after which to restart; None where only the standard form is safe.

    Raises:
        ValueError: for a schedule that does not exist, and a negative ``extra``.
    """
    schedule = get_coefficients(coefficient_type, steps)
    if isinstance(coefficient_type, str) and extra in (0, 1):
        table = ACCURATE_RESTARTS if extra else RESTARTS
        if (coefficient_type, steps) in table:
            return table[coefficient_type, steps]
    return choose_restarts(schedule, extra=extra) if simulate else None


def choose_restarts(
    schedule: Sequence[Coefficients], rounding: torch.dtype = torch.float16, extra: int = 0
) -> Restarts | None:
    """The fewest restarts that keep the Gram form as exact as the standard form in bf16, found by simulation.

    On each spectrum and shape of :mod:`~megatron_eopt.orthogonalize.simulate`, the error must be no larger than that of
    the standard form in bf16, nor than :data:`LARGEST_ERROR`. Of equally many restarts those are taken whose largest
    ratio of error to bound is smallest, and of those within 10 % of it the earliest: they cost the same.

    Fewer than 64 rows are not simulated: with 32, quintic has 1.4 times the error of bf16 on ``harmonic`` (0.009).

    Args:
        schedule: one ``(a, b, c)`` per step.
        rounding: dtype of the Gram form.
        extra: restarts beyond the necessary ones, at most one after every step.

    Returns:
        Steps, counted from 1, after which to restart; None if :data:`MAX_RESTARTS` do not suffice.

    Raises:
        ValueError: for a negative ``extra``.
    """
    if extra < 0:
        raise ValueError(f"the number of extra restarts is at least 0, got {extra!r}")
    return _choose(tuple(schedule), rounding, extra)


@lru_cache(maxsize=256)
def _choose(schedule: tuple[Coefficients, ...], rounding: torch.dtype, extra: int) -> Restarts | None:
    most = len(schedule) - 1
    for count in range(min(MAX_RESTARTS, most) + 1):
        restarts, score = _best(schedule, count, rounding)
        if score <= 1:
            return _best(schedule, min(count + extra, most), rounding)[0] if extra else restarts
    return None


def _best(schedule: tuple[Coefficients, ...], count: int, rounding: torch.dtype) -> tuple[Restarts, float]:
    """The best ``count`` restarts, and their largest ratio of error to bound."""
    scores = {
        restarts: max(_ratio(schedule, restarts, rounding, shape) for shape in SHAPES)
        for restarts in combinations(range(1, len(schedule)), count)
    }
    least = min(scores.values())
    return next((restarts, score) for restarts, score in scores.items() if score <= _TIE * least)


def _ratio(
    schedule: tuple[Coefficients, ...], restarts: Restarts, rounding: torch.dtype, shape: tuple[int, int]
) -> float:
    errors = simulated_error(schedule, restarts, rounding, shape=shape)
    return max(errors[name] / bound for name, bound in _bounds(schedule, shape).items())


@lru_cache(maxsize=256)
def _bounds(schedule: tuple[Coefficients, ...], shape: tuple[int, int]) -> dict[str, float]:
    standard = simulated_error(schedule, None, torch.bfloat16, shape=shape)
    return {name: min(standard[name], LARGEST_ERROR) for name in SPECTRA}
