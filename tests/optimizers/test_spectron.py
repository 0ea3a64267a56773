"""Spectron's steps, against its formulas."""

import copy

import pytest
import torch
from counting import HOST_READ, Operations
from torch.overrides import TorchFunctionMode

from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from tests.optimizers.field import assert_close, assert_close_in_bf16, drawn
from tests.optimizers.several import gradients_of, run, set_gradients
from tests.optimizers.spectrons import SHAPES, factor_steps, parameters, reference_steps, spectron


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"momentum_beta": 0.0, "weight_decay": 0.5}, {"beta": 0.0, "wd": 0.5}),
        (
            {"momentum_beta": 0.95, "weight_decay": 0.0, "num_power_iterations": 3},
            {"beta": 0.95, "wd": 0.0, "power": 3},
        ),
        ({"rank": 1}, {"rank": 1}),
        ({"rank": 10}, {"rank": 10}),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_twenty_steps_follow_the_formulas(dtype, tolerance, ours, theirs):
    params = parameters(dtype=dtype)
    before = copy.deepcopy(params)
    gradients = gradients_of(spectron(params, lr=0.05, **ours), params, range(20))
    for p, first, seen in zip(params, before, gradients, strict=True):
        assert_close(p, reference_steps(first, seen, lr=0.05, **theirs), tolerance)


def test_bf16_weights_and_gradients_are_rounded_once():
    # factors are kept in fp32, so the weight is what the formulas give, rounded: off by 2^-8 of an entry at most
    params = parameters(dtype=torch.bfloat16)
    before, optimizer = copy.deepcopy(params), spectron(params, lr=0.05)
    gradients = gradients_of(optimizer, params, range(20))
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected = reference_steps(first, seen, lr=0.05)
        assert p.dtype == torch.bfloat16
        assert {x.dtype for x in optimizer.state[p].values()} == {torch.float32}
        torch.testing.assert_close(p.double(), expected, rtol=2**-8, atol=1e-6)


def test_bf16_products_of_the_iteration_stay_near_the_formulas():
    (p,) = parameters(SHAPES[:1])
    gradient, before = drawn((24, 16), 1), p.detach().clone()
    p.grad = gradient
    spectron([p], lr=0.1, fp32_matmul_prec="medium").step()
    start = reference_steps(before, [], lr=0.0)
    step = reference_steps(before, [gradient], lr=0.1) - start
    assert (p.detach() - start - step).norm() <= 0.02 * step.norm()


def test_no_step_changes_a_weight_by_more_than_lr():
    params = parameters()
    optimizer = spectron(params, lr=0.1, weight_decay=0.0)
    run(optimizer, params, [0])
    for step in range(1, 10):
        before = [p.detach().clone() for p in params]
        run(optimizer, params, [step])
        for p, old in zip(params, before, strict=True):
            # 1.033 is what the iteration makes of the largest singular values, one step what sigma lags behind
            assert 0.01 < torch.linalg.matrix_norm(p.detach() - old, ord=2) <= 1.05 * 0.1


def test_rows_and_columns_in_another_order_take_the_same_steps():
    """Gate and up in one matrix have their rows in an order that follows the tensor-parallel ranks."""
    (p,) = parameters(SHAPES[:1])
    rows, columns = (torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in p.shape)
    other = torch.nn.Parameter(p.detach()[rows][:, columns])
    both = spectron([p, other], lr=0.1)
    for step in range(3):
        set_gradients([p], step)
        other.grad = p.grad[rows][:, columns]
        both.step()
    assert_close(other, p.detach().double()[rows][:, columns], 1e-6)


def test_the_projection_is_reported_and_is_the_closest(caplog):
    params = parameters()
    expected = []
    for p in params:
        S = torch.linalg.svdvals(p.detach().double())
        expected.append((S[4:].norm() / S.norm()).item())
    closest = [reference_steps(p, [], lr=0.0) for p in params]
    optimizer = spectron([(f"layer.{i}.weight", p) for i, p in enumerate(params)], lr=1e-9)
    assert optimizer.projection_errors == {}
    run(optimizer, params, [0])
    assert list(optimizer.projection_errors) == ["layer.0.weight", "layer.1.weight", "layer.2.weight"]
    assert list(optimizer.projection_errors.values()) == pytest.approx(expected, rel=1e-5)
    for p, of_p in zip(params, closest, strict=True):
        assert_close(p, of_p, 1e-6)
    assert "Spectron projects 3 weights to their rank, which changes them by" in caplog.text
    run(optimizer, params, [1])
    assert caplog.text.count("projects") == 1


def test_steps_with_a_rate_of_zero_before_the_first_change_nothing():
    params, straight = parameters(), parameters()
    before = [p.detach().clone() for p in params]
    optimizer = spectron(params, lr=0.0, weight_decay=0.5)
    run(optimizer, params, range(3))
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert not optimizer.projection_errors
    # what torch's checkpoints load into: they ask for it by a step with a rate of zero
    assert all(optimizer.state[p].keys() == {x.key for x in optimizer.state_tensors(p)} for p in params)
    optimizer.param_groups[0]["lr"] = 0.05
    run(optimizer, params, range(3, 6))
    run(spectron(straight, lr=0.05, weight_decay=0.5), straight, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, straight, strict=True))


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_later_step_with_a_rate_of_zero_leaves_weight_and_factors_bit_equal(rate):
    params = parameters()
    optimizer = spectron(params, lr=0.05, weight_decay=0.5)
    run(optimizer, params, range(3))
    before = copy.deepcopy([(p, optimizer.state[p]) for p in params])
    optimizer.param_groups[0]["lr"] = rate
    run(optimizer, params, range(3, 5))
    for p, (old, state) in zip(params, before, strict=True):
        assert torch.equal(p, old)
        for key in ("factor_A", "factor_B"):
            assert torch.equal(optimizer.state[p][key], state[key])
        assert not torch.equal(optimizer.state[p]["momentum_buffer_A"], state["momentum_buffer_A"])


@pytest.mark.parametrize("transposed", [False, True])
def test_pairs_of_factors_follow_the_formulas(transposed):
    A, B = parameters([(24, 4), (16, 4)])
    first = A.detach().clone(), B.detach().clone()
    if transposed:
        B = torch.nn.Parameter(B.detach().T.contiguous())
    optimizer = Spectron([factor_pairs([(A, B)], lr=0.05, weight_decay=0.1)], fp32_matmul_prec="highest")
    of_A, of_B = gradients_of(optimizer, [A, B], range(20))
    gradients = zip(of_A, (g.T if transposed else g for g in of_B), strict=True)
    of_steps = [lambda A, B, both=both: (g.double() for g in both) for both in gradients]
    expected = factor_steps(first, of_steps, lr=0.05, wd=0.1)
    assert_close(A, expected[0], 1e-6)
    assert_close(B.T if transposed else B, expected[1], 1e-6)
    assert set(optimizer.state[A]) == {"momentum_buffer", "u"}
    assert optimizer.state[B]["momentum_buffer"].shape == B.shape


def test_pairs_in_bf16_follow_the_formulas_as_far_as_they_can():
    factors = parameters([(24, 4), (16, 4)], dtype=torch.bfloat16)
    first = [p.detach().double() for p in factors]
    optimizer = Spectron([factor_pairs([factors], lr=2.0, weight_decay=0.0)])
    of_steps = zip(*gradients_of(optimizer, factors, range(20)), strict=True)
    gradients = [lambda A, B, both=both: (g.double() for g in both) for both in of_steps]
    expected = factor_steps(first, gradients, lr=2.0, wd=0.0)
    for p, before, wanted in zip(factors, first, expected, strict=True):
        assert_close_in_bf16(p.detach(), before, wanted, roundings=20)
        assert {x.dtype for x in optimizer.state[p].values()} == {torch.float32}


def test_settings_of_torch_are_left_as_they_are():
    params = parameters()
    torch.manual_seed(3)
    seen = torch.random.get_rng_state(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    run(spectron(params, fp32_matmul_prec="medium"), params, [0])
    assert torch.equal(torch.random.get_rng_state(), seen[0])
    assert (torch.get_float32_matmul_precision(), torch.is_grad_enabled()) == seen[1:]


class Lists(TorchFunctionMode):
    """Counts lists that are read on the host, where no operation tells of it."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.Tensor.tolist
        return function(*args, **(kwargs or {}))


def host_reads(optimizer, accepted):
    """How many values a step reads on the host, beside the check of gradients, which reads on a CPU alone."""
    optimizer.prepare()
    with Lists() as lists, Operations() as operations, torch.no_grad():
        optimizer._take(torch.ones(accepted, dtype=torch.bool))
    return lists.count + operations.counts[HOST_READ]


def test_only_the_steps_that_project_read_values_on_the_host():
    params = parameters()
    A, B = parameters([(24, 4), (16, 4)])
    optimizer = spectron([{"params": params}, factor_pairs([(A, B)])], lr=0.05)
    counts = []
    for step in range(3):
        set_gradients([*params, A, B], step)
        counts.append(host_reads(optimizer, 5))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


def test_the_step_that_projects_reads_as_often_for_many_matrices_as_for_one():
    counts = []
    for count in (1, 5):
        params = parameters([(24, 16), (10, 40)] * count)
        optimizer = spectron(params, lr=0.05)
        set_gradients(params, 0)
        counts.append(host_reads(optimizer, 2 * count))
        assert len(optimizer.projection_errors) == 2 * count
    assert counts == [2, 2]
