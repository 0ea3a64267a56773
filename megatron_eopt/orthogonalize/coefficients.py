"""Which polynomials a Newton-Schulz iteration applies: the known sets, and the schedule for a number of steps.

A step maps every singular value s to ``a s + b s^3 + c s^5``; a *set* is the list of ``(a, b, c)`` that was fitted
together, a *schedule* the list that is applied in ``steps`` steps.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from megatron_eopt.orthogonalize.choices import check_choice

Coefficients = tuple[float, float, float]

NSCoeffT = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "cubic5"]

# K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
_SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)

# Amsel et al., The Polar Express, arXiv 2505.16932: optimal for singular values in [1e-3, 1], without a safety factor.
POLAR_EXPRESS_RAW: tuple[Coefficients, ...] = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37680),
    (1.87500, -1.25000, 0.37500),
)


def with_safety(coefficients: Coefficients, safety: float) -> Coefficients:
    """The polynomial ``p(s / safety)``: for singular values that may reach ``safety`` instead of 1.

    ``(a, b, c)`` becomes ``(a / safety, b / safety^3, c / safety^5)`` (arXiv 2505.16932, Algorithm 1).
    """
    a, b, c = coefficients
    return a / safety, b / safety**3, c / safety**5


# Published for rows scaled as in almost-orthogonal layers. Under that scaling a matrix of rank 1 has a singular value
# of 1, as it has under Frobenius scaling, and there the first polynomial is -0.585: the result would be an ascent
# direction. Its first zero is at 0.884, and four steps return values up to 1.085, so a safety of 1.25 keeps the set in
# its positive range, also when it is repeated.
_AOL_SAFETY = 1.25

_SETS: dict[str, tuple[Coefficients, ...]] = {
    "simple": (_SIMPLE,),
    # F. L. Cesista, J. You and K. Jordan, Squeezing 1-2% efficiency gains out of Muon (2025).
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # arXiv 2505.16932 with a safety of 1.01 folded in.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # Grishina, Smirnov and Rakhuba, CANS, arXiv 2506.10935.
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        with_safety((4.0098, -7.0585, 2.4635), _AOL_SAFETY),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # DeepSeek-V4 report (2026): eight steps of the simple set, two of the plain quintic Newton-Schulz iteration.
    "deepseekv4": (_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # arXiv 2606.00371: third order, five steps that belong together.
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}
# The last polynomial of these maps [0, 1] closer to 1 each time it is applied; that of the others does not.
_REPEAT_LAST = frozenset({"polar_express", "cans", "deepseekv4"})
_EXACT_LENGTH = frozenset({"cubic5"})


def get_supported_coefficient_types() -> tuple[str, ...]:
    """Names of the coefficient sets, as :data:`NSCoeffT` lists them."""
    return get_args(NSCoeffT)


def validate_coefficient_type(coefficient_type: str) -> None:
    """Check the name of a coefficient set.

    Raises:
        ValueError: for an unknown name, naming the known ones.
    """
    check_choice("coefficient type", coefficient_type, get_supported_coefficient_types())


def get_coefficients(
    coefficient_type: str | Sequence[Coefficients] = "quintic", steps: int = 5
) -> tuple[Coefficients, ...]:
    """The schedule of ``steps`` polynomials of a set.

    Past the end of polar_express, cans and deepseekv4 their last polynomial repeats. Any other set is repeated as a
    whole: cutting one off half-way shrinks singular values (quintic in 6 steps: to 0.122). Fewer steps than a set has
    are served; :func:`composite_range` tells what they reach. cubic5 is served in 5 steps only.

    Args:
        coefficient_type: name of a set, or a set of the caller's own as a list of ``(a, b, c)``.
        steps: number of Newton-Schulz steps, at least 1.

    Raises:
        ValueError: for an unknown name, an empty or malformed list, and a number of steps that the set cannot serve.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"the number of Newton-Schulz steps must be an integer of at least 1, got {steps!r}")
    if isinstance(coefficient_type, str):
        validate_coefficient_type(coefficient_type)
        name, coefficients = coefficient_type, _SETS[coefficient_type]
    else:
        name, coefficients = "custom", _custom_set(coefficient_type)
    length = len(coefficients)
    if steps != length and name in _EXACT_LENGTH:
        raise ValueError(f"{name} is served in exactly {length} Newton-Schulz steps, got {steps}")
    if steps <= length:
        return coefficients[:steps]
    if name in _REPEAT_LAST:
        return coefficients + coefficients[-1:] * (steps - length)
    if steps % length:
        raise ValueError(
            f"{name} has {length} polynomials that were fitted together, so it cannot be served in {steps} "
            f"Newton-Schulz steps: take at most {length}, or a multiple of {length}"
        )
    return coefficients * (steps // length)


def set_length(coefficient_type: str | Sequence[Coefficients]) -> int:
    """Number of polynomials in a set, named or the caller's own."""
    if isinstance(coefficient_type, str):
        validate_coefficient_type(coefficient_type)
        return len(_SETS[coefficient_type])
    return len(_custom_set(coefficient_type))


def composite_range(
    schedule: Sequence[Coefficients], lower: float = 1e-2, upper: float = 1.0, points: int = 20_001
) -> tuple[float, float]:
    """Smallest and largest value that a schedule gives to singular values in ``[lower, upper]``.

    Sampled in fp64 on a logarithmic and on a linear grid of ``points`` each; (1, 1) is an exact orthogonal factor.
    """
    logarithmic = torch.logspace(
        torch.tensor(lower).log10().item(), torch.tensor(upper).log10().item(), points, dtype=torch.float64
    )
    linear = torch.linspace(lower, upper, points, dtype=torch.float64)
    values = torch.cat((logarithmic, linear)).clamp(lower, upper)
    for a, b, c in schedule:
        square = values * values
        values = values * (a + square * (b + square * c))
    return values.min().item(), values.max().item()


def _custom_set(coefficients: Sequence[Coefficients]) -> tuple[Coefficients, ...]:
    rows = tuple(tuple(float(value) for value in row) for row in coefficients)
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError(f"a coefficient set is a non-empty list of (a, b, c), got {coefficients!r}")
    return tuple((row[0], row[1], row[2]) for row in rows)
