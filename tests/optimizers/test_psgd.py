"""PSGD-Kron takes the steps of its formulas, with random numbers that depend on no layout."""

import inspect
import math

import emerging_optimizers.psgd.psgd as oracle
import pytest
import torch

from megatron_eopt import PSGDKron
from megatron_eopt.factors.psgd_math import normals
from tests.optimizers.field import assert_close, gradient, matrix, run
from tests.optimizers.psgd_reference import steps_of

SHAPES = {"tall": (12, 7), "wide": (7, 12), "square": (8, 8), "one row": (1, 5)}
DEFAULTS = {key: x.default for key, x in inspect.signature(PSGDKron).parameters.items() if key != "params"}
VARIANTS = {
    "as published": {},
    "often enough": {"precondition_frequency": 3, "precond_decay_steps": 2, "min_precond_lr": 0.06},
    "diagonal of the long side": {"max_dim": 8, "momentum": 0.0},
    "diagonals": {"max_dim": 0, "max_update_rms": 0.5},
    "noise": {"damping_noise_scale": 0.5, "precond_init_scale": 3.0, "max_update_rms": 0.0, "beta_lip": 0.2},
}


def drawn(rows, cols, dtype=torch.float64):
    """The random numbers of a matrix, by step: its noise, and two lots of 32 rows for each side."""
    shapes = [(rows, cols), *[(32, rows)] * 2, *[(32, cols)] * 2]

    def draw(step):
        parts = normals(step, sum(map(math.prod, shapes)), torch.ones((), dtype=dtype)).split(
            list(map(math.prod, shapes))
        )
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return draw


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_twenty_steps_follow_the_formula(shape, variant, dtype, tolerance):
    settings = {"lr": 0.05, "weight_decay": 0.1, **VARIANTS[variant]}
    p = matrix(*SHAPES[shape], dtype=dtype)
    before, gradients = p.detach().double().clone(), [gradient(p, seed).double() for seed in range(20)]
    optimizer = PSGDKron([p], **settings)
    run(optimizer, p, range(20))
    expected, (momentum, factors, bounds) = steps_of(before, gradients, drawn(*p.shape), DEFAULTS | settings)
    assert_close(p.detach(), expected, tolerance)
    state = optimizer.state[p]
    assert_close(state["exp_avg"], momentum, tolerance)
    for key, factor in zip(("Q_L", "Q_R"), factors, strict=True):
        assert_close(state[key], factor, 10 * tolerance, key)
    assert_close(state["bounds"], torch.tensor(bounds), 10 * tolerance)


@pytest.mark.parametrize("shape", ["tall", "wide", "square"])
@pytest.mark.parametrize("noise", [0.1, 1e-9])
def test_equals_emerging_optimizers(monkeypatch, shape, noise):
    """Their PSGDPro, which draws what ours hashes; it does not count its steps, so the rate of the factors stays."""
    p, q = (matrix(*SHAPES[shape]) for _ in range(2))
    same = {"lr": 0.05, "weight_decay": 0.1, "damping_noise_scale": noise, "max_update_rms": 0.7}
    ours, theirs = PSGDKron([p], precond_decay_steps=10**9, **same), oracle.PSGDPro([q], **same)
    gradients, waiting = [gradient(p, seed) for seed in range(12)], []

    def next_one(*shape, **how):
        assert waiting[0].shape == shape
        return waiting.pop(0)

    monkeypatch.setattr(torch, "randn_like", lambda x: next_one(*x.shape))
    monkeypatch.setattr(torch, "randn", next_one)
    with torch.compiler.set_stance("force_eager"):
        for step, g in enumerate(gradients, 1):
            waiting += drawn(*p.shape, torch.float32)(step)
            p.grad, q.grad = g, g.clone()
            ours.step()
            theirs.step()
    assert_close(p.detach(), q.detach(), 1e-5)
    for key, factor in zip(("Q_L", "Q_R"), theirs.state[q]["Q"], strict=True):
        assert_close(ours.state[p][key], factor, 1e-4, key)


def test_random_numbers_are_normal_and_other_in_each_step():
    several = torch.stack(
        [normals(step, 10_000, torch.ones((), dtype=torch.float64)) for step in (1, 2, 3, 100, 2**20)]
    )
    assert (several.mean(1).abs() < 0.04).all()
    assert ((several.std(1) - 1).abs() < 0.04).all()
    assert ((several**4).mean(1) - 3).abs().max() < 0.3
    assert (torch.corrcoef(several) - torch.eye(5)).abs().max() < 0.04
    for shift in (1, 2, 32, 100, 128):
        assert (several * several.roll(shift, 1)).mean(1).abs().max() < 0.04
