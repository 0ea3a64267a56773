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
def test_parameters_of_16_bits_follow_it_as_fp32_ones_do_but_for_one_rounding(variant, dtype):
    # also after many steps, in which a point kept in 16 bits stands still
    follows(SHAPES, 200, dtype, variant, 2e-6, **SETTINGS)


def test_fp32_parameters_keep_two_tensors_and_16_bits_or_small_betas_one_more():
    p, q = parameters([(3, 2)]), parameters([(3, 2)], torch.bfloat16)
    optimizer = ScheduleFreeAdamW([*p, *q])
    optimizer.add_param_group({"params": parameters([(4,)]), "betas": (0.1, 0.9)})
    optimizer.init_state()
    states = [set(optimizer.state[each]) for group in optimizer.param_groups for each in group["params"]]
    assert states == [{"z", "exp_avg_sq", "schedule"}] + [{"z", "x", "exp_avg_sq", "schedule"}] * 2


@pytest.mark.parametrize(("variant", "weights"), [("kempnerforge", [4, 4, 1, 1]), ("schedulefree", [1, 1, 1, 1])])
def test_steps_at_a_lower_rate_weigh_less_or_as_much(variant, weights):
    (p,) = parameters([(6, 4)])
    optimizer = ScheduleFreeAdamW([p], variant=variant)
    points = []
    for step, lr in enumerate([0.4, 0.4, 0.1, 0.1]):
        optimizer.param_groups[0]["lr"] = lr
        run(optimizer, [p], [step])
        points.append(optimizer.state[p]["z"].clone())
    expected = sum(weight * z for weight, z in zip(weights, points, strict=True)) / sum(weights)
    torch.testing.assert_close(optimizer.average(p), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learning_rate_of_zero_changes_nothing_and_a_later_one_counts(dtype):
    params = parameters([(6, 4)], dtype)
    optimizer = ScheduleFreeAdamW(params, lr=0.0, weight_decay=0.1)
    before = copy.deepcopy(params)
    run(optimizer, params, range(2))
    assert torch.equal(params[0], before[0])
    optimizer.param_groups[0]["lr"] = 0.05
    run(optimizer, params, [2])
    # the first weight above zero: all points are z
    torch.testing.assert_close(optimizer.average(params[0]), optimizer.state[params[0]]["z"].to(dtype))
    assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_parameter_without_gradient_is_left_as_it_is_and_joins_the_count_of_the_optimizer(variant):
    params, before = parameters([(6, 4), (5,), (3, 2)]), parameters([(6, 4), (5,), (3, 2)])
    optimizer = ScheduleFreeAdamW(params[:2], variant=variant, **SETTINGS)
    gradients = [[], [None] * 3, [None] * 4]
    for step in range(8):
        if step == 4:
            optimizer.add_param_group({"params": [params[2]]})
        optimizer.zero_grad()
        taking_part = [i for i, first in enumerate((0, 3, 4)) if step >= first and (i, step) != (0, 5)]
        set_gradients([params[i] for i in taking_part], step)
        for i in range(3):
            if i in taking_part or len(gradients[i]) == step:
                gradients[i].append(params[i].grad)
        if step == 2:
            optimizer.eval_params()
            optimizer.train_params()
            assert torch.equal(params[1], before[1])
        optimizer.step()
    assert [group["k"] for group in optimizer.param_groups] == [8, 8]
    for p, first, seen in zip(params, before, gradients, strict=True):
        x, y, _, _ = reference_steps(first, seen, variant, **SETTINGS)
        torch.testing.assert_close(p.detach().double(), y, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.average(p).double(), x, rtol=1e-6, atol=1e-6)


def test_train_and_eval_are_the_names_of_the_schedulefree_package():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = ScheduleFreeAdamW([p], lr=0.1)
    optimizer.train()
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    at_y = p.detach().clone()
    optimizer.eval()
    assert optimizer.live == "x"
    assert not torch.equal(p, at_y)
    optimizer.train()
    assert optimizer.live == "y"
    assert torch.equal(p, at_y)


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
def test_both_weigh_steps_by_powers_of_their_number_and_of_the_largest_rate(powers):
    params, copies = parameters(), parameters()
    same = {"lr": 0.05, "warmup_steps": 7, "r": powers[0], "weight_lr_power": powers[1]}
    ours = ScheduleFreeAdamW(params, variant="schedulefree", **same)
    theirs = AdamWScheduleFree(copies, foreach=False, **same)
    theirs.train()
    for step in range(20):
        of_both(ours, theirs, params, copies, step)
        assert_points(params, copies)
    assert_points([ours.average(p) for p in params], [theirs.eval() or q for q in copies])
    plain = parameters()
    run(ScheduleFreeAdamW(plain, lr=0.05, warmup_steps=7, variant="schedulefree"), plain, range(20))
    assert (plain[0] - params[0]).abs().max() > 1e-3
