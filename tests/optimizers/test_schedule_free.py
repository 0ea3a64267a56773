"""Schedule-Free AdamW takes the steps of its formulas; what it keeps is in test_schedule_free_state.py."""

import copy
import math

import pytest
import torch

from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from tests.distributed.ranks import run_ranks
from tests.optimizers.several import SHAPES, UNEVEN, gradients_of, parameters, run, set_gradients, stepped_in_shards

VARIANTS = ("kempnerforge", "schedulefree")
SETTINGS = {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup_steps": 5}


def reference_steps(p, gradients, variant, lr=0.025, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup_steps=0):
    """The algorithm for one tensor in fp64, from the definitions of its three points; None is a step without it."""
    z = x = y = p.detach().double()
    v, total, largest = torch.zeros_like(z), 0.0, 0.0
    for k, g in enumerate(gradients, 1):
        if g is None:
            continue
        g = g.double()
        rate = lr * (min(1.0, k / warmup_steps) if warmup_steps else 1.0)
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = g / ((v / (1 - betas[1] ** k)).sqrt() + eps)
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


def test_the_variants_are_not_the_same():
    ours, theirs = parameters(), parameters()
    for variant, params in zip(VARIANTS, (ours, theirs), strict=True):
        run(ScheduleFreeAdamW(params, variant=variant, **SETTINGS), params, range(10))
    assert (ours[0] - theirs[0]).abs().max() > 1e-3


def test_a_decay_alone_is_of_z_or_at_y():
    p, q = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    for variant, each in zip(VARIANTS, (p, q), strict=True):
        optimizer = ScheduleFreeAdamW([each], lr=0.5, betas=(0.5, 0.9), weight_decay=0.5, variant=variant)
        each.grad = torch.zeros(1)
        optimizer.step()  # z = x = y = 3/4
        optimizer.step()  # of z and y alike while they are equal: z = 9/16, x = 21/32, y = 39/64
        each.grad = torch.full((1,), 1e-30)
        optimizer.step()
    assert p.item() == pytest.approx((27 / 64 + (21 / 32 * 2 + 27 / 64) / 3) / 2)
    z = 9 / 16 - 39 / 256
    assert q.item() == pytest.approx((z + (21 / 32 * 2 + z) / 3) / 2)


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


def test_groups_have_settings_of_their_own():
    settings = [
        {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 1e-2, "warmup_steps": 0, "variant": VARIANTS[1]},
        {"lr": 0.01, "betas": (0.9, 0.99), "warmup_steps": 3, "eps": 1e-8, "variant": VARIANTS[0]},
    ]
    params, before = parameters(), parameters()
    optimizer = ScheduleFreeAdamW([{"params": params[:2], **settings[0]}, {"params": params[2:4]}], **settings[1])
    optimizer.add_param_group({"params": params[4:], **settings[0]})
    gradients = gradients_of(optimizer, params, range(4))
    for index, which in enumerate((0, 0, 1, 1, 0)):
        _, y, _, _ = reference_steps(before[index], gradients[index], **settings[which])
        torch.testing.assert_close(params[index].detach().double(), y, rtol=1e-6, atol=1e-6)


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


def test_a_gradient_whose_square_is_beyond_fp32_does_not_stop_the_parameter_for_ever():
    (p,) = parameters([(6, 4)])
    optimizer = ScheduleFreeAdamW([p], betas=(0.9, 0.5))
    p.grad = torch.full_like(p, 1e25)
    optimizer.step()
    assert p.isfinite().all()
    run(optimizer, [p], range(150))
    before = p.detach().clone()
    run(optimizer, [p], range(150, 151))
    assert not torch.equal(p, before)
    assert p.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, got -1"),
        ({"warmup_steps": 0.5}, r"warmup_steps must be a whole number of at least 0, got 0\.5"),
        ({"r": math.nan}, "r must be a finite number, got nan"),
        ({"weight_lr_power": -1.0}, r"weight_lr_power must be a finite number of at least 0, got -1\.0"),
        ({"r": 1.0}, r"r=1\.0 and weight_lr_power=2\.0 would have no effect with variant 'kempnerforge'"),
        ({"variant": "x"}, "ScheduleFreeAdamW: unknown variant 'x': expected one of kempnerforge, schedulefree"),
    ],
)
def test_wrong_settings_are_refused_at_construction_and_in_a_new_group(settings, message):
    p, q = parameters([(6, 4), (5,)])
    with pytest.raises(ValueError, match=message):
        ScheduleFreeAdamW([p], **settings)
    optimizer = ScheduleFreeAdamW([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [q], **settings})
    assert len(optimizer.param_groups) == 1


def _distributed_steps(rank, world_size):
    params, optimizer = stepped_in_shards(world_size, lambda params: ScheduleFreeAdamW(params, **SETTINGS))
    trained = [p.full_tensor().detach().clone() for p in params]
    optimizer.eval_params()
    return list(zip(trained, [p.full_tensor().detach() for p in params], strict=True))


def test_dtensors_train_as_on_one_rank():
    params = parameters(UNEVEN)
    optimizer = ScheduleFreeAdamW(params, **SETTINGS)
    run(optimizer, params, range(3))
    for found in run_ranks(_distributed_steps, 2):
        for (y, x), alone in zip(found, params, strict=True):
            assert torch.equal(y, alone)
            assert torch.equal(x, optimizer.average(alone))


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
