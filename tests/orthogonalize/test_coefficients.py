import pytest
import torch

from megatron_eopt.orthogonalize.coefficients import (
    POLAR_EXPRESS_RAW,
    composite_range,
    get_coefficients,
    get_supported_coefficient_types,
    validate_coefficient_type,
    with_safety,
)


@pytest.mark.parametrize(
    ("coefficient_type", "steps", "low", "high"),
    [
        ("simple", 5, 0.682, 1.134),
        ("quintic", 5, 0.978, 1.032),
        ("quintic", 10, 0.978, 1.026),
        ("polar_express", 3, 0.186, 1.866),
        ("polar_express", 5, 0.870, 1.124),
        ("polar_express", 8, 1.000, 1.000),
        ("cans", 5, 0.884, 1.120),
        ("deepseekv4", 10, 1.000, 1.001),
        ("cubic5", 5, 0.774, 1.300),
        ("aol", 4, 0.739, 1.084),
        ("aol", 8, 0.987, 1.082),
    ],
)
def test_a_schedule_maps_singular_values_to_its_published_range(coefficient_type, steps, low, high):
    assert composite_range(get_coefficients(coefficient_type, steps)) == pytest.approx((low, high), abs=5.1e-4)


@pytest.mark.parametrize("coefficient_type", get_supported_coefficient_types())
def test_no_set_turns_a_singular_value_negative(coefficient_type):
    # what aol does above 0.884 as published: a matrix of rank 1 would get an ascent direction
    steps = {"cubic5": 5, "aol": 4, "deepseekv4": 10}.get(coefficient_type, 5)
    low, _ = composite_range(get_coefficients(coefficient_type, steps), lower=1e-6, upper=1.0)
    assert low > 0


@pytest.mark.parametrize("coefficient_type", ["polar_express", "cans", "deepseekv4"])
def test_past_the_end_the_last_polynomial_repeats(coefficient_type):
    whole = get_coefficients(coefficient_type, 10)
    assert get_coefficients(coefficient_type, 12) == whole + whole[-1:] * 2


@pytest.mark.parametrize("steps", [10, 15])
def test_other_sets_are_repeated_as_a_whole(steps):
    assert get_coefficients("quintic", steps) == get_coefficients("quintic", 5) * (steps // 5)
    assert get_coefficients("simple", steps) == get_coefficients("simple", 1) * steps


@pytest.mark.parametrize(
    ("coefficient_type", "steps", "message"),
    [
        ("quintic", 6, "quintic has 5 polynomials .* cannot be served in 6"),
        ("aol", 5, "aol has 4 polynomials .* cannot be served in 5"),
        ("cubic5", 4, "cubic5 is served in exactly 5"),
        ("cubic5", 10, "cubic5 is served in exactly 5"),
        ([(2.0, -1.5, 0.5), (1.9, -1.2, 0.3)], 3, "custom has 2 polynomials"),
        ([], 1, "non-empty list"),
        ([(1.0, 2.0)], 1, r"list of \(a, b, c\)"),
        ("quintic", 0, "at least 1, got 0"),
        ("quintic", 2.5, r"integer of at least 1, got 2\.5"),
        ("quintc", 5, "unknown coefficient type 'quintc': expected one of simple, quintic, polar_express"),
    ],
)
def test_what_cannot_be_served_is_refused(coefficient_type, steps, message):
    with pytest.raises(ValueError, match=message):
        get_coefficients(coefficient_type, steps)


def test_fewer_steps_than_a_set_has_are_its_first_ones():
    assert get_coefficients("quintic", 3) == get_coefficients("quintic", 5)[:3]


def test_a_list_of_the_callers_own_is_served():
    own = [(2.0, -1.5, 0.5), (1.9, -1.2, 0.3)]
    assert get_coefficients(own, 4) == tuple(own) * 2


def test_validate_names_the_known_ones():
    for name in get_supported_coefficient_types():
        validate_coefficient_type(name)
    with pytest.raises(ValueError, match="deepseekv4, cubic5"):
        validate_coefficient_type("custom")


def test_safety_moves_the_end_of_the_interval():
    # p(s / 1.05) at s = 1.05 is p(1)
    (a, b, c), (sa, sb, sc) = POLAR_EXPRESS_RAW[0], with_safety(POLAR_EXPRESS_RAW[0], 1.05)
    assert sa * 1.05 + sb * 1.05**3 + sc * 1.05**5 == pytest.approx(a + b + c)


def test_raw_polar_express_with_the_published_safety_is_the_published_table():
    folded = [with_safety(row, 1.01) for row in POLAR_EXPRESS_RAW[:-1]]
    torch.testing.assert_close(
        torch.tensor(folded), torch.tensor(get_coefficients("polar_express", 6)), atol=1e-4, rtol=0
    )
