"""Muon of plain torch, written against KempnerForge's: its arguments, numbers, rates and groups.

tests/plain/test_muon.py has further settings of it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt import Muon
from tests.plain.made import SIMPLE, gradients, muon_reference, parameters, run

STEPS = 5


def test_defaults_are_the_originals():
    matrix, vector = parameters((4, 4), (4,))
    group, of_adamw = Muon([matrix], [vector]).param_groups
    assert group.items() >= {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_steps": 5}.items()
    assert of_adamw.items() >= {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}.items()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0.0, 0.99), min_size=STEPS, max_size=STEPS), st.integers(1, 9))
def test_a_schedule_of_momentum_is_that_of_a_heavy_ball(betas, ns_steps):
    p, *_ = params = parameters((12, 7), (4,))
    start, steps = p.detach().clone(), gradients(params, STEPS)
    optimizer = Muon([p], params[1:], ns_steps=ns_steps)
    momentum = torch.zeros_like(start)
    for of_step, beta in zip(steps, betas, strict=True):
        optimizer.param_groups[0]["momentum"] = beta
        run(optimizer, params, [of_step])
        momentum = beta * momentum + of_step[0]
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], momentum, rtol=0, atol=1e-6)
    expected = muon_reference(start, [g for g, _ in steps], 0.02, betas, 0.0, SIMPLE[:1] * ns_steps)
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-6)


def test_all_groups_are_in_param_groups_and_state():
    long, embedding, vector = params = parameters((40, 2), (90, 3), (4,))
    optimizer = Muon([long], [embedding, vector])
    run(optimizer, params, gradients(params, 1))
    assert [group["params"] for group in optimizer.param_groups] == [[long], [embedding, vector]]
    inner = [*optimizer.matrices.param_groups, *optimizer.adamw.param_groups]
    assert all(group is its for group, its in zip(optimizer.param_groups, inner, strict=True))
    assert list(optimizer.state) == params
    with pytest.raises(ValueError, match=r"has shape \(4,\): give it to another optimizer"):
        Muon([long, vector], [])
    for rest in ([], [{"params": [], "weight_decay": 0.0}]):
        assert Muon([long], rest).adamw is None
