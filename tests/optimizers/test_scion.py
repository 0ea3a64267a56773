"""Scion on one rank, against its formulas written out."""

import copy

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Scion as Theirs

from megatron_eopt.optimizers.scion import Scion
from tests.optimizers.field import SHAPES, TOLERANCE, assert_close, assert_close_in_bf16, factor, gradient, matrix, run


def reference(p, gradients, lr, momentum=0.9, radius=50.0, constrained=True):
    """Algorithms 1 and 2 of arXiv 2502.07529, with the spectral lmo of hidden matrices, in fp64."""
    w, d = p.detach().double().clone(), 0.0
    rows, cols = w.shape
    for g in gradients:
        d = momentum * d + (1 - momentum) * g.double()
        lmo = -radius * (rows / cols) ** 0.5 * factor(d)
        w = (1 - lr) * w + lr * lmo if constrained else w + lr * lmo
    return w


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formula(dtype, shape, constrained):
    p = matrix(*shape, dtype=dtype)
    settings = {"lr": 0.01, "momentum": 0.8, "radius": 3.0, "constrained": constrained}
    expected = reference(p, [gradient(p, seed) for seed in range(20)], **settings)
    opt = Scion([p], fp32_matmul_prec="highest", **settings)
    run(opt, p, range(20))
    assert_close(p.detach(), expected, TOLERANCE[dtype])
    assert list(opt.state[p]) == ["momentum_buffer"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_parameters_follow_it_as_far_as_they_can(shape):
    p = matrix(*shape, dtype=torch.bfloat16)
    before, settings = p.detach().double(), {"lr": 0.1, "radius": 3.0}
    expected = reference(p, [gradient(p, seed) for seed in range(20)], **settings)
    run(Scion([p], **settings), p, range(20))
    assert_close_in_bf16(p.detach(), before, expected, roundings=2 * 20)


@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (8, 8)])
def test_constrained_steps_are_those_of_emerging_optimizers(shape):
    p, q = matrix(*shape), matrix(*shape)
    same = {"fp32_matmul_prec": "highest", "momentum": 0.9}
    run(Scion([p], 0.05, radius=3.0, **same), p, range(20))
    run(Theirs([q], 0.05, spectral_radius=3.0, **same), q, range(20))
    assert_close(p.detach(), q.detach().double(), 1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_constrained_matrices_come_into_the_ball_and_stay_there(shape):
    rows, cols = shape
    p = matrix(*shape, dtype=torch.float64)
    opt = Scion([p], lr=0.2, radius=0.5, coefficient_type="polar_express", num_ns_steps=8)

    def norm():
        return torch.linalg.matrix_norm(p.detach(), 2) * (cols / rows) ** 0.5

    start = norm()
    assert start > 1
    for step in range(40):
        run(opt, p, [step])
        assert norm() <= 0.5 + 0.8 ** (step + 1) * (start - 0.5) + 1e-3
    assert norm() > 0.05


def test_the_size_of_an_update_does_not_depend_on_that_of_gradients_and_is_the_predicted_one():
    p, q = matrix(60, 24), matrix(60, 24)
    settings = {"lr": 1.0, "constrained": False, "radius": 7.0, "coefficient_type": "polar_express", "num_ns_steps": 8}
    one, other = (Scion([x], fp32_matmul_prec="highest", **settings) for x in (p, q))
    before = p.detach().clone()
    p.grad = gradient(p, 1)
    q.grad = 2.0**-20 * p.grad
    one.step()
    other.step()
    assert_close(q.detach(), p.detach().double(), 1e-5)
    rms = (p.detach() - before).square().mean().sqrt().item()
    assert rms == pytest.approx(7.0 * (60 / 24) ** 0.5 / 60**0.5, rel=1e-3)
    assert one.predicted_rms(60, 24, one.param_groups[0]) == pytest.approx(rms, rel=1e-3)


def test_groups_have_radii_of_their_own_and_a_changed_one_is_in_force_in_the_next_step():
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = Scion([{"params": [p], "radius": 2.0}, {"params": [q]}], lr=0.01, radius=5.0, fp32_matmul_prec="highest")
    for x, radius in ((p, 2.0), (q, 5.0)):
        x.expected = reference(x, [gradient(x, 0)], 0.01, radius=radius)
        x.grad = gradient(x, 0)
    opt.step()
    for x in (p, q):
        assert_close(x.detach(), x.expected, 1e-6)
    opt.param_groups[0]["radius"] = 4.0
    changed = matrix()
    again = Scion([changed], lr=0.01, radius=4.0, fp32_matmul_prec="highest")
    again.load_state_dict({**copy.deepcopy(opt.state_dict()), "param_groups": again.state_dict()["param_groups"]})
    changed.data.copy_(p.data)
    run(again, changed, [1])
    q.grad = None
    run(opt, p, [1])
    assert torch.equal(p, changed)
    assert opt.settings()["of_groups"] == {0: {"radius": 4.0}, 1: {"radius": 5.0}}
    assert opt.settings()["constrained"] is True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 1.5}, r"Scion: lr must lie in \[0, 1\], since a constrained step .*got 1\.5"),
        ({"lr": -0.1, "constrained": False}, r"Scion: lr must be a finite number of at least 0, got -0\.1"),
        ({"weight_decay": 0.1}, r"Scion has no weight decay, got 0\.1: constrained=True bounds"),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        Scion([matrix()], **settings)


def test_a_groups_wrong_radius_is_refused_with_its_number():
    opt = Scion([matrix()])
    with pytest.raises(ValueError, match=r"group 1: Scion: radius must be .* got -1"):
        opt.add_param_group({"params": [matrix(seed=1)], "radius": -1})
    state = opt.state_dict()
    state["param_groups"][0]["radius"] = float("nan")
    with pytest.raises(ValueError, match=r"Scion: radius must be .* got nan"):
        opt.load_state_dict(state)


def test_rates_above_one_are_for_unconstrained_steps():
    p = matrix()
    expected = reference(p, [gradient(p, 0)], 2.0, radius=0.5, constrained=False)
    run(Scion([p], lr=2.0, radius=0.5, constrained=False, fp32_matmul_prec="highest"), p, [0])
    assert_close(p.detach(), expected, 1e-5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weight_decay", 0.1, r"Scion has no weight decay, got 0\.1: .* of its matrices to 0"),
        ("lr", 1.5, r"lr must lie in \[0, 1\], .*got 1\.5"),
    ],
)
def test_a_setting_that_a_scheduler_makes_wrong_is_refused_before_anything_changes(key, value, message):
    p = matrix()
    opt = Scion([p], lr=0.05)
    run(opt, p, [0])
    before = p.detach().clone()
    opt.param_groups[0][key] = value
    with pytest.raises(ValueError, match=message):
        run(opt, p, [1])
    assert torch.equal(p, before)
