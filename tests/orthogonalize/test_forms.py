"""The standard and the Gram form, presets, parts of stacks, what is not finite, and figures of health."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.orthogonalize import get_coefficients, newton_schulz
from megatron_eopt.orthogonalize.form import choose_form, gram_flops, standard_flops
from megatron_eopt.orthogonalize.ladder import choose
from megatron_eopt.orthogonalize.restarts import PRESETS, PUBLISHED_ERRORS, restarts_for
from megatron_eopt.orthogonalize.symmetric import Blocked, Dense
from tests.orthogonalize.test_newton_schulz import exact, gaussian, relative

QUINTIC = get_coefficients("quintic", 5)


def with_spectrum(rows, cols, values, seed=0):
    u, _ = torch.linalg.qr(gaussian(rows, rows, seed=seed, dtype=torch.float64))
    v, _ = torch.linalg.qr(gaussian(cols, rows, seed=seed + 1, dtype=torch.float64))
    return (u * values) @ v.mT


SPECTRA = {
    "gaussian": lambda n: None,
    "cond_1e3": lambda n: torch.logspace(0, -3, n, dtype=torch.float64),
    "cond_1e7": lambda n: torch.logspace(0, -7, n, dtype=torch.float64),
    "rank_10": lambda n: (torch.arange(n) < 10).double(),
    "spikes": lambda n: torch.where(torch.arange(n) < 4, 1.0, 1e-3).double(),
    "harmonic": lambda n: 1 / torch.arange(1, n + 1, dtype=torch.float64),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(96, 256), (256, 96)])
def test_the_gram_form_keeps_the_published_errors(preset, spectrum, shape):
    values = SPECTRA[spectrum](96)
    x = gaussian(96, 256) if values is None else with_spectrum(96, 256, values).float()
    x = x if shape == (96, 256) else x.mT
    name, steps, _ = PRESETS[preset]
    reference = exact(x, steps, name)
    error = relative(newton_schulz(x, form="gram", preset=preset), reference)
    assert error <= PUBLISHED_ERRORS[preset][torch.float32][spectrum]
    in_bf16 = relative(newton_schulz(x, fp32_matmul_prec="medium", form="standard"), exact(x, 5, "quintic"))
    assert error < in_bf16


@pytest.mark.parametrize("coefficient_type", ["simple", "quintic", "polar_express", "cans", "cubic5"])
@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (3, 24, 80), (48, 48)])
def test_both_forms_are_the_same_polynomial(coefficient_type, shape):
    x = gaussian(*shape)
    standard = newton_schulz(x, 5, coefficient_type, form="standard")
    gram = newton_schulz(x, 5, coefficient_type, form="gram")
    assert gram.shape == x.shape
    assert relative(gram, standard.double()) < 1e-4
    assert not torch.equal(gram, standard)


def test_auto_is_the_cheaper_form():
    wide, square = gaussian(32, 128), gaussian(48, 48)
    assert torch.equal(newton_schulz(wide), newton_schulz(wide, form="gram"))
    assert torch.equal(newton_schulz(square), newton_schulz(square, form="standard"))
    # bf16 products: never the Gram form
    medium = newton_schulz(wide, fp32_matmul_prec="medium")
    assert torch.equal(medium, newton_schulz(wide, fp32_matmul_prec="medium", form="standard"))
    # no restarts in the table, or no safe ones
    own = [(2.0, -1.5, 0.5)] * 3
    assert torch.equal(newton_schulz(wide, 3, own), newton_schulz(wide, 3, own, form="standard"))
    assert not torch.equal(newton_schulz(wide, 3, own), newton_schulz(wide, 3, own, form="gram"))
    long = newton_schulz(wide, 10, "deepseekv4")
    assert torch.equal(long, newton_schulz(wide, 10, "deepseekv4", form="standard"))


def test_the_cost_rule():
    # quintic, one restart: 20 n^2 m + 10 n^3 against 8 n^2 m + 28 n^3
    assert standard_flops(2, 6, QUINTIC) == 20 * 4 * 6 + 10 * 8
    assert gram_flops(2, 6, QUINTIC, (3,)) == 8 * 4 * 6 + 28 * 8
    assert standard_flops(2, 6, QUINTIC, 0.5) == 15 * 4 * 6 + 5 * 8
    assert gram_flops(2, 6, QUINTIC, (3,), 0.5) == 6 * 4 * 6 + 14 * 8
    cubic = get_coefficients("cubic5", 5)
    assert gram_flops(2, 6, cubic, (), 0.5) == 3 * 4 * 6 + 12 * 8
    # the forms cost the same at an aspect of 1.5
    assert choose_form(512, 760, QUINTIC, (3,), torch.float32) == "standard"
    assert choose_form(512, 776, QUINTIC, (3,), torch.float32) == "gram"
    assert choose_form(512, 4096, QUINTIC, None, torch.float32) == "standard"
    assert choose_form(512, 4096, QUINTIC, (3,), torch.bfloat16) == "standard"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "grams"}, "unknown form 'grams': expected one of auto, standard, gram"),
        ({"preset": "exact"}, "unknown preset 'exact': expected one of fast, default, accurate"),
        (
            {"form": "gram", "fp32_matmul_prec": "medium"},
            "the Gram form is not safe with 'quintic' in 5 steps and torch.b",
        ),
        ({"form": "gram", "steps": 10, "coefficient_type": "deepseekv4"}, "not safe with 'deepseekv4' in 10 steps"),
    ],
)
def test_what_is_unknown_or_unsafe_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(torch.ones(4, 8), **settings)


def test_presets():
    x = gaussian(32, 128)
    assert torch.equal(newton_schulz(x, preset="fast"), newton_schulz(x, 5, "cubic5"))
    assert len(restarts_for("quintic", 5, extra=1)) == len(restarts_for("quintic", 5)) + 1
    assert not torch.equal(newton_schulz(x, preset="accurate"), newton_schulz(x))


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("max_bytes", [1, 40_000, 2**30])
def test_a_stack_in_parts_is_the_stack(form, max_bytes):
    x = gaussian(5, 24, 40)
    in_parts, health = newton_schulz(x, form=form, max_bytes=max_bytes, health=True)
    torch.testing.assert_close(in_parts, newton_schulz(x, form=form), rtol=1e-5, atol=1e-6)
    assert health.norm.shape == (5,)
    torch.testing.assert_close(health.norm, x.double().norm(dim=(-2, -1)))


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_gives_zero_and_is_told(form, bad):
    x = gaussian(3, 16, 40)
    expected = newton_schulz(x, form=form)
    x[1, 3, 5] = bad
    result, health = newton_schulz(x, form=form, health=True)
    assert health.finite.tolist() == [True, False, True]
    assert torch.equal(result[1], torch.zeros(16, 40))
    torch.testing.assert_close(result[[0, 2]], expected[[0, 2]], rtol=1e-6, atol=1e-7)
    shown = newton_schulz(x, form=form, propagate_nan=True)
    assert shown[1].isnan().all()
    assert shown[[0, 2]].isfinite().all()


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_health(form):
    orthogonal = with_spectrum(16, 40, torch.ones(16, dtype=torch.float64)).float() * 7
    x = torch.stack([orthogonal, with_spectrum(16, 40, (torch.arange(16) < 4).double()).float(), torch.zeros(16, 40)])
    _, health = newton_schulz(x, 8, "polar_express", form=form, health=True)
    torch.testing.assert_close(health.norm, torch.tensor([28.0, 2.0, 0.0], dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        health.effective_rank, torch.tensor([16.0, 4.0, 0.0], dtype=torch.float64), rtol=1e-4, atol=0
    )
    # seven of eight steps leave an orthogonal matrix near one; of the others 12 and all 16 directions are missing
    assert health.residual[0] < 0.05
    assert health.residual[1].item() == pytest.approx(0.75**0.5, rel=1e-3)
    assert health.residual[2].item() == pytest.approx(1.0)
    _, of_one = newton_schulz(orthogonal, 8, "polar_express", form=form, health=True)
    assert of_one.norm.shape == ()
    assert of_one.effective_rank.item() == pytest.approx(16, rel=1e-4)


def test_health_of_a_good_input_tells_of_a_bad_schedule():
    orthogonal = with_spectrum(16, 40, torch.ones(16, dtype=torch.float64)).float()
    _, health = newton_schulz(orthogonal, 3, "polar_express", health=True)
    assert health.residual > 0.2


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 8), (2, 0, 8)])
def test_health_of_nothing(shape):
    result, health = newton_schulz(torch.zeros(shape), health=True)
    assert result.shape == shape
    assert health.finite.all()


@given(blocks=st.integers(1, 6), cols=st.integers(1, 20), levels=st.integers(1, 3), transposed=st.booleans())
def test_blocks_are_the_whole_product_and_exactly_symmetric(blocks, cols, levels, transposed):
    rows = blocks * 2**levels
    x = gaussian(cols, rows, dtype=torch.float64).mT if transposed else gaussian(rows, cols, dtype=torch.float64)
    products = Blocked(levels)
    R = products.gram(x)
    torch.testing.assert_close(R, Dense().gram(x))
    square = Dense().gram(R)
    whole = Dense().addmm(R, R, square, beta=0.5, alpha=2.0)
    out = torch.full_like(R, torch.nan)
    for result in (
        products.addmm(R, R, square, beta=0.5, alpha=2.0),
        products.addmm(R, R, square, beta=0.5, alpha=2.0, out=out),
    ):
        torch.testing.assert_close(result, whole)
        above = torch.ones_like(result, dtype=torch.bool).triu(rows // 2**levels)
        assert torch.equal(result[above], result.mT[above])
    assert result is out


@pytest.mark.parametrize("shape", [(7, 9), (2, 8, 12)])
def test_what_blocks_do_not_serve_is_computed_whole(shape):
    x = gaussian(*shape)
    assert torch.equal(Blocked().gram(x), Dense().gram(x))


def test_large_matrices_take_blocks():
    x = gaussian(512, 1024)
    for form in ("standard", "gram"):
        assert relative(newton_schulz(x, form=form), exact(x, 5, "quintic")) < 1e-4


def test_products_of_a_ladder_serve_the_entry():
    x = gaussian(512, 640)
    choice = choose([x.shape], x.dtype, x.device)
    assert choice.rung == "blocked"
    for form in ("standard", "gram"):
        assert torch.equal(newton_schulz(x, form=form, products=choice.products), newton_schulz(x, form=form))
        whole = newton_schulz(x, form=form, products=Dense())
        assert not torch.equal(whole, newton_schulz(x, form=form))
        assert relative(whole, exact(x, 5, "quintic")) < 1e-4
