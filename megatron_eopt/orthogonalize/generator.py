"""Coefficients made to measure: the composite of odd quintics that is optimal for an interval of singular values."""

import math

import torch

from megatron_eopt.orthogonalize.coefficients import Coefficients, with_safety

# Least ratio lower / upper that a polynomial is optimized for: the one that yields the table of arXiv 2505.16932 to
# its last digit (1/10 does not: its first coefficient is 7.68 instead of 8.29).
CUSHION = 0.02407327424182761

# Converges to 1 to third order when applied over and over: p(1) = 1, p'(1) = p''(1) = 0.
FIXED_POINT: Coefficients = (15 / 8, -10 / 8, 3 / 8)

# On an interval of less than this relative width the fixed point is within 4e-10 of 1, while the condition of the
# linear system below grows as the inverse cube of the width.
_NARROW = 1e-3

# The exchange converges quadratically, in five rounds on any interval tried; more only guards against a cycle in the
# last digit.
_ROUNDS = 20


def optimal_quintic(lower: float, upper: float, steps: int, *, cushion: float = CUSHION) -> tuple[Coefficients, ...]:
    """Schedule of ``steps`` odd quintics that together map ``[lower, upper]`` as close to 1 as they can.

    Each polynomial is the best one for the interval that those before it left: one that maps ``[l, u]`` to
    ``[1 - E, 1 + E]`` leaves that to the next. Taken greedily like this the composite is the best of all composites
    (Amsel et al., The Polar Express, arXiv 2505.16932).

    The best polynomial for a very small ``l`` also maps a value in the middle of the interval to ``1 - E``, almost to
    zero, where rounding does harm. So each is optimized for ``[max(l, cushion u), u]``. Then ``p(l)`` lies below the
    rest, and all three coefficients are multiplied by ``2 / (p(l) + p(u))``, which centres the two around 1 again.

    Args:
        lower: least singular value of the normalized matrix that is to be mapped to 1.
        upper: largest singular value: 1 under Frobenius scaling, more for a margin.
        steps: number of polynomials, at least 1.
        cushion: least ratio ``l / u`` that a polynomial is optimized for; 0 gives the optimum itself.

    Returns:
        One ``(a, b, c)`` per step. For (1e-3, 1, 7) it is
        :data:`~megatron_eopt.orthogonalize.coefficients.POLAR_EXPRESS_RAW`, and for (1e-3, 1, 5) without a cushion the
        set ``cans``, both to all their printed digits.

    Raises:
        ValueError: unless ``0 < lower < upper``, ``steps >= 1`` and ``0 <= cushion < 1``.
    """
    _check_interval(lower, upper)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"the number of steps must be an integer of at least 1, got {steps!r}")
    if not 0 <= cushion < 1:
        raise ValueError(f"the cushion must be a ratio of at least 0 and below 1, got {cushion!r}")
    schedule = []
    for _ in range(steps):
        a, b, c = best_quintic(max(lower, cushion * upper), upper)
        scale = 2 / (_value((a, b, c), lower) + _value((a, b, c), upper))
        schedule.append((a * scale, b * scale, c * scale))
        lower = _value(schedule[-1], lower)
        upper = 2 - lower
        if lower >= upper:  # equal to rounding
            lower, upper = math.nextafter(1.0, 0.0), 1.0
    return tuple(schedule)


def best_quintic(lower: float, upper: float) -> Coefficients:
    """The odd quintic ``p`` with the least ``E = max |1 - p(x)|`` on ``[lower, upper]``, by Remez exchange.

    By Chebyshev's theorem its error alternates: ``1 - p`` is ``E, -E, E, -E`` at ``lower``, two extrema ``q < r``
    and ``upper``. In turn, ``(a, b, c, E)`` is solved for given points, and the inner points move to the zeros of
    ``p'(x) = a + 3 b x^2 + 5 c x^4``. Where ``lower`` and ``upper`` are almost equal, it is :data:`FIXED_POINT`, scaled
    to their mean.

    Raises:
        ValueError: unless ``0 < lower < upper``.
    """
    _check_interval(lower, upper)
    if upper - lower < _NARROW * upper:
        return with_safety(FIXED_POINT, (lower + upper) / 2)
    low = lower / upper
    q, r, error = (3 * low + 1) / 4, (low + 3) / 4, math.inf
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64, device="cpu")
    for _ in range(_ROUNDS):
        x = torch.tensor([low, q, r, 1.0], dtype=torch.float64, device="cpu")
        system = torch.stack((x, x**3, x**5, signs), dim=1)
        a, b, c, solved = torch.linalg.solve(system, torch.ones_like(x)).tolist()
        if abs(solved - error) <= 1e-15:
            break
        error = solved
        root = math.sqrt(9 * b * b - 20 * a * c)
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return with_safety((a, b, c), upper)


def _value(coefficients: Coefficients, x: float) -> float:
    a, b, c = coefficients
    return x * (a + x * x * (b + x * x * c))


def _check_interval(lower: float, upper: float) -> None:
    if not 0 < lower < upper < math.inf:
        raise ValueError(f"expected singular values with 0 < lower < upper, got [{lower!r}, {upper!r}]")
