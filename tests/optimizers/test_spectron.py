"""Spectron's steps against its formulas, pairs of factors, what it reads on the host, and what it refuses."""

import copy
import inspect

import pytest
import torch

from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from tests.optimizers.field import assert_close, assert_close_in_bf16, drawn
from tests.optimizers.several import gradients_of, run, set_gradients
from tests.optimizers.spectrons import SHAPES, factor_steps, parameters, reference_steps, spectron


def test_the_defaults_are_those_of_the_contract():
    names = inspect.signature(Spectron).parameters
    assert list(names)[:5] == ["params", "lr", "rank", "momentum_beta", "weight_decay"]
    assert [names[name].default for name in list(names)[1:5]] == [3e-4, 64, 0.9, 0.01]


def test_a_rate_of_zero_leaves_the_weight_as_it_was():
    params = parameters()
    before = copy.deepcopy(params)
    optimizer = Spectron(params, lr=0.0, rank=4)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


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


def test_a_group_has_an_iteration_of_its_own_and_may_change_it():
    cubic = [(1.5, -0.5, 0.0)]
    params, alone = parameters(), parameters()
    optimizer = spectron(
        [{"params": params[:1], "coefficient_type": cubic, "num_ns_steps": 1}, {"params": params[1:]}], lr=0.05
    )
    run(optimizer, params, range(2))
    optimizer.param_groups[1] |= {"coefficient_type": cubic, "num_ns_steps": 1}
    run(optimizer, params, range(2, 4))
    first = spectron(alone[:1], lr=0.05, coefficient_type=cubic, num_ns_steps=1)
    rest = spectron(alone[1:], lr=0.05)
    for step in range(4):
        if step == 2:
            rest.param_groups[0] |= {"coefficient_type": cubic, "num_ns_steps": 1}
        set_gradients(alone, step)
        first.step()
        rest.step()
    for p, q in zip(params, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_a_pair_steps_together_or_not_at_all():
    A, B, C, D = parameters([(24, 4), (16, 4), (6, 3), (3, 5)])
    optimizer = Spectron([factor_pairs([(("a", A), ("b", B)), (("c", C), ("d", D))])])
    before = [x.detach().clone() for x in (A, B, C, D)]
    set_gradients([A, C, D], 0)
    optimizer.step()
    changed = [not torch.equal(x, old) for x, old in zip((A, B, C, D), before, strict=True)]
    assert changed == [False, False, True, True]


def test_matrices_are_counted():
    whole = torch.nn.Parameter(torch.randn(32, 12))
    settings = {"split_qkv": True, "is_qkv_fn": lambda p: p is whole, "qkv_split_shapes": [8, 4, 4]}
    p, A, B = parameters([(10, 12), (24, 4), (16, 4)])
    optimizer = spectron([{"params": [whole, p]}, factor_pairs([(A, B)])], **settings)
    assert optimizer.matrices_per_step == 6
    run(optimizer, [whole, p, A, B], range(2))
    assert optimizer.newton_schulz_calls == 12
    p.grad = None
    optimizer.step()
    assert optimizer.newton_schulz_calls == 17


def test_a_parameter_without_gradient_is_left_as_it_is():
    p, q = parameters(SHAPES[:2])
    optimizer = spectron([p, q])
    before = q.detach().clone()
    run(optimizer, [p], range(2))
    assert torch.equal(q, before)
    run(optimizer, [p, q], range(2))  # projected in its own first step
    assert torch.linalg.matrix_rank(q) == 4


def test_a_pair_has_two_factors():
    with pytest.raises(ValueError, match="too many values to unpack"):
        factor_pairs([parameters()])


def test_a_state_of_another_rank_is_refused():
    params = parameters()
    optimizer = spectron(params, lr=0.05)
    run(optimizer, params, [0])
    with pytest.raises(ValueError, match="group 0 has rank=3, but its state was made with 4"):
        spectron(params, rank=3).load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["rank"] = 3
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ValueError, match=r"group 0 has rank=3, but its state was made with 4"):
            run(optimizer, params, [1])


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_weight_that_has_no_factors_is_refused_before_anything_changes(value):
    p, q = parameters(SHAPES[:2])
    with torch.no_grad():
        q.fill_(value)
    before = p.detach().clone()
    optimizer = spectron([("first", p), ("second", q)])
    with pytest.raises(ValueError, match="cannot take factors from second: a matrix of it is zero"):
        run(optimizer, [p, q], [0])
    assert torch.equal(p, before)
