import pytest
import torch

from megatron_eopt.orthogonalize import get_coefficients, newton_schulz

STEPS = {"simple": 5, "quintic": 5, "polar_express": 8, "cans": 5, "aol": 5, "deepseekv4": 10, "cubic5": 5}


def exact(x, steps, coefficient_type):
    """U p(S) V^T by an SVD in fp64, p being the composite polynomial of the normalized singular values."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in get_coefficients(coefficient_type, steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vh


def relative(x, reference):
    return ((x.double() - reference).norm() / reference.norm()).item()


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("coefficient_type", "steps"), STEPS.items())
@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32), (3, 24, 40), (3, 40, 24), (1, 7), (7, 1)])
def test_equals_the_polynomial_of_the_singular_values(coefficient_type, steps, shape):
    x = gaussian(*shape)
    result = newton_schulz(x, steps, coefficient_type)
    assert result.shape == x.shape
    assert relative(result, exact(x, steps, coefficient_type)) < 2e-5


@pytest.mark.parametrize(
    ("dtype", "precision", "bound"),
    [
        (torch.float64, "highest", 1e-12),
        (torch.float32, "highest", 1e-5),
        (torch.float32, "high", 1e-5),  # TF32 is fp32 on a CPU
        (torch.float32, "medium", 3e-2),
        (torch.float32, "low", 3e-2),
        (torch.bfloat16, "highest", 1e-2),
        (torch.float16, "highest", 1e-3),
    ],
)
def test_precision_and_dtype(dtype, precision, bound):
    x = gaussian(64, 128, dtype=dtype)
    result = newton_schulz(x, fp32_matmul_prec=precision)
    assert result.dtype == dtype
    assert relative(result, exact(x, 5, "quintic")) < bound


def test_low_is_medium_and_medium_is_not_high():
    x = gaussian(64, 128)
    medium = newton_schulz(x, fp32_matmul_prec="medium")
    torch.testing.assert_close(newton_schulz(x, fp32_matmul_prec="low"), medium, rtol=0, atol=0)
    assert not torch.equal(newton_schulz(x, fp32_matmul_prec="high"), medium)


@pytest.mark.parametrize("norm", [1e-30, 1e-12, 1e6, 1e18])
@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_the_norm_of_the_input_does_not_matter(norm, precision):
    x = gaussian(32, 64)
    x = x / x.norm()
    expected = newton_schulz(x, fp32_matmul_prec=precision)
    scaled = newton_schulz(x * norm, fp32_matmul_prec=precision)
    bound = {"medium": 2e-2, "highest": 1e-5}[precision]  # rounding of x * norm moves the bf16 iterates by an ulp
    assert relative(scaled, expected.double()) < bound


@pytest.mark.parametrize("shape", [(4,), (1, 2, 4, 4)])
def test_what_is_no_matrix_is_refused(shape):
    with pytest.raises(ValueError, match=r"2-D or 3-D"):
        newton_schulz(torch.ones(shape))


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="unknown fp32_matmul_prec 'hihg': expected one of low, medium, high, highest"):
        newton_schulz(torch.ones(4, 4), fp32_matmul_prec="hihg")


def test_parameters_are_matrices_too():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(torch.nn.Parameter(x))
    assert not result.requires_grad
    assert torch.equal(result, newton_schulz(x))
