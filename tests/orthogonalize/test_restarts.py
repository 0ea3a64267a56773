import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.orthogonalize import get_coefficients, get_supported_coefficient_types, newton_schulz
from megatron_eopt.orthogonalize.coefficients import with_safety
from megatron_eopt.orthogonalize.forms import (
    PRESETS,
    RESTARTS,
    restarts_for,
)
from tests.orthogonalize.simulation import (
    LARGEST_ERROR,
    MARGIN,
    PUBLISHED_ERRORS,
    ROUNDED,
    SHAPES,
    SPECTRA,
    Rounded,
    choose_restarts,
    furthest,
    largest_value,
    result_norm,
    simulated_error,
)

QUINTIC = get_coefficients("quintic", 5)
IN_GRAM_FORM = [schedule for schedule, (default, _) in RESTARTS.items() if default is not None]


def preset_errors(preset, rounding=torch.float16, **kwargs):
    name, steps, extra = PRESETS[preset]
    precision = "highest" if rounding == torch.float32 else "medium"
    restarts = restarts_for(name, steps, precision, extra)
    return simulated_error(get_coefficients(name, steps), restarts, rounding, **kwargs)


def in_lower_precision(coefficient_type, steps):
    """The default restarts, and those of accurate."""
    return tuple(restarts_for(coefficient_type, steps, "medium", extra) for extra in (0, 1))


def is_served(coefficient_type, steps):
    try:
        get_coefficients(coefficient_type, steps)
    except ValueError:
        return False
    return True


def gaussian(*shape, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x / x.norm(dim=(-2, -1), keepdim=True)).to(dtype)


@pytest.mark.parametrize(("coefficient_type", "steps"), RESTARTS)
def test_the_tables_are_what_the_simulation_chooses(coefficient_type, steps):
    schedule = get_coefficients(coefficient_type, steps)
    if coefficient_type == "cubic5":  # without by decision: "accurate" is what would be chosen
        assert RESTARTS["cubic5", 5] == ((), choose_restarts(schedule))
        return
    assert (choose_restarts(schedule), choose_restarts(schedule, extra=1)) == RESTARTS[coefficient_type, steps]


@pytest.mark.wide
@pytest.mark.parametrize(("coefficient_type", "steps"), IN_GRAM_FORM)
def test_those_in_lower_precision_are_too(coefficient_type, steps):
    schedule = get_coefficients(coefficient_type, steps)
    default, accurate = in_lower_precision(coefficient_type, steps)
    chosen = choose_restarts(schedule, lower=True)
    if coefficient_type == "quintic":  # one by decision: "accurate" is what would be chosen
        assert (default, accurate) == ((2,), chosen)
        return
    assert (default, accurate) == (chosen, choose_restarts(schedule, extra=1, lower=True))


OFFERED = [
    (name, steps) for name in get_supported_coefficient_types() for steps in range(1, 13) if is_served(name, steps)
]


@pytest.mark.parametrize(
    ("coefficient_type", "steps"),
    [schedule if schedule in RESTARTS else pytest.param(*schedule, marks=pytest.mark.wide) for schedule in OFFERED],
)
def test_no_rounding_takes_a_set_out_of_its_range(coefficient_type, steps):
    schedule = get_coefficients(coefficient_type, steps)
    for rounding in ("bf16", "tf32", "fp32"):
        assert furthest(schedule, None, rounding, seeds=4) <= MARGIN, rounding
    for precision, roundings in (("medium", ("fp16", "tf32")), ("highest", ("fp32",))):
        for extra in (0, 1):
            restarts = restarts_for(coefficient_type, steps, precision, extra)
            if restarts is None:
                continue
            for rounding in roundings:
                assert furthest(schedule, restarts, rounding, seeds=4) <= MARGIN, (rounding, restarts)


def test_the_margin_is_needed():
    """And the simulation finds what leaves it: CANS as published, and quintic with its restart of fp32."""
    published = [with_safety(row, 1 / 1.01) for row in get_coefficients("cans", 5)]
    assert furthest(published, None, "bf16") > 1000
    assert furthest([with_safety(row, 1.004) for row in published], None, "bf16") > MARGIN
    assert furthest([with_safety(row, 1.005) for row in published], None, "bf16") <= MARGIN
    assert furthest(QUINTIC, (3,), "fp16") > 2
    assert furthest(QUINTIC, (3,), "tf32") > 2


@settings(max_examples=100, deadline=None)
@given(
    schedule=st.sampled_from(OFFERED),
    rounding=st.sampled_from(sorted(ROUNDED)),
    rows=st.integers(1, 12),
    more=st.integers(0, 12),
    values=st.lists(st.floats(0, 1), max_size=11),
    seed=st.integers(0, 1000),
)
def test_no_set_that_is_offered_leaves_its_stated_range(schedule, rounding, rows, more, values, seed):
    """In either form, of matrices with any singular values."""
    name, steps = schedule
    generator = torch.Generator().manual_seed(seed)
    s = torch.tensor([1.0, *values, *[0.0] * rows], dtype=torch.float64)[:rows]
    left = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(rows + more, rows, generator=generator, dtype=torch.float64)).Q
    s /= s.norm()
    X = ((left * s) @ right.mT).float()[None]
    polynomials = get_coefficients(name, steps)
    largest = largest_value(polynomials)
    forms = [] if rounding == "fp16" else [None]
    restarts = restarts_for(name, steps, "highest" if rounding == "fp32" else "medium")
    if restarts is not None and rounding != "bf16":
        forms.append(restarts)
    for form in forms:
        norm = result_norm(X, polynomials, form, rounding)
        assert norm <= largest * MARGIN, (form, norm, largest)


def test_medium_on_a_cpu_keeps_the_range_too():
    generator = torch.Generator().manual_seed(0)
    for name, steps in OFFERED:
        largest = largest_value(get_coefficients(name, steps))
        for shape in ((1, 1), (2, 3), (16, 48), (90, 20)):
            x = torch.randn(shape[0], 1, generator=generator) @ torch.randn(1, shape[1], generator=generator)
            result = newton_schulz(x, steps, name, fp32_matmul_prec="medium")
            assert torch.linalg.matrix_norm(result, 2) <= largest * MARGIN, (name, steps, shape)
            assert (result * x).sum() > 0  # of the direction of the gradient


def test_the_tables_have_every_set():
    assert {name for name, _ in RESTARTS} == set(get_supported_coefficient_types())


# seeds and shapes that took no part in the choice
@pytest.mark.parametrize(("shape", "seed"), [(SHAPES[0], 1), (SHAPES[1], 1), ((64, 256), 2), ((192, 192), 3)])
@pytest.mark.parametrize(("coefficient_type", "steps"), IN_GRAM_FORM)
def test_the_gram_form_in_fp16_is_never_worse_than_the_standard_form_in_bf16(coefficient_type, steps, shape, seed):
    schedule = get_coefficients(coefficient_type, steps)
    standard = simulated_error(schedule, None, torch.bfloat16, shape=shape, seed=seed)
    errors, accurate = (
        simulated_error(schedule, restarts, shape=shape, seed=seed)
        for restarts in in_lower_precision(coefficient_type, steps)
    )
    for name in SPECTRA:
        by_decision = 3 if (coefficient_type, name) == ("quintic", "gaussian") else 1
        assert errors[name] <= by_decision * min(standard[name], LARGEST_ERROR), name
        assert accurate[name] <= min(standard[name], LARGEST_ERROR), name


@pytest.mark.parametrize("shape", SHAPES)
def test_fast_is_never_worse_than_quintic_in_bf16(shape):
    standard = simulated_error(QUINTIC, None, torch.bfloat16, shape=shape)
    errors = preset_errors("fast", shape=shape)
    assert [name for name in SPECTRA if errors[name] > standard[name]] == []


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("rounding", "mirrored"), [(torch.float16, True), (torch.float32, True), (torch.float32, False)]
)
def test_errors_are_as_published(preset, rounding, mirrored):
    runs = [
        preset_errors(preset, rounding, shape=shape, seed=seed, mirrored=mirrored)
        for shape in SHAPES
        for seed in (0, 7)
    ]
    for name, bound in PUBLISHED_ERRORS[preset][rounding].items():
        # not far above it either: a bound that says nothing
        assert bound / 3.5 < max(run[name] for run in runs) <= bound, name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rounding", [torch.float16, torch.float32])
def test_errors_with_means_of_triangles_are_not_larger(preset, rounding, monkeypatch):
    """As on a GPU without the kernel: half the product and its transpose are added, each rounded."""
    mean = lambda products, x: products.round(products.round(x / 2) + products.round(x / 2).mT)  # noqa: E731
    monkeypatch.setattr(Rounded, "_symmetric", mean)
    runs = [preset_errors(preset, rounding, shape=shape, seed=seed) for shape in SHAPES for seed in (0, 7)]
    for name, bound in PUBLISHED_ERRORS[preset][rounding].items():
        assert max(run[name] for run in runs) <= bound, name


def test_simulated_bf16_has_the_error_of_real_bf16():
    x = gaussian(64, 128)
    exact = newton_schulz(x.double())
    error = (newton_schulz(x, fp32_matmul_prec="medium").double() - exact).norm() / exact.norm()
    simulated = simulated_error(QUINTIC, None, torch.bfloat16, shape=(64, 128))["gaussian"]
    assert simulated == pytest.approx(error.item(), rel=0.3)


@pytest.mark.parametrize(
    ("coefficient_type", "steps", "precision", "extra", "restarts"),
    [
        ("quintic", 5, "highest", 0, (3,)),
        ("quintic", 5, "highest", 1, (2, 3)),
        ("quintic", 5, "high", 0, (2,)),  # as in fp16, since TF32 rounds as coarsely
        ("quintic", 5, "medium", 0, (2,)),
        ("cubic5", 5, "highest", 0, ()),
        ("cubic5", 5, "high", 1, (2, 3)),
        ("aol", 4, "medium", 0, (2,)),
        ("deepseekv4", 10, "highest", 0, None),
        ("deepseekv4", 10, "highest", 1, None),
        ("quintic", 4, "highest", 0, None),  # not in the table
        (QUINTIC, 5, "highest", 0, None),
    ],
)
def test_restarts_of_a_schedule(coefficient_type, steps, precision, extra, restarts):
    assert restarts_for(coefficient_type, steps, precision, extra) == restarts


def test_restarts_of_ones_own():
    x = torch.stack([gaussian(24, 64), gaussian(24, 64).flip(0)])
    own = [(2.0, -1.5, 0.5)] * 3
    expected = newton_schulz(x, 3, own, form="standard")
    for restarts in ([], [1], (1, 2)):
        result = newton_schulz(x, 3, own, form="gram", restarts=restarts)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        assert not torch.equal(result, expected)
    # in place of those of the table, and the Gram form is taken where it is cheaper
    assert torch.equal(newton_schulz(x, restarts=(2, 3)), newton_schulz(x, preset="accurate"))
    assert torch.equal(newton_schulz(x, 3, own, restarts=(1,)), newton_schulz(x, 3, own, form="gram", restarts=(1,)))


@pytest.mark.parametrize("restarts", [(0,), (5,), (3, 2), (2, 2), (1.0,)])
def test_restarts_that_are_none_are_refused(restarts):
    with pytest.raises(ValueError, match="restarts are ascending integers between 1 and 4, got "):
        newton_schulz(gaussian(24, 64), restarts=restarts)
