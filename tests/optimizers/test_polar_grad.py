"""PolarGrad on one rank, against its formulas written out."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import PolarGrad as Theirs

from megatron_eopt.optimizers.polar_grad import PolarGrad
from tests.optimizers.field import SHAPES, TOLERANCE, assert_close, assert_close_in_bf16, factor, gradient, matrix, run

EXACT = {"coefficient_type": "polar_express", "num_ns_steps": 8, "fp32_matmul_prec": "highest"}


def reference(p, gradients, lr, momentum=0.95, nesterov=False, weight_decay=0.01, polar=factor):
    """PolarGrad with the momentum first (arXiv 2505.21799), in fp64."""
    w, m = p.detach().double().clone(), 0.0
    for g in gradients:
        g = g.double()
        m = momentum * m + (1 - momentum) * g
        x = momentum * m + (1 - momentum) * g if nesterov else m
        u = polar(x)
        w = w - lr * weight_decay * w - lr * (x * u).sum() * u
    return w


def polar_factor(x):
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formula(dtype, shape, nesterov):
    p = matrix(*shape, dtype=dtype)
    settings = {"lr": 0.01, "momentum": 0.8, "nesterov": nesterov, "weight_decay": 0.3}
    expected = reference(p, [gradient(p, seed) for seed in range(20)], **settings)
    opt = PolarGrad([p], fp32_matmul_prec="highest", **settings)
    run(opt, p, range(20))
    assert_close(p.detach(), expected, TOLERANCE[dtype])
    assert list(opt.state[p]) == ["momentum_buffer"]


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_with_an_accurate_iteration_it_is_the_polar_decomposition(shape):
    # eight steps of Polar Express leave singular values above 1e-3 of the norm within 1e-5 of 1
    p = matrix(*shape, dtype=torch.float64)
    expected = reference(p, [gradient(p, seed) for seed in range(20)], 0.01, polar=polar_factor)
    run(PolarGrad([p], 0.01, **EXACT), p, range(20))
    assert_close(p.detach(), expected, 1e-5)


def test_an_update_is_as_large_as_the_nuclear_norm():
    p = matrix(12, 7)
    before = p.detach().clone()
    run(PolarGrad([p], lr=1.0, momentum=0.0, weight_decay=0, **EXACT), p, [1])
    nuclear = torch.linalg.svdvals(gradient(p, 1)).sum()
    torch.testing.assert_close(torch.linalg.svdvals(before - p.detach()), nuclear.expand(7), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_parameters_follow_it_as_far_as_they_can(shape):
    # without decay, which bf16 loses where it is less than a rounding
    p = matrix(*shape, dtype=torch.bfloat16)
    before, settings = p.detach().double(), {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.0}
    expected = reference(p, [gradient(p, seed) for seed in range(20)], **settings)
    run(PolarGrad([p], **settings), p, range(20))
    assert_close_in_bf16(p.detach(), before, expected, roundings=20)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (8, 8)])
def test_steps_are_those_of_emerging_optimizers(shape, nesterov):
    p, q = matrix(*shape), matrix(*shape)
    same = {"nesterov": nesterov, "weight_decay": 0.1, "momentum": 0.9, "fp32_matmul_prec": "highest"}
    run(PolarGrad([p], 0.02, **same), p, range(20))
    run(Theirs([q], 0.02, **same), q, range(20))
    assert_close(p.detach(), q.detach().double(), 1e-5)


def test_steps_are_as_large_as_gradients():
    p, q = matrix(dtype=torch.float64), matrix(dtype=torch.float64)
    one, other = PolarGrad([p], lr=0.1, weight_decay=0), PolarGrad([q], lr=0.1 / 64, weight_decay=0)
    for seed in range(3):
        p.grad, q.grad = gradient(p, seed), 64 * gradient(q, seed)
        one.step()
        other.step()
    assert_close(p.detach(), q.detach(), 1e-12)
    assert one.predicted_rms(6, 4) is None
