"""AdEMAMix takes the steps of its formulas, and goes on within its warm-ups."""

import copy
import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt import AdEMAMix
from tests.distributed.ranks import run_ranks
from tests.optimizers.several import SHAPES, UNEVEN, gradients_of, parameters, run, stepped_in_shards

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "beta3": 0.999, "alpha": 5.0, "weight_decay": 0.1}
WARMUP = {"alpha_warmup": 6, "beta3_warmup": 8}
KEYS = ["exp_avg_fast", "exp_avg_slow", "exp_avg_sq"]


def half_life(beta):
    """Steps in which a momentum halves."""
    return math.log(0.5) / math.log(beta) if beta else 0.0


def beta3_of(step, beta1, beta3, warmup):
    """By half-lives, which is how the authors say it."""
    if step >= warmup:
        return beta3
    share = step / warmup
    steps = (1 - share) * half_life(beta1) + share * half_life(beta3)
    return 0.5 ** (1 / steps) if steps else 0.0


def reference_steps(p, gradients, lr, betas, beta3, alpha, weight_decay=0.0, eps=1e-8, alpha_warmup=0, beta3_warmup=0):
    """The algorithm, written out for one tensor in fp64; weights are rounded to their dtype after each step."""
    dtype = p.dtype
    p = p.detach().double().clone()
    m1, m2, v = (torch.zeros_like(p) for _ in range(3))
    for t, g in enumerate(gradients, 1):
        g = g.double()
        m1 = betas[0] * m1 + (1 - betas[0]) * g
        slow = beta3_of(t, betas[0], beta3, beta3_warmup)
        m2 = slow * m2 + (1 - slow) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        weight = alpha * (t / alpha_warmup if t < alpha_warmup else 1.0)
        update = (m1 / (1 - betas[0] ** t) + weight * m2) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        p = (p - lr * (update + weight_decay * p)).to(dtype).double()
    return p.to(dtype), (m1, m2, v)


def follows(shapes, steps, dtype=torch.float32, tolerance=1e-6, **settings):
    params = parameters(shapes, dtype)
    before, optimizer = copy.deepcopy(params), AdEMAMix(params, **settings)
    gradients = gradients_of(optimizer, params, range(steps))
    wide = torch.promote_types(dtype, torch.float32)
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected, moments = reference_steps(first, seen, **settings)
        torch.testing.assert_close(p.detach(), expected, rtol=tolerance, atol=tolerance)
        for key, moment in zip(KEYS, moments, strict=True):
            of_dtype = 1e-11 if dtype == torch.float64 else 1e-6
            found = optimizer.state[p][key]
            assert found.dtype == wide
            torch.testing.assert_close(found.double(), moment, rtol=of_dtype, atol=of_dtype)
        assert list(optimizer.state[p]) == [*KEYS, "steps"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-6)])
@pytest.mark.parametrize("warmup", [{}, WARMUP])
def test_twenty_steps_follow_the_formula(dtype, tolerance, warmup):
    follows(SHAPES, 20, dtype, tolerance, **SETTINGS, **warmup)


def test_twenty_steps_of_bf16_parameters_follow_the_formula_with_moments_in_fp32():
    # near a tie a weight is rounded to another neighbour than in fp64, and goes on from there
    follows(SHAPES, 20, torch.bfloat16, 2**-6, **SETTINGS, **WARMUP)


betas = st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.999])


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=20),
    lr=st.floats(0, 1),
    betas=st.tuples(betas, betas),
    beta3=betas,
    alpha=st.floats(0, 20),
    weight_decay=st.floats(0, 1),
    alpha_warmup=st.integers(0, 6),
    beta3_warmup=st.integers(0, 6),
)
def test_shapes_and_settings_of_any_kind(shapes, **settings):
    follows(shapes, 4, torch.float64, 1e-9, eps=1e-3, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("warmup", [{}, WARMUP])
def test_equals_emerging_optimizers(dtype, warmup):
    module = importlib.import_module("emerging_optimizers.scalar_optimizers.update_functions.ademamix")
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    moments = [[torch.zeros_like(p) for _ in KEYS] for p in theirs]
    optimizer = AdEMAMix(ours, **SETTINGS, **warmup)
    steps = gradients_of(optimizer, ours, range(12))
    shared = {"betas": (*SETTINGS["betas"], SETTINGS["beta3"]), "alpha": SETTINGS["alpha"]}
    counts = {
        f"num_{new}_warmup_steps": warmup.get(old)
        for new, old in (("alpha", "alpha_warmup"), ("beta_slow", "beta3_warmup"))
    }
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling takes longer than the steps
        for p, kept, gradients in zip(theirs, moments, steps, strict=True):
            for step, g in enumerate(gradients, 1):
                update = module.calculate_ademamix_update(
                    g, *kept, eps=1e-8, correct_bias=True, step=step, **shared, **counts
                )
                p.sub_(SETTINGS["lr"] * (update + SETTINGS["weight_decay"] * p))
    for p, q, kept in zip(ours, theirs, moments, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        for key, moment in zip(KEYS, kept, strict=True):
            torch.testing.assert_close(optimizer.state[p][key], moment, rtol=1e-6, atol=1e-6)


def test_without_the_slow_momentum_it_is_adamw():
    ours, theirs = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    settings = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    run(AdEMAMix(ours, alpha=0.0, **settings), ours, range(8))
    run(torch.optim.AdamW(theirs, **settings), theirs, range(8))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_joins_late_starts_its_warm_ups_then():
    early, late = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    optimizer, alone = AdEMAMix(early[:2], **SETTINGS, **WARMUP), AdEMAMix(late[1:2], **SETTINGS, **WARMUP)
    for step in range(7):
        run(optimizer, early[: 1 if step < 3 else 2], [step])
        if step < 3:
            early[1].grad = None
    run(alone, [late[0], late[1]], range(3, 7))
    assert torch.equal(early[1], late[1])


def test_a_stopped_run_goes_on_within_its_warm_ups():
    straight, stopped = parameters(), parameters()
    whole, first = (AdEMAMix(params, **SETTINGS, **WARMUP) for params in (straight, stopped))
    run(whole, straight, range(10))
    run(first, stopped, range(4))
    second = AdEMAMix(stopped)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, stopped, range(4, 10))
    for p, q in zip(straight, stopped, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(whole.state[p][key], second.state[q][key]) for key in whole.state[p])


def test_groups_have_settings_of_their_own():
    settings = [SETTINGS | WARMUP, SETTINGS | {"alpha": 1.0, "beta3": 0.5, "lr": 0.3}]
    params, before = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    optimizer = AdEMAMix([{"params": params[:2], **settings[0]}, {"params": params[2:]}], **settings[1])
    gradients = gradients_of(optimizer, params, range(3))
    for index, which in enumerate((0, 0, 1, 1, 1)):
        expected, _ = reference_steps(before[index], gradients[index], **settings[which])
        torch.testing.assert_close(params[index].detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1.0}, "AdEMAMix: alpha must be a finite number of at least 0, got -1.0"),
        ({"alpha": math.inf}, "AdEMAMix: alpha must be a finite number of at least 0, got inf"),
        ({"beta3": 1.0}, r"AdEMAMix: beta3 must lie in \[0, 1\), got 1.0"),
        ({"betas": (0.9, 0.999, 0.9999)}, r"AdEMAMix: betas must be two numbers in \[0, 1\), got \(0.9, 0.999, 0.9999"),
        ({"alpha_warmup": -1}, "AdEMAMix: alpha_warmup must be a whole number of at least 0, got -1"),
        ({"beta3_warmup": 2.5}, "AdEMAMix: beta3_warmup must be a whole number of at least 0, got 2.5"),
        ({"eps": 0.0}, "AdEMAMix: eps must be a finite number above 0, got 0.0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    (p,) = parameters([(6, 4)])
    with pytest.raises(ValueError, match=message):
        AdEMAMix([p], **settings)
    optimizer = AdEMAMix([p])
    optimizer.param_groups[0].update(settings)
    p.grad = torch.ones(6, 4)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(p, parameters([(6, 4)])[0])


def _distributed_steps(rank, world_size):
    params, optimizer = stepped_in_shards(world_size, lambda params: AdEMAMix(params, **SETTINGS, **WARMUP))
    return [(p.full_tensor().detach(), *(optimizer.state[p][key].full_tensor() for key in KEYS)) for p in params]


def test_dtensors_train_as_on_one_rank():
    params = parameters(UNEVEN)
    optimizer = AdEMAMix(params, **SETTINGS, **WARMUP)
    run(optimizer, params, range(3))
    for found in run_ranks(_distributed_steps, 2):
        for (p, *moments), alone in zip(found, params, strict=True):
            assert torch.equal(p, alone)
            assert all(torch.equal(x, optimizer.state[alone][key]) for x, key in zip(moments, KEYS, strict=True))
