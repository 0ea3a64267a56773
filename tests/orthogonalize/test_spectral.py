from itertools import pairwise

import pytest
import torch

from megatron_eopt.orthogonalize.spectral import low_rank_factors, power_iteration, rayleigh_quotient, start_vector


def with_singular_values(values, rows=12, cols=7):
    generator = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(rows, cols, generator=generator))
    V, _ = torch.linalg.qr(torch.randn(cols, cols, generator=generator))
    return U @ torch.diag(torch.tensor(values)) @ V.mT


SPECTRUM = [4.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.0]


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e15])
def test_the_quotient_is_the_largest_singular_value(scale):
    W = with_singular_values(SPECTRUM) * scale
    u, v = power_iteration(W, start_vector(12), 20)
    torch.testing.assert_close(rayleigh_quotient(W, u, v), torch.tensor(4.0 * scale), rtol=1e-6, atol=0)
    torch.testing.assert_close(u.norm(), torch.tensor(1.0))
    torch.testing.assert_close(v.norm(), torch.tensor(1.0))


def test_the_quotient_converges_from_below_with_the_square():
    W = with_singular_values(SPECTRUM).double()
    exact = torch.linalg.svdvals(W)[0].item()
    found = [
        rayleigh_quotient(W, *power_iteration(W, start_vector(12).double(), steps)).item() for steps in range(1, 7)
    ]
    errors = [exact - value for value in found]
    assert all(0 < later < earlier for earlier, later in pairwise(errors))
    # each step shrinks the part along the second vector to (2 / 4)^2, and the error is as its square
    assert errors[5] / errors[4] == pytest.approx(1 / 16, rel=1e-2)


def test_a_stack_and_bf16():
    stack = torch.stack([with_singular_values(SPECTRUM), with_singular_values(SPECTRUM[::-1])])
    starts = start_vector(12).expand(2, 12)
    u, v = power_iteration(stack, starts, 3)
    for place in range(2):
        one = power_iteration(stack[place], start_vector(12), 3)
        torch.testing.assert_close((u[place], v[place]), one)
        torch.testing.assert_close(rayleigh_quotient(stack, u, v)[place], rayleigh_quotient(stack[place], *one))
    half = stack.bfloat16()
    u, v = power_iteration(half, starts, 3)
    assert u.dtype == v.dtype == rayleigh_quotient(half, u, v).dtype == torch.float32
    torch.testing.assert_close(u, power_iteration(half.float(), starts, 3)[0], rtol=0, atol=0)


def test_zero_gives_zero_and_keeps_the_start():
    u, v = power_iteration(torch.zeros(12, 7), start_vector(12), 2)
    assert torch.equal(u, start_vector(12))
    assert rayleigh_quotient(torch.zeros(12, 7), u, v) == 0


def test_start_vectors_repeat_and_leave_torchs_generators_alone():
    before = torch.random.get_rng_state()
    x = start_vector(9)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(x.norm(), torch.tensor(1.0))
    assert torch.equal(x, start_vector(9))
    assert not torch.equal(x, start_vector(9, seed=1))


def test_factors_of_low_rank_are_the_closest():
    W = with_singular_values(SPECTRUM)
    A, B, S = low_rank_factors(W, 3)
    torch.testing.assert_close(S.float(), torch.tensor(SPECTRUM), rtol=1e-5, atol=1e-6)
    assert (A.shape, B.shape) == ((12, 3), (7, 3))
    error = (W - A @ B.mT).norm()
    torch.testing.assert_close(error, torch.tensor(SPECTRUM[3:]).norm(), rtol=1e-5, atol=0)
    for factor in (A, B):  # both have the roots of the singular values
        torch.testing.assert_close(torch.linalg.svdvals(factor), torch.tensor(SPECTRUM[:3]).sqrt())
