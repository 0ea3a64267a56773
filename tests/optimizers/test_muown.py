"""Muown on one rank, against its formulas written out."""

import copy

import pytest
import torch

from megatron_eopt.matrices import concatenated
from megatron_eopt.optimizers.muown import Muown
from tests.optimizers.field import SHAPES, TOLERANCE, assert_close, drawn, factor, gradient, matrix, run
from tests.optimizers.several import parameters


def reference(
    p, gradients, lr, momentum=0.95, nesterov=True, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8, scale=None
):
    """Weight normalization by rows, Muon of directions and Adam of norms (arXiv 2605.10797), in fp64."""
    W = p.detach().double().clone()
    scale = max(W.shape) ** 0.5 if scale is None else scale
    g = W.norm(dim=1, keepdim=True).clamp(min=1e-12)
    v, m, first, second = W.clone(), 0.0, 0.0, 0.0
    for t, G in enumerate(gradients, 1):
        direction = v / v.norm(dim=1, keepdim=True) if t > 1 else W / g
        length = v.norm(dim=1, keepdim=True).clamp(min=1e-12)
        grad_g = (G.double() * direction).sum(1, keepdim=True)
        grad_v = g / length * (G.double() - grad_g * direction)
        m = momentum * m + (1 - momentum) * grad_v
        u = (1 - momentum) * grad_v + momentum * m if nesterov else m
        v = v - lr * scale * factor(u)
        first, second = beta1 * first + (1 - beta1) * grad_g, beta2 * second + (1 - beta2) * grad_g**2
        g = g - lr * first / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + eps)
        g = g * (1 - lr * weight_decay)
        W = g * v / v.norm(dim=1, keepdim=True)
    return W, g


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "weight_decay": 0.3, "momentum": 0.8},
        {"beta1": 0.0, "beta2": 0.5, "eps": 0.1, "weight_decay": 0.3},
    ],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formulas(dtype, shape, settings):
    p = matrix(*shape, dtype=dtype)
    expected, norms = reference(p, [gradient(p, seed) for seed in range(20)], 0.01, **settings)
    optimizer = Muown([p], lr=0.01, fp32_matmul_prec="highest", **settings)
    run(optimizer, p, range(20))
    assert_close(p.detach(), expected, 5 * TOLERANCE[dtype])
    assert_close(optimizer.state[p]["g"], norms[:, 0], 5 * TOLERANCE[dtype])
    assert optimizer.state[p]["steps"] == 20
    assert optimizer.predicted_rms(*shape) is None


def test_rows_have_the_norm_that_is_kept_and_turn():
    p = matrix(12, 7)
    before = p.detach().clone()
    optimizer = Muown([p], lr=0.05)
    run(optimizer, p, range(5))
    torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["g"], rtol=1e-5, atol=0)
    # Adam's first steps are lr long, and later ones hardly longer
    moved = (p.detach().norm(dim=1) - before.norm(dim=1)).abs()
    assert moved.max() <= 5 * 0.05 * 1.1
    assert torch.nn.functional.cosine_similarity(p.detach(), before).max() < 0.999


def test_a_row_of_zeros_begins_to_move():
    p = matrix(6, 4, dtype=torch.float64)
    p.data[2] = 0
    expected, _ = reference(p, [gradient(p, seed) for seed in range(5)], 0.05)
    run(Muown([p], lr=0.05, fp32_matmul_prec="highest"), p, range(5))
    assert p[2].abs().min() > 0.001
    assert_close(p.detach(), expected, 1e-9)


def test_a_row_that_is_scaled_to_zero_stays_finite():
    p = matrix(6, 4)
    optimizer = Muown([p], lr=0.05)
    run(optimizer, p, range(2))
    optimizer.scale_rows([p], [torch.tensor([0.0, 1, 1, 1, 1, 1])])
    run(optimizer, p, range(2, 5))
    assert p.isfinite().all()


def test_norms_are_measured_when_the_first_step_is_made():
    """Not before: torch makes state by a step with a rate of zero, and weights may be loaded after it."""
    p, other = matrix(6, 4), matrix(6, 4, seed=9)
    optimizer = Muown([p], lr=0.0)
    run(optimizer, p, [])
    p.grad = torch.zeros(6, 4)
    optimizer.step()
    assert torch.equal(p, matrix(6, 4))
    p.data.copy_(other)
    optimizer.param_groups[0]["lr"] = 0.05
    run(optimizer, p, range(3))
    run(Muown([other], lr=0.05), other, range(3))
    assert torch.equal(p, other)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_later_step_with_a_rate_of_zero_changes_momenta_alone(rate):
    p = matrix(6, 4)
    optimizer = Muown([p], lr=0.05)
    run(optimizer, p, range(3))
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    optimizer.param_groups[0]["lr"] = rate
    run(optimizer, p, [3])
    assert torch.equal(p, before)
    changed = {key for key, x in state.items() if not torch.equal(optimizer.state[p][key], x)}
    assert changed == {"momentum_buffer"}


def test_matrices_of_a_fused_parameter_step_as_parameters_of_their_own():
    parts = parameters([(16, 12), (8, 12)], torch.float64)
    whole = torch.nn.Parameter(torch.cat([p.detach() for p in parts]))
    whole.logical_matrices = concatenated(gate=16, up=8)
    together, apart = (Muown(each, lr=0.05, fp32_matmul_prec="highest") for each in ([whole], parts))
    for step in range(3):
        whole.grad = drawn((24, 12), step, torch.float64)
        for p, g in zip(parts, whole.grad.split([16, 8]), strict=True):
            p.grad = g
        together.step()
        apart.step()
    assert_close(whole.detach(), torch.cat([p.detach() for p in parts]), 1e-12)
    assert together.state[whole]["v_norm_1"].shape == (8,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta1": 1.0}, r"Muown: beta1 must lie in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, r"Muown: beta2 must lie in \[0, 1\), got -0.1"),
        ({"eps": 0.0}, "Muown: eps must be a finite number above 0, got 0.0"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Muown([matrix(6, 4)], **settings)


def test_decay_is_that_of_the_norms_and_no_other():
    with pytest.raises(ValueError, match=r"Muown has no (weight_decay_method|use_decoupled_weight_decay) .*, only"):
        Muown([{"params": [matrix(6, 4)], "weight_decay_method": "l2"}])
