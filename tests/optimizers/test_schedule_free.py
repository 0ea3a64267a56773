"""Schedule-Free AdamW takes the steps of its formulas; what it keeps is in test_schedule_free_state.py."""

import copy

import pytest
import torch
from schedulefree import AdamWScheduleFree

from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from tests.optimizers.several import SHAPES, gradients_of, parameters, run, set_gradients

VARIANTS = ("kempnerforge", "schedulefree")
SETTINGS = {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup_steps": 5}


def reference_steps(p, gradients, variant, lr=0.025, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup_steps=0):
    """The algorithm for one tensor in fp64, from the definitions of its three points."""
    z = x = y = p.detach().double()
    v, total, largest = torch.zeros_like(z), 0.0, 0.0
    for t, g in enumerate((g.double() for g in gradients), 1):
        rate = lr * (min(1.0, t / warmup_steps) if warmup_steps else 1.0)
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = g / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        if variant == "kempnerforge":
            z = (z - rate * u) * (1 - rate * weight_decay)
            weight = rate * (1 - betas[0])
        else:
            z = z - rate * (u + weight_decay * y)
            largest = max(largest, rate)
            weight = largest**2
        total += weight
        x = x + (z - x) * weight / total if total else x
        y = (1 - betas[0]) * z + betas[0] * x
    return x, y, z, v


def follows(shapes, steps, dtype, variant, tolerance, **settings):
    params = parameters(shapes, dtype)
    before, optimizer = copy.deepcopy(params), ScheduleFreeAdamW(params, variant=variant, **settings)
    gradients = gradients_of(optimizer, params, range(steps))
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 0.0)  # of what is seen, once
    for p, first, seen in zip(params, before, gradients, strict=True):
        x, y, z, v = reference_steps(first, seen, variant, **settings)
        state = optimizer.state[p]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert p.dtype == dtype
        assert state["z"].dtype == state["exp_avg_sq"].dtype == wide
        for found, expected, rounded in [
            (p.detach(), y, rounding),
            (optimizer.average(p), x, rounding),
            (state["z"], z, 0.0),
            (state["exp_avg_sq"], v, 0.0),
        ]:
            torch.testing.assert_close(found.double(), expected, rtol=tolerance + rounded, atol=tolerance)
    return optimizer, params


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("settings", "steps", "dtype", "tolerance"),
    [
        *((settings, 20, torch.float32, 1e-6) for settings in (SETTINGS, {}, {"betas": (0.3, 0.9)})),
        ({"betas": (0.0, 0.0), "warmup_steps": 30}, 20, torch.float32, 1e-6),
        (SETTINGS, 20, torch.float64, 1e-12),
        # but for one rounding, also after many steps, in which a point kept in 16 bits stands still
        *((SETTINGS, 200, dtype, 2e-6) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_steps_follow_the_formula(variant, settings, steps, dtype, tolerance):
    follows(SHAPES, steps, dtype, variant, tolerance, **settings)


# The steps of its authors' package, schedulefree 1.4.1.


def assert_points(params, copies):
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


# Rates that a schedule sets, of which the largest so far weighs steps.
RATES = [0.0, 0.0, 0.01, 0.05, 0.02, 0.02, 0.1, 0.0, 0.03]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"weight_decay": 0.3}, [0.05] * 20),
        ({"betas": (0.7, 0.9), "warmup_steps": 30, "weight_decay": 0.3}, [0.05] * 20),
        ({"betas": (0.3, 0.95), "warmup_steps": 7, "weight_decay": 0.3}, [0.05] * 20),
        ({}, RATES),
        *(
            ({"warmup_steps": 7, "r": r, "weight_lr_power": power}, [0.05] * 20)
            for r, power in ((1.0, 2.0), (0.0, 0.0), (-0.5, 1.0), (2.0, 3.0))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_train_and_evaluate_at_the_same_points(dtype, settings, rates):
    params, copies = parameters(dtype=dtype), parameters(dtype=dtype)
    before = params[0].detach().clone()
    ours = ScheduleFreeAdamW(params, variant="schedulefree", eps=1e-6, **settings)
    theirs = AdamWScheduleFree(copies, foreach=False, eps=1e-6, **settings)
    theirs.train()
    for step, lr in enumerate(rates):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = lr
        run(ours, params, [step])
        set_gradients(copies, step)  # theirs writes to gradients
        theirs.step()
        assert_points(params, copies)
        if step % 4 == 0:
            ours.eval_params()
            theirs.eval()
            assert_points(params, copies)
            ours.train_params()
            theirs.train()
    assert (params[0] - before).abs().max() > 0.05
    for key in ("z", "exp_avg_sq"):
        assert_points([ours.state[p][key] for p in params], [theirs.state[q][key] for q in copies])
