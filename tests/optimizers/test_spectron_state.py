"""What Spectron keeps: it goes on from it bit for bit, and a step that is left out leaves it."""

import copy
import pickle

import pytest
import torch

from tests.optimizers.several import run
from tests.optimizers.spectrons import SHAPES, parameters, spectron


def made(params):
    return spectron([{"params": params[:1], "rank": 2}, {"params": params[1:]}], lr=0.05, num_power_iterations=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [0, 3])
def test_a_restored_optimizer_goes_on_bit_for_bit(stop, dtype):
    straight, stopped = parameters(dtype=dtype), parameters(dtype=dtype)
    run(made(straight), straight, range(6))
    first = made(stopped)
    first.init_state()
    run(first, stopped, range(stop))
    resumed = copy.deepcopy(stopped)
    second = made(resumed)
    second.init_state()
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    run(second, resumed, range(stop, 6))
    assert all(torch.equal(p, q) for p, q in zip(resumed, straight, strict=True))
    assert len(second.projection_errors) == (0 if stop else 3)


def test_parameters_may_be_replaced_by_copies_before_the_first_step():
    params, straight = parameters(), parameters()
    optimizer = spectron(params, lr=0.05)
    optimizer.init_state()
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = copies = copy.deepcopy(params)
    run(optimizer, copies, range(2))
    run(spectron(straight, lr=0.05), straight, range(2))
    assert all(torch.equal(p, q) for p, q in zip(copies, straight, strict=True))


def test_a_parameter_without_gradient_is_left_as_it_is():
    p, q = parameters(SHAPES[:2])
    optimizer = spectron([p, q])
    before = q.detach().clone()
    run(optimizer, [p], range(2))
    assert torch.equal(q, before)
    run(optimizer, [p, q], range(2))  # projected in its own first step
    assert torch.linalg.matrix_rank(q) == 4
