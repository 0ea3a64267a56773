"""Shampoo and KL-Shampoo take the steps of their papers, by either way to an inverse root."""

import copy
import math

import pytest
import torch

from megatron_eopt import KLShampoo, Shampoo
from megatron_eopt.optimizers.inverse_roots import cubics, inverse_root
from tests.optimizers.several import gradients_of, parameters, set_gradients

SHAPES = [(6, 4), (4, 6), (5, 5)]
SETTINGS = {"lr": 0.05, "momentum": 0.9, "shampoo_beta": 0.8, "weight_decay": 0.1}
BOTH = pytest.mark.parametrize("cls", [Shampoo, KLShampoo])


def root(F, order, damping):
    """``(F + damping |F| I)^(-1/order)``, from the eigenvectors."""
    values, vectors = torch.linalg.eigh(F + damping * F.abs().sum(1).max() * torch.eye(len(F), dtype=F.dtype))
    return vectors @ values.pow(-1 / order).diag() @ vectors.T


def reference_steps(p, gradients, kl, lr, momentum, shampoo_beta, weight_decay, every=1, damping=1e-6, **settings):
    """Shampoo (arXiv 1802.09568, averaged) or KL-Shampoo (2509.03378) of one matrix in fp64."""
    p = p.detach().double()
    (m, n), M, F, P = p.shape, torch.zeros_like(p), {}, {}
    dims = [dim for dim in (0, 1) if p.shape[dim] <= settings.get("max_dim", 10000)]
    scale = math.sqrt(max(m, n)) / ((math.sqrt(m) + math.sqrt(n)) if kl else 1)
    scale = settings.get("scale", scale)
    radius = p.norm()
    for t, g in enumerate((g.double() for g in gradients), 1):
        if t > 1 or not kl:
            M = momentum * M + (1 - momentum) * g
        size = g.square().mean().sqrt()
        inverse = {dim: P[dim] @ P[dim] for dim in P} or {dim: torch.eye(p.shape[dim]).double() / size for dim in dims}
        for dim in dims:
            h = g if dim == 0 else g.T
            middle = inverse[1 - dim] if len(dims) == 2 else torch.eye(h.shape[1]).double()
            new = h @ middle @ h.T / h.shape[1] if kl else h @ h.T
            total = sum(shampoo_beta**i for i in range(t))
            F[dim] = new if t == 1 else ((total - 1) * F[dim] + new) / total
        if (t - 1) % every == 0:
            P = {dim: root(F[dim], 2 if kl or len(dims) == 1 else 4, damping) for dim in dims}
        if t > 1 or not kl:
            left, right = (P.get(dim, torch.eye(p.shape[dim]).double()) for dim in (0, 1))
            update = scale * left @ M @ right
            if settings.get("weight_norm") == "hold":
                p = p * (1 - lr * weight_decay) - lr * radius * update / update.norm()
                p *= radius / p.norm()
            else:
                p = p * (1 - lr * weight_decay) - lr * update
    return p


VARIANTS = [
    ({}, {}),
    ({"root_method": "cans"}, {}),
    ({"precondition_frequency": 3}, {"every": 3}),
    ({"max_dim": 5}, {"max_dim": 5}),
    ({"scale_mode": "none", "root_method": "cans", "damping": 1e-3}, {"scale": 1.0, "damping": 1e-3}),
    ({"weight_norm": "hold"}, {"weight_norm": "hold"}),
]


@BOTH
@pytest.mark.parametrize(("settings", "of_reference"), VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-3)], ids=["fp64", "fp32"])
def test_twenty_steps_follow_the_formula(cls, settings, of_reference, dtype, tolerance):
    # of a side that few gradients span so far fp32 leaves little of what lies below the damping
    settings = {**SETTINGS, **({"damping": 1e-3} if dtype == torch.float32 else {}), **settings}
    of_reference = {"damping": settings.get("damping", 1e-6), **of_reference}
    params = parameters(SHAPES, dtype)
    before, optimizer = copy.deepcopy(params), cls(params, **settings)
    gradients = gradients_of(optimizer, params, range(20))
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected = reference_steps(first, seen, cls is KLShampoo, **{**SETTINGS, **of_reference})
        assert (expected - first.detach().double()).norm() > 0.1
        torch.testing.assert_close(p.detach().double(), expected, rtol=tolerance, atol=tolerance)


def test_a_shampoo_of_one_gradient_is_muon():
    (p,) = parameters([(6, 6)], torch.float64)
    before = p.detach().clone()
    optimizer = Shampoo([p], lr=1.0, momentum=0.0, weight_decay=0.0, damping=1e-12)
    set_gradients([p], 0)
    left, _, right = torch.linalg.svd(p.grad, full_matrices=False)
    optimizer.step()
    torch.testing.assert_close(before - p.detach(), 6**0.5 * left @ right, rtol=1e-5, atol=1e-5)


@BOTH
def test_larger_gradients_make_the_same_steps(cls):
    (p,), (q,) = parameters([(5, 5)], torch.float64), parameters([(5, 5)], torch.float64)
    a, b = cls([p], **SETTINGS), cls([q], **SETTINGS)
    for step in range(10):
        set_gradients([p, q], step)
        q.grad = p.grad * 1e-4
        a.step()
        b.step()
    torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@BOTH
def test_zero_gradients_and_infinite_squares_leave_all_finite(cls):
    (p,) = parameters([(6, 4)])
    optimizer = cls([p], shampoo_beta=0.0)
    for gradient in (0.0, 1.0, 0.0, 1e30, 1.0):
        set_gradients([p], 3)
        p.grad *= gradient
        optimizer.step()
    assert all(x.isfinite().all() for x in (p, *optimizer.state[p].values()))


def spectra(n):
    generator = torch.Generator().manual_seed(n)
    gaussian = torch.randn(2, n, 2 * n, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(gaussian[1, :, :n])[0]
    steep = basis * torch.arange(1, n + 1).double() ** -2 @ basis.T
    low = gaussian[1, :, : n // 6]
    return {"gaussian": gaussian[0] @ gaussian[0].T, "1/i": steep, "low rank": low @ low.T}


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("spectrum", ["gaussian", "1/i", "low rank"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e8])
def test_products_alone_make_the_root_of_the_eigenvectors(order, spectrum, scale):
    F = spectra(48)[spectrum][None] * scale
    exact = root(F[0], order, 1e-6)
    for method, dtype, tolerance in (("eigh", torch.float64, 1e-8), ("cans", torch.float64, 1e-8)):
        found = inverse_root(F.to(dtype), order, 1e-6, method)[0]
        assert (found - exact).norm() <= tolerance * exact.norm(), method
    for method in ("eigh", "cans"):  # rounding of fp32 is a tenth of the damping
        found = inverse_root(F.float(), order, 1e-6, method)[0].double()
        assert (found - exact).norm() <= 0.03 * exact.norm(), method
        assert (found @ F[0] - exact @ F[0]).norm() <= 0.01 * (exact @ F[0]).norm(), method


def test_cubics_are_the_best_of_their_degree():
    low, high = 1e-3, 1.0
    for a, b in cubics(1e-3):
        x = torch.linspace(low, high, 100_001, dtype=torch.float64)
        found = a * x + b * x**3
        below, above = found.min().item(), found.max().item()
        # as far below 1 at both ends as above it between them, which no other odd cubic can better
        assert 1 - below == pytest.approx(above - 1, rel=1e-3, abs=1e-8)
        assert found[0].item() == pytest.approx(below, abs=1e-9)
        assert found[-1].item() == pytest.approx(below, abs=1e-9)
        low, high = below, above
    assert high - low < 1e-8
    assert (len(cubics(1e-3)), len(cubics(1e-6**0.25))) == (11, 8)
