"""Muon on a hyperball, on one rank, against its formulas written out."""

import copy

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import MuonHyperball as Theirs

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.step import Step
from megatron_eopt.parallel import statistics
from tests.distributed.test_statistics import allocations
from tests.optimizers.field import (
    SHAPES,
    TOLERANCE,
    assert_close,
    assert_close_in_bf16,
    drawn,
    factor,
    gradient,
    matrix,
    run,
)


def reference(p, gradients, lr, momentum=0.95, nesterov=True):
    """``W <- R normalize(W - lr R normalize(O))``, in fp64."""
    w, m = p.detach().double().clone(), 0.0
    radius = w.norm()
    for g in gradients:
        g = g.double()
        m = momentum * m + (1 - momentum) * g
        o = factor(momentum * m + (1 - momentum) * g if nesterov else m)
        w = w - lr * radius * o / o.norm()
        w = radius * w / w.norm()
    return w


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formula(dtype, shape, nesterov):
    p = matrix(*shape, dtype=dtype)
    start = p.detach().double().norm()
    settings = {"lr": 0.02, "momentum": 0.8, "nesterov": nesterov}
    expected = reference(p, [gradient(p, seed) for seed in range(20)], **settings)
    opt = MuonHyperball([p], fp32_matmul_prec="highest", **settings)
    run(opt, p, range(20))
    assert_close(p.detach(), expected, TOLERANCE[dtype])
    assert list(opt.state[p]) == ["momentum_buffer", "radius"]
    radius = opt.state[p]["radius"]
    assert (radius.dtype, radius.shape) == (torch.float64, ())
    assert radius == pytest.approx(start.item(), rel=1e-15)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_parameters_follow_it_as_far_as_they_can(shape):
    p = matrix(*shape, dtype=torch.bfloat16)
    before = p.detach().double()
    expected = reference(p, [gradient(p, seed) for seed in range(20)], lr=0.05)
    run(MuonHyperball([p], lr=0.05), p, range(20))
    assert_close_in_bf16(p.detach(), before, expected, roundings=20)


def test_the_norm_does_not_drift():
    # rounding is off by 2^-8 / sqrt(7) of an entry (see field.py), so of the norm of 84 normally distributed ones by
    # sqrt(3 / 84) of that; a norm found anew in every step would take all these errors along
    p = matrix(12, 7, dtype=torch.bfloat16)
    start = p.detach().double().norm()
    opt = MuonHyperball([p], lr=0.05)
    for step in range(200):
        run(opt, p, [step])
        assert abs(p.detach().double().norm() / start - 1) <= 5 * 2**-8 * (3 / 7 / 84) ** 0.5


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (8, 8)])
def test_steps_are_those_of_emerging_optimizers(shape, nesterov):
    p, q = matrix(*shape), matrix(*shape)
    same = {"momentum": 0.9, "nesterov": nesterov, "fp32_matmul_prec": "highest"}
    run(MuonHyperball([p], 0.05, **same), p, range(20))
    run(Theirs([q], 0.05, weight_decay=0.0, **same), q, range(20))
    assert_close(p.detach(), q.detach().double(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_rate_of_zero_leaves_the_weight_bit_for_bit(rate, dtype):
    p = matrix(12, 7, dtype=dtype)
    opt = MuonHyperball([p], lr=0.05)
    run(opt, p, range(5))
    p.data.mul_(1.25)  # off its sphere, to which every other step returns
    before, momentum = p.detach().clone(), opt.state[p]["momentum_buffer"].clone()
    opt.param_groups[0]["lr"] = rate
    run(opt, p, range(5, 8))
    assert torch.equal(p, before)
    assert not torch.equal(opt.state[p]["momentum_buffer"], momentum)
    opt.param_groups[0]["lr"] = 0.05
    run(opt, p, [8])
    assert p.detach().double().norm() == pytest.approx(opt.state[p]["radius"].item(), rel=2**-8)


def test_without_an_update_a_matrix_stays_as_it_is():
    p = matrix()
    opt = MuonHyperball([p], lr=0.5)
    for stretch in (1.0, 1.25):  # on its sphere, and off it
        p.data.mul_(stretch)
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        opt.step()
        assert torch.equal(p, before)
    assert opt.state[p]["radius"] == pytest.approx(matrix().detach().double().norm().item(), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_to_the_center_is_left_out_since_it_has_no_direction(dtype):
    p = torch.nn.Parameter(torch.eye(3, 2, dtype=dtype))
    opt = MuonHyperball([p], lr=1.0, momentum=0.0)
    p.grad = torch.eye(3, 2, dtype=dtype)
    opt.step()
    assert torch.equal(p, torch.eye(3, 2, dtype=dtype))


def test_a_gradient_that_is_not_accepted_leaves_a_matrix_that_is_off_its_sphere():
    p, q = matrix(), matrix(seed=1)
    opt = MuonHyperball([p, q], lr=0.05)
    for seed in (1, 2):
        p.grad, q.grad = gradient(p, seed), gradient(q, seed)
        opt.step()
    p.data.mul_(1.25)
    before, other = p.detach().clone(), q.detach().clone()
    state = {key: value.clone() for key, value in opt.state[p].items()}
    for bad in (torch.nan, torch.inf, None):
        q.grad, p.grad = gradient(q, 3), None if bad is None else gradient(p, 3)
        if bad is not None:
            p.grad[1, 2] = bad
        opt.step()
    assert torch.equal(p, before)
    assert all(torch.equal(opt.state[p][key], value) for key, value in state.items())
    assert not torch.equal(q, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_the_start_is_saved_and_kept(dtype):
    straight, stopped = matrix(dtype=dtype), matrix(dtype=dtype)
    whole, first = MuonHyperball([straight], lr=0.05), MuonHyperball([stopped], lr=0.05)
    run(whole, straight, range(6))
    run(first, stopped, range(3))
    resumed = torch.nn.Parameter(stopped.detach().clone())
    second = MuonHyperball([resumed], lr=0.05)
    second.init_state()  # as a checkpoint needs it before it loads
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state[resumed]["radius"].dtype == torch.float64
    run(second, resumed, range(3, 6))
    assert torch.equal(resumed, straight)
    for key, value in whole.state[straight].items():
        assert torch.equal(second.state[resumed][key], value), key


def test_norms_are_those_of_the_first_step_also_of_groups_that_are_added_and_of_a_state_without_steps():
    p, q = matrix(), matrix(seed=1)
    opt = MuonHyperball([p], lr=0.05)
    opt.init_state()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    p.data.mul_(2)  # a checkpoint of the model, say
    run(opt, p, [1])
    opt.add_param_group({"params": [q]})
    p.data.mul_(2)
    run(opt, q, [2])
    assert opt.state[p]["radius"] == pytest.approx(2 * matrix().detach().double().norm().item(), rel=1e-6)
    assert opt.state[q]["radius"] == pytest.approx(matrix(seed=1).detach().double().norm().item(), rel=1e-15)
    without_steps = MuonHyperball([{"params": [matrix()]}, {"params": [matrix(seed=1)]}], lr=0.05)
    without_steps.init_state()
    opt.load_state_dict(without_steps.state_dict())
    before = p.detach().double().norm().item()
    run(opt, p, [3])
    assert opt.state[p]["radius"] == pytest.approx(before, rel=1e-15)


@pytest.mark.parametrize(("value", "norm"), [(0.0, "0"), (torch.inf, "inf"), (torch.nan, "nan")])
def test_a_matrix_without_a_norm_is_refused_before_anything_changes(value, norm):
    p, q = matrix(), torch.nn.Parameter(torch.full((5, 3), value))
    opt = MuonHyperball([("first.weight", p), ("second.weight", q)])
    before = p.detach().clone()
    p.grad, q.grad = gradient(p, 1), gradient(q, 1)
    with pytest.raises(
        ValueError, match=rf"the norm that a matrix starts with, and that of second\.weight is {norm}: "
    ):
        opt.step()
    assert torch.equal(p, before)
    assert not opt.state[p]["momentum_buffer"].any()


def step_of(optimizer):
    return Step(optimizer._batches(torch.ones(1)), [0], [1.0], optimizer.engine)


@torch.no_grad()
def test_a_large_matrix_moves_by_pieces(tmp_path, monkeypatch):
    p, q = matrix(150, 100), matrix(150, 100)
    whole, cut = MuonHyperball([p], lr=0.05), MuonHyperball([q], lr=0.05)
    run(whole, p, [0])
    run(cut, q, [0])
    update = drawn((150, 100), 1)
    step_of(whole).subtract([update], [1.0])
    for module in (foreach, statistics):
        monkeypatch.setattr(module, "MOST_BYTES", 2**14)  # of 60,000
    step = step_of(cut)
    bytes_of_each, _ = allocations(lambda: step.subtract([update], [1.0]), tmp_path / "trace.json")
    assert max(bytes_of_each) <= 2**14
    assert_close(q.detach(), p.detach().double(), 1e-6)


def test_matrices_without_entries_take_part():
    p, q = matrix(), torch.nn.Parameter(torch.empty(0, 3))
    opt = MuonHyperball([p, q], lr=0.05)
    expected = reference(p, [gradient(p, 1)], 0.05)
    p.grad, q.grad = gradient(p, 1), gradient(q, 1)
    opt.step()
    assert_close(p.detach(), expected, 2**-6)
    assert q.shape == (0, 3)


def test_a_weight_decay_is_refused_at_construction():
    message = "MuonHyperball has no weight decay, got 0.1: it keeps the norm of every matrix, whatever decays"
    with pytest.raises(ValueError, match=f"{message}; set the weight_decay of its matrices to 0"):
        MuonHyperball([matrix()], weight_decay=0.1)


def test_a_weight_decay_that_a_scheduler_sets_is_refused_before_anything_changes():
    p = matrix()
    opt = MuonHyperball([p], lr=0.05)
    run(opt, p, [0])
    before = p.detach().clone()
    opt.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match=r"MuonHyperball has no weight decay, got 0\.1: .* of its matrices to 0"):
        run(opt, p, [1])
    assert torch.equal(p, before)
