import pytest
import torch

from megatron_eopt.orthogonalize import get_coefficients, get_supported_coefficient_types, newton_schulz
from megatron_eopt.orthogonalize.forms import RESTARTS, restarts_for
from tests.orthogonalize.simulation import MARGIN, choose_restarts, furthest, largest_value
from tests.orthogonalize.test_newton_schulz import gaussian

QUINTIC = get_coefficients("quintic", 5)


def is_served(coefficient_type, steps):
    try:
        get_coefficients(coefficient_type, steps)
    except ValueError:
        return False
    return True


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


def test_medium_on_a_cpu_keeps_the_range_too():
    generator = torch.Generator().manual_seed(0)
    for name, steps in OFFERED:
        largest = largest_value(get_coefficients(name, steps))
        for shape in ((1, 1), (2, 3), (16, 48), (90, 20)):
            x = torch.randn(shape[0], 1, generator=generator) @ torch.randn(1, shape[1], generator=generator)
            result = newton_schulz(x, steps, name, fp32_matmul_prec="medium")
            assert torch.linalg.matrix_norm(result, 2) <= largest * MARGIN, (name, steps, shape)
            assert (result * x).sum() > 0  # of the direction of the gradient


@pytest.mark.parametrize("lower", [False, True], ids=["fp32", "fp16 and TF32"])
@pytest.mark.parametrize(("coefficient_type", "steps"), RESTARTS)
def test_tables_are_what_the_simulation_chooses(coefficient_type, steps, lower):
    schedule = get_coefficients(coefficient_type, steps)
    precision = "medium" if lower else "highest"
    table = "RESTARTS_IN_LOWER_PRECISION, or RESTARTS where it has no row" if lower else "RESTARTS"
    default, accurate = (restarts_for(coefficient_type, steps, precision, extra) for extra in (0, 1))
    chosen = choose_restarts(schedule, lower=lower)
    fewer_by_decision = (coefficient_type, lower) in {("cubic5", False), ("quintic", True)}
    if fewer_by_decision:  # so that "accurate" is what would be chosen
        assert (len(default), accurate) == (len(chosen) - 1, chosen)
        return
    assert (default, accurate) == (chosen, choose_restarts(schedule, extra=1, lower=lower)), table


def test_the_tables_have_every_set():
    assert {name for name, _ in RESTARTS} == set(get_supported_coefficient_types())


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
