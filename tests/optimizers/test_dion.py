"""Dion on one rank: its steps against the formulas, and what it refuses."""

import copy
from math import ceil

import pytest
import torch

from megatron_eopt.optimizers.dion import Dion
from megatron_eopt.optimizers.dion2 import Dion2
from tests.optimizers.dions import SHAPES, reference
from tests.optimizers.field import assert_close, drawn, factor, gradient, matrix
from tests.optimizers.field import run as run_alone
from tests.optimizers.several import gradients_of, parameters, run

# Rounding of B Q is multiplied by how nearly its columns depend on each other: in these twenty steps by up to 400.
TOLERANCE = {torch.float32: 4e-5, torch.float64: 1e-12}


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, (4, 3, 5)),
        ({"momentum": 0.0, "weight_decay": 0.0}, (4, 3, 5)),
        ({"momentum": 0.8, "weight_decay": 0.5, "rank_fraction": 0.5}, (8, 5, 9)),
        ({"rank_fraction": 0.01}, (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formulas(dtype, settings, ranks):
    params = parameters(SHAPES, dtype)
    before, optimizer = copy.deepcopy(params), Dion(params, lr=0.05, **settings)
    gradients = gradients_of(optimizer, params, range(20))
    formula = {key: value for key, value in settings.items() if key != "rank_fraction"}
    for p, first, seen, rank in zip(params, before, gradients, ranks, strict=True):
        W, M, Q = reference(first, seen, 0.05, rank=rank, **formula)
        state = optimizer.state[p]
        assert_close(p.detach(), W, TOLERANCE[dtype])
        assert state["Q"].shape == (p.shape[1], rank)
        if dtype == torch.float64:
            signs = (state["Q"] * Q).sum(0).sign()  # of which QR leaves the choice
            assert_close(state["momentum_buffer"], M, 1e-11)
            assert_close(state["Q"] * signs, Q, 1e-11)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_directions_that_a_gradient_lacks_are_found_later(dtype):
    """Where B Q has dependent columns, the formulas divide rounding by its norm, and ranks would round otherwise."""
    p = matrix(12, 8, dtype=dtype)
    before = p.detach().clone()
    optimizer = Dion([p], lr=1.0, weight_decay=0.0, rank_fraction=0.5)
    thin = drawn((12, 2), 1, dtype) @ drawn((2, 8), 2, dtype)
    p.grad = thin
    optimizer.step()
    values = torch.linalg.svdvals((before - p.detach()).double())
    assert values[1] > 0.1
    assert values[2] < 1e-5
    kept = optimizer.state[p]["Q"].clone()
    assert kept[:, 2:].norm(dim=0).min() > 0.1
    p.grad = thin + 0.1 * drawn((12, 8), 3, dtype)
    moved = p.detach().clone()
    optimizer.step()
    assert torch.linalg.svdvals((moved - p.detach()).double())[3] > 0.1


def test_the_predicted_size_is_that_of_the_first_update():
    params = parameters(SHAPES)
    before, optimizer = copy.deepcopy(params), Dion(params, lr=1.0, weight_decay=0.0)
    run(optimizer, params, [0])
    for p, old in zip(params, before, strict=True):
        [described] = optimizer.described_matrices()[p]
        assert (p - old).square().mean().sqrt().item() == pytest.approx(described.rms, rel=1e-4)
        assert (described.scheme, described.scale) == ("local", (p.shape[0] / p.shape[1]) ** 0.5)


def reference_of_rows(p, gradients, lr, fraction, momentum=0.95, decay=0.01):
    """Dion2 (arXiv 2512.16928) with the size ``sqrt(rows / cols)``, in fp64."""
    w = p.detach().double().clone()
    m = torch.zeros_like(w)
    short = 0 if w.shape[0] <= w.shape[1] else 1
    for g in gradients:
        m = m + g.double()
        selected = m.abs().sum(1 - short).topk(ceil(fraction * m.shape[short])).indices
        part = m.index_select(short, selected)
        w = (1 - lr * decay) * w
        w.index_add_(short, selected, factor(part), alpha=-lr * (w.shape[0] / w.shape[1]) ** 0.5)
        m.index_copy_(short, selected, momentum * part)
    return w, m


@pytest.mark.parametrize("fraction", [0.25, 0.6, 1.0])
@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (8, 8)], ids=str)
def test_twenty_steps_of_dion2_are_its_formula(shape, fraction):
    p = matrix(*shape, dtype=torch.float64)
    expected, momentum = reference_of_rows(p, [gradient(p, step) for step in range(20)], 0.01, fraction)
    opt = Dion2([p], lr=0.01, fraction=fraction)
    run_alone(opt, p, range(20))
    assert_close(p.detach(), expected, 1e-11)
    assert_close(opt.state[p]["momentum_sum"], momentum, 1e-11)
