import math

import pytest
import torch

from megatron_eopt.orthogonalize.coefficients import (
    FIXED_POINT,
    best_quintic,
    composite_range,
    get_coefficients,
    get_supported_coefficient_types,
    optimal_quintic,
    validate_coefficient_type,
    with_safety,
)

# Amsel et al., The Polar Express, arXiv 2505.16932: optimal for singular values in [1e-3, 1], without a safety factor.
POLAR_EXPRESS_RAW = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37680),
    (1.87500, -1.25000, 0.37500),
)

INTERVALS = [(1e-6, 1.0), (1e-3, 1.0), (0.1, 1.0), (0.3, 1.7), (0.9, 1.1), (1e-2, 40.0)]


@pytest.mark.parametrize(
    ("coefficient_type", "steps", "low", "high"),
    [
        ("simple", 5, 0.682, 1.134),
        ("quintic", 5, 0.978, 1.032),
        ("quintic", 10, 0.978, 1.026),
        ("polar_express", 3, 0.186, 1.866),
        ("polar_express", 5, 0.870, 1.124),
        ("polar_express", 8, 1.000, 1.000),
        ("cans", 5, 0.861, 1.113),
        ("deepseekv4", 10, 1.000, 1.001),
        ("cubic5", 5, 0.774, 1.300),
        ("aol", 4, 0.739, 1.084),
        ("aol", 5, 0.987, 1.071),  # the default number of steps
        ("aol", 8, 0.988, 0.988),
    ],
)
def test_a_schedule_maps_singular_values_to_its_published_range(coefficient_type, steps, low, high):
    assert composite_range(get_coefficients(coefficient_type, steps)) == pytest.approx((low, high), abs=5.1e-4)


@pytest.mark.parametrize("coefficient_type", get_supported_coefficient_types())
def test_no_set_makes_a_singular_value_negative_by_default(coefficient_type):
    # what aol does above 0.884 as published: a matrix of rank 1 would get an ascent direction
    low, _ = composite_range(get_coefficients(coefficient_type), lower=1e-6, upper=1.0)
    assert low > 0


def test_fewer_steps_are_the_first_ones_and_more_repeat():
    for name in ("polar_express", "cans", "aol", "deepseekv4"):
        whole = get_coefficients(name, 10)
        assert get_coefficients(name, 12) == whole + whole[-1:] * 2
    quintic, own = get_coefficients("quintic", 5), [(2.0, -1.5, 0.5), (1.9, -1.2, 0.3)]
    assert get_coefficients("quintic", 3) == quintic[:3]
    assert get_coefficients("quintic", 100) == quintic * 20
    assert get_coefficients("simple", 15) == get_coefficients("simple", 1) * 15
    assert get_coefficients(own, 4) == tuple(own) * 2


@pytest.mark.parametrize(
    ("coefficient_type", "steps", "message"),
    [
        ("quintic", 6, "quintic has 5 polynomials .* cannot be served in 6"),
        ("cubic5", 4, "cubic5 has 5 polynomials .* take 5$"),
        ("cubic5", 10, "cubic5 has 5 polynomials .* take 5$"),
        ([(2.0, -1.5, 0.5), (1.9, -1.2, 0.3)], 3, "custom has 2 polynomials"),
        ([], 1, "non-empty list"),
        ([(1.0, 2.0)], 1, r"list of \(a, b, c\)"),
        ("quintic", 0, "at least 1 and at most 100, got 0"),
        ("simple", 101, "at most 100, got 101"),
        ("simple", 10**9, "at most 100, got 1000000000"),
        ("quintic", 2.5, r"whole number of at least 1 and at most 100, got 2\.5"),
        ("quintc", 5, "unknown coefficient type 'quintc': expected one of simple, quintic, polar_express"),
    ],
)
def test_what_cannot_be_served_is_refused(coefficient_type, steps, message):
    with pytest.raises(ValueError, match=message):
        get_coefficients(coefficient_type, steps)


def test_validate_names_the_known_ones():
    for name in get_supported_coefficient_types():
        validate_coefficient_type(name)
    with pytest.raises(ValueError, match="deepseekv4, cubic5"):
        validate_coefficient_type("custom")


def test_safety_moves_the_end_of_the_interval():
    # p(s / 1.05) at s = 1.05 is p(1)
    (a, b, c), (sa, sb, sc) = POLAR_EXPRESS_RAW[0], with_safety(POLAR_EXPRESS_RAW[0], 1.05)
    assert sa * 1.05 + sb * 1.05**3 + sc * 1.05**5 == pytest.approx(a + b + c)


def test_raw_polar_express_with_safety_is_the_published_table():
    folded = [with_safety(row, 1.01) for row in POLAR_EXPRESS_RAW[:-1]]
    torch.testing.assert_close(
        torch.tensor(folded), torch.tensor(get_coefficients("polar_express", 6)), atol=1e-4, rtol=0
    )


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
    published = [tuple(round(each, 4) for each in row) for row in optimal_quintic(1e-3, 1.0, 5, cushion=0)]
    assert published[0] == (8.4703, -25.1081, 18.6293)  # of arXiv 2506.10935
    assert get_coefficients("cans", 5) == tuple(with_safety(row, 1.01) for row in published)


@pytest.mark.parametrize(("lower", "upper"), INTERVALS)
def test_the_error_alternates_between_four_equal_extremes(lower, upper):
    a, b, c = coefficients = best_quintic(lower, upper)
    root = math.sqrt(9 * b * b - 20 * a * c)
    q, r = (math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
    assert lower < q < r < upper
    errors = [1 - value(coefficients, x) for x in (lower, q, r, upper)]
    size = largest_error(coefficients, lower, upper)
    assert errors == pytest.approx([size, -size, size, -size], rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("width", [2e-3, 5e-4, 1e-6, 1e-12, 1e-15])
def test_an_almost_empty_interval_takes_the_fixed_point(width):
    coefficients = best_quintic(1 - width, 1.0)
    assert coefficients == pytest.approx(FIXED_POINT, abs=2 * width)
    assert largest_error(coefficients, 1 - width, 1.0) < 1e-9


@pytest.mark.parametrize(
    ("lower", "upper", "steps", "message"),
    [
        (0.0, 1.0, 5, r"0 < lower < upper and 0 <= cushion < 1, got 0\.0, 1\.0"),
        (-1e-3, 1.0, 5, "0 < lower < upper"),
        (1.0, 1.0, 5, "0 < lower < upper"),
        (2.0, 1.0, 5, "0 < lower < upper"),
        (math.nan, 1.0, 5, "0 < lower < upper"),
        (1e-3, math.inf, 5, "0 < lower < upper"),
        (1e-3, 1.0, 0, "at least 1 and at most 100, got 0"),
        (1e-3, 1.0, 10**9, "at most 100, got 1000000000"),
        (1e-3, 1.0, 2.5, r"whole number of at least 1 and at most 100, got 2\.5"),
    ],
)
def test_what_cannot_be_generated_is_refused(lower, upper, steps, message):
    with pytest.raises(ValueError, match=message):
        optimal_quintic(lower, upper, steps)
