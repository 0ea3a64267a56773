"""The Triton kernel: natively where there is a GPU, else in Triton's interpreter.

Triton asks for its interpreter when it is first imported, so all cases run in a process of their own, which is this
file as a program; each test reads the outcome of one case.
"""

import functools
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# half a unit in the last place; Triton's interpreter cuts bf16 off (3.9), GPUs round it
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0 ** (-8 if DEVICE == "cuda" else -7), torch.float32: 2.0**-24}
RANDOM = 30  # cases, more of which found nothing
CASES, WIDE = {}, {}  # those of the wide subset take most of the time


def case(function):
    CASES[function.__name__] = function
    return function


def wide_case(function):
    WIDE[function.__name__] = function
    return function


def product(a, b, c=None, **more):
    from megatron_eopt.kernels.triton_kernel import symmetric_product

    return symmetric_product(a, b, c, **more)


def tiles(width, band):
    from megatron_eopt.kernels.triton_kernel import Tiles

    return Tiles(width, 16, band)


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def expect(got, a, b, c=None, alpha=1.0, beta=0.0, sums=2.0**-19):
    """``got`` is the lower half of ``alpha A B^T + beta C`` and its mirror image, whether that is symmetric or not.

    ``sums`` is what the sum in fp32 may be off by, of its largest entry.
    """
    expected = alpha * a.double() @ b.double().mT
    if c is not None:
        expected += beta * c.double()
    expected = expected.tril() + expected.tril(-1).mT
    assert torch.equal(got, got.mT)
    error = (got.double() - expected).abs() - ROUNDING[got.dtype] * expected.abs()
    assert error.max() <= sums * expected.abs().max(), f"off by {error.max() / expected.abs().max():.1e}"


@case
def sizes_and_dtypes():
    for dtype in ROUNDING:
        for rows, cols in ((1, 1), (1, 50), (7, 5), (64, 64), (100, 17), (129, 65)):
            x = gaussian(rows, cols, dtype=dtype)
            got = product(x, x)
            assert got.dtype == dtype
            assert got.is_contiguous()
            expect(got, x, x)


@case
def transposed_factors():
    for dtype in ROUNDING:
        for shape in ((100, 33), (65, 7), (2, 129, 64)):
            x = gaussian(*shape, dtype=dtype).mT
            assert not x.is_contiguous()
            expect(product(x, x), x, x)


@wide_case
def factors_and_coefficients():
    for dtype in ROUNDING:
        for alpha, beta in ((1.0, 1.0), (1, -2), (-4.775, 2.0315), (0.5, 0.0), (0.0, 3.4445)):
            for shape in ((7, 7), (2, 100, 100)):
                a, b, c = (gaussian(*shape, seed=seed, dtype=dtype) for seed in range(3))
                expect(product(a, b, c, alpha=alpha, beta=beta), a, b, c, alpha, beta)
                expect(product(a, b, alpha=alpha, beta=beta), a, b, None, alpha)


@wide_case
def every_tile_of_the_walk():
    x = gaussian(145, 20)
    for band in (1, 2, 3, 4, 8, 16):
        expect(product(x, x, tiles=tiles(16, band)), x, x)
    for rows in range(16, 129, 16):  # no masks, bands full and not
        x = gaussian(rows, 16)
        expect(product(x, x, tiles=tiles(16, 3)), x, x)


@case
def stacks():
    for dtype in ROUNDING:
        a, b, c = (gaussian(3, 70, 70, seed=seed, dtype=dtype) for seed in range(3))
        got = product(a, b, c, alpha=0.7, beta=-1.3)
        expect(got, a, b, c, 0.7, -1.3)
        for index in range(3):
            assert torch.equal(got[index], product(a[index], b[index], c[index], alpha=0.7, beta=-1.3))


def strided(draw, shape, dtype):
    """Random numbers of a shape, in one of the ways in which a tensor can lie."""
    x = gaussian(*(2 * n + 3 for n in shape), seed=draw.randrange(2**31), dtype=dtype)
    if len(shape) == 3 and draw.random() < 0.2:
        return x[0, : shape[1], : shape[2]].expand(shape)  # one matrix for all
    steps = [draw.choice((1, 2)) for _ in shape]
    x = x[tuple(slice(draw.randrange(3), None, step) for step in steps)]
    x = x[tuple(slice(n) for n in shape)]
    ways = (lambda x: x, torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT)
    return draw.choice(ways)(x)


@wide_case
def random_shapes_strides_dtypes_and_stacks():
    for seed in range(RANDOM):
        draw = random.Random(seed)
        stack, rows, cols = draw.choice([(), (), (1,), (3,)]), draw.randrange(1, 90), draw.randrange(0, 90)
        dtype, result = draw.choice([*ROUNDING]), draw.choice([*ROUNDING])
        a, b = (strided(draw, (*stack, rows, cols), dtype) for _ in range(2))
        c = strided(draw, (*stack, rows, rows), draw.choice([*ROUNDING])) if draw.random() < 0.7 else None
        alpha, beta = draw.choice([1.0, -1.5, 0.0]), draw.choice([1.0, 2.0315, 0.0])
        out = strided(draw, (*stack, rows, rows), result)
        out = torch.empty_like(out) if 0 in out.stride() else out.fill_(torch.nan)
        try:
            product(
                a, b, c, alpha=alpha, beta=beta, out=out, tiles=tiles(draw.choice([16, 32, 64]), draw.choice([1, 3, 8]))
            )
            expect(out, a, b, c, alpha, beta)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@case
def fp32_results_of_half_precision():
    x = gaussian(33, 200, dtype=torch.bfloat16)
    out = torch.empty((33, 33), dtype=torch.float32, device=DEVICE)
    expect(product(x, x, out=out), x, x)


@case
def tf32():
    x = gaussian(100, 70)
    expect(product(x, x, input_precision="tf32"), x, x, sums=2.0**-9)


@case
def a_factor_of_zero_does_not_read_c():
    x, c = gaussian(7, 5), torch.full((7, 7), torch.nan, device=DEVICE)
    expect(product(x, x, c, beta=0.0), x, x)


@case
def empty():
    for shape in ((0, 5), (0, 4, 5), (3, 0, 5)):
        x = gaussian(*shape)
        assert product(x, x).shape == (*shape[:-1], shape[-2])
    x = gaussian(4, 0)
    assert torch.equal(product(x, x), torch.zeros(4, 4, device=DEVICE))


@case
def half_the_tiles():
    from megatron_eopt.kernels import triton_kernel, triton_launch

    grids, kernel, launch = [], triton_kernel._kernel, triton_kernel._launch
    recorder = type("Recorder", (), {"__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})()
    recorder.arg_names = kernel.arg_names
    triton_kernel._launch = triton_launch.Launcher(recorder, triton_kernel._call)
    try:
        for rows, side, stack in ((16, 1, ()), (17, 2, ()), (129, 9, ()), (64, 4, (3,))):
            x = gaussian(*stack, rows, 8)
            expect(product(x, x, tiles=tiles(16, 4)), x, x)
            assert grids.pop() == ((stack or (1,))[0] * side * (side + 1) // 2,)
    finally:
        triton_kernel._launch = launch


def normalized(x, dtype, **more):
    from megatron_eopt.kernels.triton_kernel import Triton

    return Triton().normalized(x, dtype, **more)


def lengths(x):
    return torch.linalg.vector_norm(x.double(), dim=(-2, -1), keepdim=True)


# the interpreter of Triton 3.9 misreads numbers below 1e-38 in bf16
SIZES = {torch.bfloat16: (1.0, 1e-30, 1e30, 3e37), torch.float32: (1.0, 1e-38, 1e30, 3e37), torch.float16: (1.0,)}


@case
def matrices_over_their_norms(shapes=((2, 24, 40),)):
    """Alone, in stacks, transposed, with gaps, and of sizes whose squares fp32 does not have."""
    for shape in shapes:
        for given, sizes in SIZES.items():
            for size, dtype in itertools.product(sizes, (torch.float16, torch.bfloat16)):
                x = (gaussian(*shape).double() * size).to(given)
                for lies in (x, x.mT.contiguous().mT, torch.cat([x, x], -1)[..., : x.size(-1)]):
                    got = normalized(lies, dtype, unit=128.0)
                    assert (got.dtype, got.is_contiguous()) == (dtype, True)
                    expected = x.double() / lengths(x) * 128
                    off = (got.double() - expected).abs() - 1.01 * ROUNDING[dtype] * expected.abs()
                    assert off.max() <= 2.0**-25, (shape, given, size, dtype)


@wide_case
def matrices_of_more_than_a_block_over_their_norms():
    matrices_over_their_norms(((1, 1), (5, 7), (2, 130, 260)))


@case
def norms_of_what_is_zero_or_not_finite():
    for bad in (torch.inf, -torch.inf, torch.nan):
        for dtype in (torch.bfloat16, torch.float32):
            x = gaussian(4, 20, 500, dtype=dtype)
            expected = normalized(x[:1], torch.float16)[0]
            x[1, 2, 3], x[2] = bad, 0.0
            for propagate_nan in (True, False):
                got = normalized(x, torch.float16, propagate_nan=propagate_nan)
                assert got[1].isnan().all() if propagate_nan else (got[1] == 0).all()
                assert torch.equal(got[0], expected)
                assert (got[2] == 0).all()


@case
def norms_of_nothing():
    for shape in ((0, 5), (5, 0), (0, 4, 5), (2, 0, 4)):
        got = normalized(gaussian(*shape), torch.float16)
        assert (got.shape, got.dtype) == (shape, torch.float16)


@case
def factors_are_those_of_torch():
    """The whole iteration in 16 bits, of either form, with quotients by kernels."""
    from megatron_eopt.kernels.triton_kernel import Triton
    from megatron_eopt.orthogonalize import newton_schulz

    for shape in ((40, 24), (3, 20, 70)):
        x = gaussian(*shape)
        settings = {"fp32_matmul_prec": "medium", "form": "standard"}
        expected = newton_schulz(x, **settings)
        got = newton_schulz(x, **settings, products=Triton())
        assert lengths(got - expected).max() <= 3e-2 * lengths(expected).min()


def run(code, interpret, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run([sys.executable, *code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@functools.cache
def outcomes(*which):
    return run(["-m", "tests.kernels.test_triton_kernel", *which], interpret=DEVICE == "cpu")


@pytest.mark.parametrize("name", CASES)
def test_kernel(name):
    assert (found := outcomes()[name]) is None, found


@pytest.mark.wide
@pytest.mark.parametrize("name", WIDE)
def test_kernel_in_more_cases(name):
    assert (found := outcomes("wide")[name]) is None, found


def test_is_imported_with_the_kernel_alone():
    code = "import sys, json, megatron_eopt.kernels.choice; print(json.dumps('triton' in sys.modules))"
    assert run(["-c", code], interpret=False) is False


if __name__ == "__main__":
    outcomes = {}
    for name, check in (WIDE if sys.argv[1:] == ["wide"] else CASES).items():
        try:
            check()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
