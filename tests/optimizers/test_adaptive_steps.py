"""The steps of AdaMuon, NorMuon and NAMO on one rank, against their formulas written out and emerging-optimizers."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import AdaptiveMuon

from megatron_eopt import TensorParallelAdaptiveMuon
from tests.optimizers.field import SHAPES, TOLERANCE, assert_close, assert_close_in_bf16, factor, gradient, matrix, run

METHODS = ("adamuon", "normuon", "namo")
VARIANTS = [("adamuon", True), ("adamuon", False), ("normuon", True), ("namo", True)]


def reference(p, gradients, method, align, lr=0.1, b=0.95, nesterov=True, wd=0.01, b2=0.95, eps=1e-8, l2=False):
    """The three algorithms (arXiv 2507.11005, 2510.05491, 2602.17080) for one matrix, in fp64."""
    w, m, v = p.detach().double().clone(), 0.0, 0.0
    short = 1 if w.size(0) >= w.size(1) else 0
    for g in gradients:
        g = g.double() + (wd * w if l2 else 0)
        w = w if l2 else w * (1 - lr * wd)
        m = b * m + (1 - b) * g
        u = (1 - b) * g + b * m if nesterov else m
        o = factor(u)
        if method == "adamuon":
            v = b2 * v + (1 - b2) * o**2
            update = o / (v.sqrt() + eps)
        elif method == "normuon":
            v = b2 * v + (1 - b2) * (o**2).mean(short, keepdim=True)
            update = o / v.clamp(min=eps).sqrt()
        else:
            v = b2 * v + (1 - b2) * (g**2).sum()
            update = o * u.norm() / (v.sqrt() + eps)
        if method == "normuon" or (method == "adamuon" and align):
            update = update * o.norm() / update.norm()
        w = w - lr * max(w.shape) ** 0.5 * update
    return w, v


def optimizer(params, method, **settings):
    return TensorParallelAdaptiveMuon(params, moment2_method=method, **{"fp32_matmul_prec": "highest", **settings})


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("method", "align"), VARIANTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formula(dtype, method, align, shape, nesterov):
    # statistics are fp32 whatever the parameter; an eps as large as entries of the factors keeps small ones small
    tolerance = max(TOLERANCE[dtype], 1e-6)
    p = matrix(*shape, dtype=dtype)
    settings = {"lr": 0.01, "b": 0.8, "nesterov": nesterov, "wd": 0.3, "b2": 0.9, "eps": 0.1}
    expected, v = reference(p, [gradient(p, seed) for seed in range(20)], method, align, **settings)
    same = {"lr": 0.01, "momentum": 0.8, "nesterov": nesterov, "weight_decay": 0.3, "beta2": 0.9, "eps": 0.1}
    opt = optimizer([p], method, align_rms=align, **same)
    run(opt, p, range(20))
    assert_close(p.detach(), expected, tolerance)
    assert list(opt.state[p]) == ["momentum_buffer", "moment2_buffer"]
    moment = opt.state[p]["moment2_buffer"]
    assert moment.dtype == torch.float32
    assert moment.shape == {"adamuon": shape, "normuon": (max(shape),), "namo": ()}[method]
    torch.testing.assert_close(moment.double(), v.reshape(moment.shape), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_a_small_eps_stands_where_the_formula_has_it(method, align, shape, eps):
    p = matrix(*shape, dtype=torch.float64)
    expected, _ = reference(p, [gradient(p, seed) for seed in range(20)], method, align, lr=0.01, eps=eps)
    run(optimizer([p], method, align_rms=align, lr=0.01, eps=eps), p, range(20))
    assert_close(p.detach(), expected, 1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_bf16_parameters_follow_it_as_far_as_they_can(method, align, shape):
    # without decay, which bf16 loses where it is less than a rounding
    p = matrix(*shape, dtype=torch.bfloat16)
    before = p.detach().double()
    settings = {"lr": 0.05, "eps": 0.1}
    gradients = [gradient(p, seed) for seed in range(20)]
    expected, _ = reference(p, gradients, method, align, b=0.8, wd=0.0, b2=0.9, **settings)
    opt = TensorParallelAdaptiveMuon(
        [p], momentum=0.8, weight_decay=0.0, beta2=0.9, moment2_method=method, align_rms=align, **settings
    )
    run(opt, p, range(20))
    assert_close_in_bf16(p.detach(), before, expected, roundings=20)


@pytest.mark.parametrize("method", ["adamuon", "normuon"])
def test_l2_decay_enters_what_is_orthogonalized(method):
    p = matrix(12, 7, dtype=torch.float64)
    expected, _ = reference(p, [gradient(p, seed) for seed in range(20)], method, True, lr=0.01, wd=0.5, l2=True)
    run(optimizer([p], method, lr=0.01, weight_decay=0.5, use_decoupled_weight_decay=False), p, range(20))
    assert_close(p.detach(), expected, 1e-6)


# The three methods of emerging-optimizers 0.3.0 follow the same rules; its adamuon is not aligned. It keeps statistics
# in the dtype of the parameter, and of a fused parameter as a whole. The shapes are nearly square, so that both take
# the standard form of Newton-Schulz: adamuon makes the rounding of small entries as large as that of others.
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (8, 8)])
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_emerging_optimizers(method, shape, nesterov, eps):
    p, q = matrix(*shape), matrix(*shape)
    same = {"nesterov": nesterov, "beta2": 0.95, "eps": eps, "fp32_matmul_prec": "highest", "moment2_method": method}
    ours = TensorParallelAdaptiveMuon([p], 0.1, align_rms=False, **same)
    theirs = AdaptiveMuon([q], 0.1, 0.95, 0.01, **same)
    run(ours, p, range(20))
    run(theirs, q, range(20))
    assert_close(p.detach(), q.detach().double(), 1e-5)
    moment, wanted = ours.state[p]["moment2_buffer"], theirs.state[q]["moment2_buffer"]
    torch.testing.assert_close(moment, wanted.view(moment.shape), rtol=1e-4, atol=1e-7)
