import math

import pytest
import torch

from megatron_eopt.orthogonalize import composite_range, get_coefficients
from megatron_eopt.orthogonalize.coefficients import POLAR_EXPRESS_RAW
from megatron_eopt.orthogonalize.generator import FIXED_POINT, best_quintic, optimal_quintic

INTERVALS = [(1e-6, 1.0), (1e-3, 1.0), (0.1, 1.0), (0.3, 1.7), (0.9, 1.1), (1e-2, 40.0)]


def value(coefficients, x):
    a, b, c = coefficients
    return a * x + b * x**3 + c * x**5


def largest_error(coefficients, lower, upper):
    x = torch.linspace(lower, upper, 100_001, dtype=torch.float64)
    return (1 - value(coefficients, x)).abs().max().item()


def test_it_reproduces_the_polar_express_table_to_all_its_digits():
    rounded = [tuple(round(each, 5) for each in row) for row in optimal_quintic(1e-3, 1.0, 7)]
    assert rounded == list(POLAR_EXPRESS_RAW)


def test_without_a_cushion_it_reproduces_cans_to_all_its_digits():
    rounded = [tuple(round(each, 4) for each in row) for row in optimal_quintic(1e-3, 1.0, 5, cushion=0)]
    assert rounded == list(get_coefficients("cans", 5))


def test_the_cushion_of_the_papers_text_gives_another_table():
    assert optimal_quintic(1e-3, 1.0, 7, cushion=0.1)[0][0] == pytest.approx(7.68145, abs=1e-5)


@pytest.mark.parametrize(("lower", "upper"), INTERVALS)
def test_the_error_alternates_between_four_equal_extremes(lower, upper):
    a, b, c = coefficients = best_quintic(lower, upper)
    root = math.sqrt(9 * b * b - 20 * a * c)
    q, r = (math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
    assert lower < q < r < upper
    errors = [1 - value(coefficients, x) for x in (lower, q, r, upper)]
    size = largest_error(coefficients, lower, upper)
    assert errors == pytest.approx([size, -size, size, -size], rel=1e-6, abs=1e-13)


@pytest.mark.parametrize(("lower", "upper"), INTERVALS)
def test_any_other_quintic_is_worse(lower, upper):
    best = best_quintic(lower, upper)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 0.1):
        for change in (size * torch.randn(50, 3, generator=generator, dtype=torch.float64)).tolist():
            other = tuple(each * (1 + by) for each, by in zip(best, change, strict=True))
            assert largest_error(other, lower, upper) > largest_error(best, lower, upper)


@pytest.mark.parametrize("width", [2e-3, 5e-4, 1e-6, 1e-12, 1e-15])
def test_an_almost_empty_interval_takes_the_fixed_point(width):
    coefficients = best_quintic(1 - width, 1.0)
    assert coefficients == pytest.approx(FIXED_POINT, abs=2 * width)
    assert largest_error(coefficients, 1 - width, 1.0) < 1e-9


@pytest.mark.parametrize(("lower", "steps"), [(1e-2, 4), (1e-3, 5), (1e-4, 6)])
def test_without_a_cushion_the_composite_covers_the_interval_best(lower, steps):
    low, high = composite_range(optimal_quintic(lower, 1.0, steps, cushion=0), lower=lower)
    assert low + high == pytest.approx(2, abs=1e-6)
    cushioned = composite_range(optimal_quintic(lower, 1.0, steps), lower=lower)
    assert sum(cushioned) == pytest.approx(2, abs=1e-6)
    assert cushioned[0] < low
    assert composite_range(get_coefficients("polar_express", steps), lower=lower)[0] < low


def test_further_steps_keep_what_is_reached():
    assert composite_range(optimal_quintic(1e-3, 1.0, 12), lower=1e-3) == pytest.approx((1, 1), abs=1e-13)
    assert optimal_quintic(1e-3, 1.0, 12)[-1] == pytest.approx(FIXED_POINT, abs=1e-12)


def test_a_wider_interval_is_a_safety_margin():
    low, high = composite_range(optimal_quintic(1e-3, 1.05, 7), lower=1e-3, upper=1.05)
    assert (low, high) == pytest.approx((1, 1), abs=1e-6)


@pytest.mark.parametrize(
    ("lower", "upper", "steps", "message"),
    [
        (0.0, 1.0, 5, r"0 < lower < upper, got \[0\.0, 1\.0\]"),
        (-1e-3, 1.0, 5, "0 < lower < upper"),
        (1.0, 1.0, 5, "0 < lower < upper"),
        (2.0, 1.0, 5, "0 < lower < upper"),
        (math.nan, 1.0, 5, "0 < lower < upper"),
        (1e-3, math.inf, 5, "0 < lower < upper"),
        (1e-3, 1.0, 0, "at least 1, got 0"),
        (1e-3, 1.0, 2.5, r"integer of at least 1, got 2\.5"),
    ],
)
def test_what_cannot_be_generated_is_refused(lower, upper, steps, message):
    with pytest.raises(ValueError, match=message):
        optimal_quintic(lower, upper, steps)


def test_a_cushion_is_a_ratio():
    with pytest.raises(ValueError, match="at least 0 and below 1, got 1"):
        optimal_quintic(1e-3, 1.0, 5, cushion=1)
