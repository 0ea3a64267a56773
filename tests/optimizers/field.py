"""What the tests of Scion, PolarGrad and MuonHyperball share: matrices, gradients, and orthogonal factors in fp64."""

import torch

SHAPES = {"tall": (12, 7), "wide": (7, 12), "square": (8, 8)}

QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]

# The largest error of an entry of a parameter after 20 steps, relative to the largest entry. In fp64 it is rounding. In
# fp32 the five quintic steps multiply the rounding of a direction of the momentum as they do its singular value: by up
# to 493, the product of their first coefficients, where that is near zero. So one rounding puts a factor off by
# 493 * 2^-24 = 3e-5 there, two by 6e-5 (of the Gram form 5.1e-5 was measured, on a CPU without AVX-512). The steps of
# these tests are so small against the parameter that such a factor leaves at most 1.4e-6 of it, and few are such.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1.5e-6}


def matrix(rows=6, cols=4, seed=0, dtype=torch.float32, **attributes):
    p = torch.nn.Parameter(torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype))
    for name, value in attributes.items():
        setattr(p, name, value)
    return p


def gradient(p, seed):
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 + seed)).to(p.dtype)


def run(opt, p, seeds):
    for seed in seeds:
        p.grad = gradient(p, seed)
        opt.step()


def factor(x, schedule=QUINTIC):
    """What Newton-Schulz makes of ``x``, by its singular values; a zero matrix stays zero."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm().clamp(min=1e-300)
    for a, b, c in schedule:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


def drawn(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_close(actual, expected, tolerance=1e-5, what=""):
    """The same shape, and entries off by at most a part of the largest one."""
    assert actual.shape == expected.shape, what
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max()
        assert error <= tolerance * expected.abs().max(), (what, float(error / expected.abs().max()))


def assert_close_in_bf16(actual, before, expected, roundings):
    """What bf16 parameters can follow of a way in fp64.

    A rounding is off by half of the last of 8 bits: an entry ``2^k x``, x in [1, 2), by up to ``2^k 2^-8``. Evenly so,
    and with x spread evenly, that is ``2^-8 / sqrt(7)`` of the norm, and these errors are independent. Momenta and five
    products in bf16 turn a step, by 2^-6 where a matrix is not nearly singular.
    """
    way = (expected - before).norm()
    bound = roundings**0.5 * 2**-8 / 7**0.5 * max(before.norm(), expected.norm()) + 2**-6 * way
    error = (actual.double() - expected).norm()
    assert error <= bound, (float(error), float(bound))
    assert way > 10 * bound, (float(way), float(bound))
