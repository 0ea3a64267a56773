"""Schedule-Free AdamW takes the steps of its authors' package, schedulefree 1.4.1."""

import pytest
import torch
from schedulefree import AdamWScheduleFree

from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from tests.optimizers.several import parameters, run, set_gradients

STEPS = 20


def of_both(ours, theirs, params, copies, step):
    run(ours, params, [step])
    set_gradients(copies, step)  # theirs writes to gradients
    theirs.step()


def assert_points(params, copies):
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("warmup_steps", [0, 7, 30])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.7, 0.9), (0.3, 0.95)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_train_and_evaluate_at_the_same_points(dtype, betas, warmup_steps, weight_decay):
    params, copies = parameters(dtype=dtype), parameters(dtype=dtype)
    before = params[0].detach().clone()
    same = {"lr": 0.05, "betas": betas, "eps": 1e-6, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
    ours = ScheduleFreeAdamW(params, variant="schedulefree", **same)
    theirs = AdamWScheduleFree(copies, foreach=False, **same)
    theirs.train()
    for step in range(STEPS):
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
def test_both_weigh_steps_by_powers_of_their_number_and_of_the_largest_rate(powers):
    params, copies = parameters(), parameters()
    same = {"lr": 0.05, "warmup_steps": 7, "r": powers[0], "weight_lr_power": powers[1]}
    ours = ScheduleFreeAdamW(params, variant="schedulefree", **same)
    theirs = AdamWScheduleFree(copies, foreach=False, **same)
    theirs.train()
    for step in range(STEPS):
        of_both(ours, theirs, params, copies, step)
        assert_points(params, copies)
    assert_points([ours.average(p) for p in params], [theirs.eval() or q for q in copies])
    plain = parameters()
    run(ScheduleFreeAdamW(plain, lr=0.05, warmup_steps=7, variant="schedulefree"), plain, range(STEPS))
    assert (plain[0] - params[0]).abs().max() > 1e-3
