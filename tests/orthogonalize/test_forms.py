"""The standard and the Gram form, presets, parts of stacks, and what is not finite."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from counting import Operations
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_eopt.kernels.precision import gram_dtype
from megatron_eopt.kernels.products import Blocked, Products, mean_of_triangles
from megatron_eopt.orthogonalize import get_coefficients, newton_schulz
from megatron_eopt.orthogonalize.forms import (
    PRESETS,
    UNIT_IN_FP16,
    iterate_gram_fp16,
    restarts_for,
)
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.schemes.whole import orthogonalized
from tests.orthogonalize.simulation import PUBLISHED_ERRORS, Rounded
from tests.orthogonalize.test_newton_schulz import exact, gaussian, relative

QUINTIC = get_coefficients("quintic", 5)


def with_spectrum(spectrum, seed=0):
    """A matrix of 96 rows and 256 columns in fp64."""
    values = SPECTRA[spectrum]
    x = gaussian(96, 256, seed=seed, dtype=torch.float64)
    if values is None:
        return x
    u, _ = torch.linalg.qr(x[:, :96])
    v, _ = torch.linalg.qr(gaussian(256, 96, seed=seed + 1, dtype=torch.float64))
    return (u * values) @ v.mT


SPECTRA = {
    "gaussian": None,
    "cond_1e3": torch.logspace(0, -3, 96, dtype=torch.float64),
    "cond_1e7": torch.logspace(0, -7, 96, dtype=torch.float64),
    "rank_10": (torch.arange(96) < 10).double(),
    "spikes": torch.where(torch.arange(96) < 4, 1.0, 1e-3).double(),
    "harmonic": 1 / torch.arange(1, 97, dtype=torch.float64),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_gram_form_keeps_the_published_errors(preset, spectrum):
    wide, (name, steps, extra) = with_spectrum(spectrum).float(), PRESETS[preset]
    for x in (wide, wide.mT):
        error = relative(newton_schulz(x, form="gram", preset=preset), exact(x, steps, name))
        assert error <= PUBLISHED_ERRORS[preset][torch.float32][spectrum]
        in_bf16 = newton_schulz(x, fp32_matmul_prec="medium", form="standard")
        assert error < relative(in_bf16, exact(x, 5, "quintic"))
    products, restarts = Rounded(torch.float16), restarts_for(name, steps, "medium", extra)
    half = (wide * (UNIT_IN_FP16 / wide.norm())).half()
    result = iterate_gram_fp16(half, get_coefficients(name, steps), restarts, products, apply=products.apply)
    assert relative(result, exact(wide, steps, name)) <= PUBLISHED_ERRORS[preset][torch.float16][spectrum]


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
    long = newton_schulz(wide, 10, "deepseekv4")
    assert torch.equal(long, newton_schulz(wide, 10, "deepseekv4", form="standard"))


def test_the_gram_form_of_shards_has_its_own_dtype():
    settings = NewtonSchulz(fp32_matmul_prec="medium")
    assert settings.compile((24, 80), torch.float32, "cpu").restarts is None
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float16)):
        iteration = settings.compile((24, 24), torch.float32, device, form="gram")
        assert (iteration.restarts, iteration.dtype) == ((2,), dtype)
        assert settings.compile((24, 80), torch.float32, device, form="standard").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no table has restarts of 'deepseekv4' in 10 steps"):
        NewtonSchulz(steps=10, coefficient_type="deepseekv4").compile((24, 80), torch.float32, "cpu", form="gram")


def test_the_dtype_of_the_gram_form():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert gram_dtype(torch.float32, cpu) == gram_dtype(torch.float32, gpu) == torch.float32
    planned = torch.device("meta")
    assert gram_dtype(torch.bfloat16, gpu) == gram_dtype(torch.bfloat16, planned) == torch.float16
    assert gram_dtype(torch.bfloat16, cpu) is None


def test_fp16_holds_small_rows_beside_large_ones():
    # in a Gram matrix of trace 1 the entries of the small rows would be 3e-8, of which fp16 keeps nothing
    x = gaussian(64, 4096)
    x[32:] *= 1e-3
    x = x / x.norm()
    products = Rounded(torch.float16)
    half = (x * UNIT_IN_FP16).half()
    R = products.gram(half).float() / UNIT_IN_FP16**2
    assert relative(R[32:, 32:], x[32:] @ x[32:].mT) < 2**-11  # half of the last digit of fp16
    result = iterate_gram_fp16(half, QUINTIC, (3,), products, products.apply)
    expected = exact(x, 5, "quintic")
    assert relative(result, expected) < 2e-3
    assert relative(result[32:], expected[32:]) < 2e-3


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (3, 96, 256)], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_bf16_taken_over_as_fp16_has_the_published_errors(spectrum, shape):
    """The path of a step on a GPU: a stack in bf16, whose memory the iteration takes, against fp64."""
    matrices = [with_spectrum(spectrum, seed) for seed in range(3)]
    x = (torch.stack(matrices) if len(shape) == 3 else matrices[0]).to(torch.bfloat16)
    x = x.mT.contiguous() if shape[-2] > shape[-1] else x
    settings = NewtonSchulz(fp32_matmul_prec="medium", products=Rounded(torch.float16))
    iteration = settings.compile(x.shape, x.dtype, "cuda")
    reference = exact(x, 5, "quintic")
    result = iteration.run(x, out=x.view(iteration.factor_dtype(x.dtype)))
    assert (iteration.dtype, iteration.restarts, result.dtype) == (torch.float16, (2,), torch.float16)
    square = settings.compile((32, 32), x.dtype, "cuda")
    assert (square.dtype, square.restarts) == (torch.bfloat16, None)
    assert result.data_ptr() == x.data_ptr()
    assert relative(result, reference) <= PUBLISHED_ERRORS["default"][torch.float16][spectrum]


@pytest.mark.parametrize("shape", [(5, 96, 256), (5, 256, 96), (5, 96, 96)], ids=str)
def test_a_step_on_a_gpu_copies_no_factor(shape):
    """Products end in the memory of the stack, chunk by chunk, whichever form they have."""
    settings = NewtonSchulz(fp32_matmul_prec="medium")
    with FakeTensorMode():
        stack = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        iteration = replace(settings.compile(shape, stack.dtype, "cuda"), chunk=2)
        job = SimpleNamespace(iteration=iteration)
        with Operations() as counted:
            factors = orthogonalized(stack, job)
    assert factors.untyped_storage()._cdata == stack.untyped_storage()._cdata
    assert not {"copy_", "clone", "_to_copy", "cat"} & counted.counts.keys(), counted.counts


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("stack", [(), (2,)])
def test_means_of_triangles_are_exactly_symmetric_products(dtype, stack):
    """What a GPU does: other memory is read and written, and no half of a large number overflows."""
    a = gaussian(*stack, 16, 24).to(dtype)
    half, out = torch.full((2, *stack, 16, 16), torch.nan, dtype=dtype).unbind()
    gram = mean_of_triangles(half, a, a.mT, beta=0.0, alpha=1.0, half=half, out=out)
    assert gram is out
    c, large = gram.clone(), torch.eye(16, dtype=dtype).expand(*stack, 16, 16) * 200
    product = mean_of_triangles(c, large, large, beta=0.5, alpha=1.0, half=half, out=None)
    for found, expected in (
        (gram, a.double() @ a.double().mT),
        (product, 0.5 * c.double() + large.double() @ large.double()),
    ):
        assert torch.equal(found, found.mT)
        bound = 8 * torch.finfo(dtype).eps * expected.abs().amax()
        assert (found - expected).abs().max() <= bound


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "grams"}, "unknown form 'grams': expected one of auto, standard, gram"),
        (
            {"form": "gram", "fp32_matmul_prec": "medium"},
            "the Gram form is not safe with 'quintic' in 5 steps and torch.b",
        ),
        ({"form": "gram", "steps": 10, "coefficient_type": "deepseekv4"}, "not safe with 'deepseekv4' in 10 steps"),
        ({"form": "gram", "steps": 1, "coefficient_type": [(2.0, -1.5, 0.5)]}, "or give its restarts"),
    ],
)
def test_what_is_unknown_or_unsafe_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(torch.ones(4, 8), **settings)


@dataclass(frozen=True)
class Watched(Products):
    """Tells how many matrices are worked on at once."""

    seen: list[int] = field(default_factory=list, hash=False, compare=False)

    def gram(self, x, out=None):
        self.seen.append(len(x))
        return super().gram(x, out)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize(("matrices", "expected"), [(0.5, [1] * 5), (1, [1] * 5), (2.9, [2, 2, 1]), (5, [5])])
def test_a_chunk_of_a_stack_takes_no_more_memory_than_it_may(form, matrices, expected):
    # X and its successor, and products of the short side: two or four, and what makes one symmetric
    of_one = (2 * 24 * 40 + (3 if form == "standard" else 5) * 24 * 24) * 4
    products, x = Watched(), gaussian(5, 24, 40)
    in_parts = newton_schulz(x, form=form, max_bytes=int(matrices * of_one), products=products)
    torch.testing.assert_close(in_parts, newton_schulz(x, form=form), rtol=1e-5, atol=1e-6)
    times = 5 if form == "standard" else 2
    assert products.seen == [size for size in expected for _ in range(times)]


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_gives_zero(form, bad):
    x = gaussian(4, 16, 40)
    x[3] = 0  # and a zero matrix stays zero
    expected = newton_schulz(x, form=form)
    x[1, 3, 5] = bad
    result = newton_schulz(x, form=form)
    assert torch.equal(result[1], torch.zeros(16, 40))
    assert torch.equal(result[3], torch.zeros(16, 40))
    torch.testing.assert_close(result[[0, 2]], expected[[0, 2]], rtol=1e-6, atol=1e-7)
    shown = newton_schulz(x, form=form, propagate_nan=True)
    assert shown[1].isnan().all()
    assert shown[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 8), (2, 0, 8)])
def test_nothing_stays_nothing(shape):
    assert newton_schulz(torch.zeros(shape)).shape == shape


@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 20),
    strips=st.integers(1, 9),
    stack=st.integers(0, 2),
    transposed=st.booleans(),
)
def test_strips_are_the_whole_product_and_exactly_symmetric(rows, cols, strips, stack, transposed):
    shape = (cols, rows) if transposed else (rows, cols)
    x = gaussian(*([stack] if stack else []), *shape, dtype=torch.float64)
    x = x.mT if transposed else x
    products = Blocked(strips, smallest=1)
    R = products.gram(x)
    torch.testing.assert_close(R, Products().gram(x))
    square = Products().gram(R)
    before = R.clone()
    for c, a, b in ((R, R, R), (R, R, square), (R, square, R), (square, R, R)):
        whole = Products().addmm(c, a, b, beta=0.5, alpha=2.0)
        out = torch.full_like(R, torch.nan)
        for result in (
            products.addmm(c, a, b, beta=0.5, alpha=2.0),
            products.addmm(c, a, b, beta=0.5, alpha=2.0, out=out),
        ):
            torch.testing.assert_close(result, whole)
            above = torch.ones_like(result, dtype=torch.bool).triu(-(-rows // strips))
            assert torch.equal(result[above], result.mT[above])
        assert result is out
    assert torch.equal(R, before)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e6, 1e30])
def test_the_input_is_left_as_it_is(form, scale):
    x = gaussian(2, 16, 40) * scale
    before = x.clone()
    for settings in ({}, {"preset": "accurate"}, {"preset": "fast"}):
        result = newton_schulz(x, form=form, **settings)
        assert torch.equal(x, before)
        torch.testing.assert_close(result, newton_schulz(gaussian(2, 16, 40), form=form, **settings), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("products", "standard", "gram"),
    [(Products(), 760, 776), (Blocked(), 584, 600)],
)
def test_the_cheaper_form_is_compiled(products, standard, gram):
    # equal at an aspect of 1.5, where five eighths of a symmetric product are computed at 1.15, where half is at 1
    settings = NewtonSchulz(fp32_matmul_prec="highest", products=products)
    for cols, restarts in ((standard, None), (gram, (3,))):
        for shape in ((512, cols), (cols, 512), (7, 512, cols)):
            assert settings.compile(shape, torch.float32, "cpu").restarts == restarts
