"""Newton-Schulz polynomials: known sets, their schedules, and optimal ones.

A step maps singular values s to ``a s + b s^3 + c s^5``. A *set* was fitted together, a *schedule* is what is applied.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.choices import check_choice, check_count

Coefficients = tuple[float, float, float]
CoefficientType = str | Sequence[Coefficients]  # the name of a set, or the caller's own
# From twenty on, a step changes the last bits at most.
MAX_STEPS = 100
NSCoeffT = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "cubic5"]

# K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
_SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)


def with_safety(coefficients: Coefficients, safety: float) -> Coefficients:
    """``p(s / safety)``, for singular values up to ``safety``.

    ``(a, b, c)`` becomes ``(a / safety, b / safety^3, c / safety^5)`` (arXiv 2505.16932, Algorithm 1).
    """
    a, b, c = coefficients
    return a / safety, b / safety**3, c / safety**5


# The first polynomial maps 1, the singular value of a matrix of rank 1, to -0.585: an ascent direction. Its first zero
# is at 0.884, so a safety of 1.25 keeps the set positive up to 1.1.
_AOL_SAFETY = 1.25

# Grishina, Smirnov and Rakhuba, CANS, arXiv 2506.10935. Above 1 the polynomials explode: in five steps the slope there
# is 5e4. Products in bf16 put the singular value of a matrix of rank 1 up to 0.4 % above, so these have the safety that
# polar_express has. By simulation 1.005 is the least that holds.
_CANS: tuple[Coefficients, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_CANS_SAFETY = 1.01

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
    "cans": tuple([with_safety(polynomial, _CANS_SAFETY) for polynomial in _CANS]),
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
# Their last polynomial maps [0, 1] closer to 1 each time.
_REPEAT_LAST = frozenset({"polar_express", "cans", "aol", "deepseekv4"})


def get_supported_coefficient_types() -> tuple[str, ...]:
    """Names of the coefficient sets, as :data:`NSCoeffT` lists them."""
    return get_args(NSCoeffT)


def validate_coefficient_type(coefficient_type: str) -> None:
    """Raise ``ValueError`` for an unknown set, naming the known ones."""
    check_choice("coefficient type", coefficient_type, get_supported_coefficient_types())


def get_coefficients(coefficient_type: CoefficientType = "quintic", steps: int = 5) -> tuple[Coefficients, ...]:
    """The schedule of ``steps`` polynomials of a set.

    Beyond its length a set repeats its last polynomial (polar_express, cans, aol, deepseekv4), or as a whole: cutting
    one off half-way shrinks singular values (quintic in 6 steps: to 0.122). Fewer steps than a set has are allowed;
    :func:`composite_range` tells what they reach. cubic5 takes 5 steps only.

    Args:
        coefficient_type: name of a set, or a list of ``(a, b, c)``, which is taken as it is: rounding in bf16 needs a
            list that also maps singular values up to 1.005 to finite ones near 1.
        steps: number of Newton-Schulz steps, 1 to 100.

    Raises:
        ValueError: for an unknown name, an empty or malformed list, or steps that the set cannot serve.
    """
    check_count("the number of Newton-Schulz steps", steps, most=MAX_STEPS)
    name = coefficient_type if isinstance(coefficient_type, str) else "custom"
    coefficients = _set(coefficient_type)
    length = len(coefficients)
    if name in _REPEAT_LAST:
        return coefficients[:steps] + coefficients[-1:] * (steps - length)
    if steps != length and (name == "cubic5" or (steps > length and steps % length)):
        more = "" if name == "cubic5" else ", fewer, or a multiple of it"
        raise ValueError(
            f"{name} has {length} polynomials that were fitted together, so it cannot be served in {steps} "
            f"Newton-Schulz steps: take {length}{more}"
        )
    return (coefficients * -(-steps // length))[:steps]


def set_length(coefficient_type: CoefficientType) -> int:
    """Number of polynomials in a set."""
    return len(_set(coefficient_type))


def composite_range(
    schedule: Sequence[Coefficients],
    lower: float = 1e-2,
    upper: float = 1.0,
    points: int = 20_001,
) -> tuple[float, float]:
    """Least and largest value of a schedule on ``[lower, upper]``.

    Sampled in fp64 on a logarithmic and a linear grid of ``points`` each; (1, 1) is an exact orthogonal factor.
    """
    logarithmic = torch.logspace(
        torch.tensor(lower).log10().item(),
        torch.tensor(upper).log10().item(),
        points,
        dtype=torch.float64,
    )
    linear = torch.linspace(lower, upper, points, dtype=torch.float64)
    values = torch.cat((logarithmic, linear)).clamp(lower, upper)
    for coefficients in schedule:
        values = _value(coefficients, values)
    return values.min().item(), values.max().item()


def _set(coefficient_type: CoefficientType) -> tuple[Coefficients, ...]:
    if isinstance(coefficient_type, str):
        validate_coefficient_type(coefficient_type)
        return _SETS[coefficient_type]
    try:
        rows = tuple((float(a), float(b), float(c)) for a, b, c in coefficient_type)
    except (TypeError, ValueError):
        rows = ()
    if not rows or not all(any(row) and math.isfinite(sum(row)) for row in rows):
        raise ValueError(
            f"a coefficient set is a non-empty list of (a, b, c), such as [{_SIMPLE}], or the name of one, got "
            f"{coefficient_type!r}; each (a, b, c) is finite and not zero"
        )
    return rows


def _value[T: (float, Tensor)](coefficients: Coefficients, x: T) -> T:
    a, b, c = coefficients
    return x * (a + x * x * (b + x * x * c))


# Yields the table of arXiv 2505.16932 to its last digit (1/10: a first coefficient of 7.68 instead of 8.29).
CUSHION = 0.02407327424182761

# Converges to 1 to third order when applied over and over: p(1) = 1, p'(1) = p''(1) = 0.
FIXED_POINT: Coefficients = (15 / 8, -10 / 8, 3 / 8)


def optimal_quintic(
    lower: float,
    upper: float,
    steps: int,
    *,
    cushion: float = CUSHION,
) -> tuple[Coefficients, ...]:
    """Odd quintics that together map ``[lower, upper]`` closest to 1.

    Each polynomial is the best one for the interval that those before it left: one that maps ``[l, u]`` to ``[1 - E, 1
    + E]`` leaves that to the next. This greedy composite is the best of all (Amsel et al., The Polar Express, arXiv
    2505.16932).

    For a very small ``l`` the best polynomial also maps some value inside the interval to ``1 - E``, almost zero, where
    rounding does harm. So each is optimized for ``[max(l, cushion u), u]``, and its coefficients are multiplied by ``2
    / (p(l) + p(u))``, which centres the two values around 1 again.

    Args:
        lower: least singular value of the normalized matrix that is to be mapped to 1.
        upper: largest singular value: 1 under Frobenius scaling, more for a margin.
        steps: number of polynomials, 1 to 100.
        cushion: least ratio ``l / u`` that a polynomial is optimized for; 0 gives the optimum itself.

    Returns:
        One ``(a, b, c)`` per step: for (1e-3, 1, 7) the published table of Polar Express, and for (1e-3, 1, 5) without
            a cushion that of CANS, both to all their printed digits. The set ``cans`` has a safety of 1.01 beside.

    Raises:
        ValueError: unless ``0 < lower < upper``, ``1 <= steps <= 100`` and ``0 <= cushion < 1``.
    """
    check_count("the number of steps", steps, most=MAX_STEPS)
    if not (0 < lower < upper < math.inf and 0 <= cushion < 1):
        raise ValueError(f"expected 0 < lower < upper and 0 <= cushion < 1, got {lower!r}, {upper!r} and {cushion!r}")
    schedule = []
    for _ in range(steps):
        a, b, c = best = best_quintic(max(lower, cushion * upper), upper)
        scale = 2 / (_value(best, lower) + _value(best, upper))
        schedule.append((a * scale, b * scale, c * scale))
        lower = _value(schedule[-1], lower)
        upper = 2 - lower
        if lower >= upper:  # equal to rounding
            lower = math.nextafter(1.0, 0.0)
            upper = 1.0
    return tuple(schedule)


def best_quintic(lower: float, upper: float) -> Coefficients:
    """The best odd quintic on an interval, by Remez exchange.

    Its ``E = max |1 - p(x)|`` on ``[lower, upper]`` is least. By Chebyshev's theorem ``1 - p`` alternates between ``E``
    and ``-E`` at ``lower``, two extrema ``q < r`` and ``upper``. In turn, ``(a, b, c, E)`` is solved for given points,
    and ``q`` and ``r`` move to the zeros of ``p'(x) = a + 3 b x^2 + 5 c x^4``. Where ``lower`` and ``upper`` almost
    agree, it is :data:`FIXED_POINT`, scaled to their mean.
    """
    # Here the fixed point is within 4e-10 of 1; the system's condition grows as the inverse cube of the width.
    if upper - lower < 1e-3 * upper:
        return with_safety(FIXED_POINT, (lower + upper) / 2)
    low = lower / upper
    q = (3 * low + 1) / 4
    r = (low + 3) / 4
    error = math.inf
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64, device="cpu")
    # It converges in five rounds; more guard against a cycle in the last digit.
    for _ in range(20):
        x = torch.tensor([low, q, r, 1.0], dtype=torch.float64, device="cpu")
        system = torch.stack((x, x**3, x**5, signs), dim=1)
        a, b, c, solved = torch.linalg.solve(system, torch.ones_like(x)).tolist()
        if abs(solved - error) <= 1e-15:
            break
        error = solved
        root = math.sqrt(9 * b * b - 20 * a * c)
        q = math.sqrt((-3 * b - root) / (10 * c))
        r = math.sqrt((-3 * b + root) / (10 * c))
    return with_safety((a, b, c), upper)
