"""Spectron's steps against its formulas, pairs of factors, what it reads on the host, and what it refuses."""

import copy

import pytest
import torch

from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from tests.optimizers.field import assert_close
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


def test_a_pair_steps_together_or_not_at_all():
    A, B, C, D = parameters([(24, 4), (16, 4), (6, 3), (3, 5)])
    optimizer = Spectron([factor_pairs([(("a", A), ("b", B)), (("c", C), ("d", D))])])
    before = [x.detach().clone() for x in (A, B, C, D)]
    set_gradients([A, C, D], 0)
    optimizer.step()
    changed = [not torch.equal(x, old) for x, old in zip((A, B, C, D), before, strict=True)]
    assert changed == [False, False, True, True]


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_weight_that_has_no_factors_is_refused(value):
    p, q = parameters(SHAPES[:2])
    with torch.no_grad():
        q.fill_(value)
    before = p.detach().clone()
    optimizer = spectron([("first", p), ("second", q)])
    with pytest.raises(ValueError, match="cannot take factors from second: a matrix of it is zero"):
        run(optimizer, [p, q], [0])
    assert torch.equal(p, before)
