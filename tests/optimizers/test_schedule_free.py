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
    """The algorithm for one tensor in fp64, from the definitions of its three points; None is a step without it."""
    z = x = y = p.detach().double()
    v, total, largest, t = torch.zeros_like(z), 0.0, 0.0, 0
    for k, g in enumerate(gradients, 1):
        if g is None:
            continue
        g = g.double()
        t += 1
        rate = lr * (min(1.0, k / warmup_steps) if warmup_steps else 1.0)
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
@pytest.mark.parametrize("settings", [SETTINGS, {}, {"betas": (0.3, 0.9)}, {"betas": (0.0, 0.0), "warmup_steps": 30}])
def test_twenty_steps_follow_the_formula(variant, settings):
    follows(SHAPES, 20, torch.float32, variant, 1e-6, **settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_of_fp64_parameters_follow_it_in_fp64(variant):
    follows(SHAPES, 20, torch.float64, variant, 1e-12, **SETTINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_16_bits_follow_it_but_for_one_rounding(variant, dtype):
    # also after many steps, in which a point kept in 16 bits stands still
    follows(SHAPES, 200, dtype, variant, 2e-6, **SETTINGS)


# The steps of its authors' package, schedulefree 1.4.1.


def of_both(ours, theirs, params, copies, step):
    run(ours, params, [step])
    set_gradients(copies, step)  # theirs writes to gradients
    theirs.step()


def assert_points(params, copies):
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "betas", "warmup_steps", "weight_decay"),
    [
        (torch.float64, (0.9, 0.999), 0, 0.3),
        (torch.float32, (0.9, 0.999), 7, 0.0),
        (torch.float32, (0.7, 0.9), 30, 0.3),
        (torch.float32, (0.3, 0.95), 0, 0.0),
        (torch.float64, (0.3, 0.95), 7, 0.3),
    ],
    ids=str,
)
def test_both_train_and_evaluate_at_the_same_points(dtype, betas, warmup_steps, weight_decay):
    params, copies = parameters(dtype=dtype), parameters(dtype=dtype)
    before = params[0].detach().clone()
    same = {"lr": 0.05, "betas": betas, "eps": 1e-6, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
    ours = ScheduleFreeAdamW(params, variant="schedulefree", **same)
    theirs = AdamWScheduleFree(copies, foreach=False, **same)
    theirs.train()
    for step in range(20):
        of_both(ours, theirs, params, copies, step)
        assert_points(params, copies)
        if step % 5 == 4:
            ours.eval_params()
            theirs.eval()
            assert_points(params, copies)
            ours.train_params()
            theirs.train()
    assert (params[0] - before).abs().max() > 0.05
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(ours.state[p]["z"], theirs.state[q]["z"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.state[p]["exp_avg_sq"], theirs.state[q]["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def test_both_weigh_steps_by_the_largest_rate_so_far():
    params, copies = parameters(), parameters()
    ours = ScheduleFreeAdamW(params, variant="schedulefree")
    theirs = AdamWScheduleFree(copies, foreach=False)
    theirs.train()
    for step, lr in enumerate([0.0, 0.0, 0.01, 0.05, 0.02, 0.02, 0.1, 0.0, 0.03]):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = lr
        of_both(ours, theirs, params, copies, step)
    assert_points([ours.average(p) for p in params], [theirs.eval() or q for q in copies])


@pytest.mark.parametrize("powers", [(1.0, 2.0), (0.0, 0.0), (-0.5, 1.0), (2.0, 3.0)], ids=str)
def test_both_weigh_steps_by_powers_of_number_and_rate(powers):
    params, copies = parameters(), parameters()
    same = {"lr": 0.05, "warmup_steps": 7, "r": powers[0], "weight_lr_power": powers[1]}
    ours = ScheduleFreeAdamW(params, variant="schedulefree", **same)
    theirs = AdamWScheduleFree(copies, foreach=False, **same)
    theirs.train()
    for step in range(20):
        of_both(ours, theirs, params, copies, step)
        assert_points(params, copies)
    assert_points([ours.average(p) for p in params], [theirs.eval() or q for q in copies])
