"""The momentum warms up: against the formula of the published recipe, by steps that are counted in checkpoints."""

import copy

import pytest
import torch
from torch import nn

from megatron_eopt import MarsMuon, PolarGrad, TensorParallelAdaptiveMuon, TensorParallelMuon
from tests.optimizers.field import drawn

WARMUP, STEPS = 4, 7


def made(cls=TensorParallelMuon, momentum=0.95, nesterov=False, **settings):
    parameter = nn.Parameter(drawn((12, 8), 100, torch.float64))
    return parameter, cls([parameter], lr=0.1, momentum=momentum, nesterov=nesterov, **settings)


def stepped(parameter, optimizer, steps):
    for number in steps:
        parameter.grad = drawn((12, 8), number, torch.float64)
        optimizer.step()


def betas(momentum):
    """Keller Jordan's: it grows by equal parts from 0.85, which the first step has."""
    return [0.85 + min(step / WARMUP, 1) * (momentum - 0.85) for step in range(STEPS)]


@pytest.mark.parametrize("momentum", [0.95, 0.9])
def test_momenta_are_those_of_the_formula(momentum):
    parameter, optimizer = made(momentum=momentum, momentum_warmup=WARMUP)
    expected = torch.zeros(12, 8, dtype=torch.float64)
    for number, beta in enumerate(betas(momentum)):
        stepped(parameter, optimizer, [number])
        expected = beta * expected + (1 - beta) * drawn((12, 8), number, torch.float64)
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], expected, rtol=1e-12, atol=1e-12)
    assert optimizer.param_groups[0]["momentum"] == momentum


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon, MarsMuon, PolarGrad])
def test_a_step_is_that_with_the_momentum_of_its_time(cls):
    """With the look-ahead, which has it too."""
    warming = made(cls, nesterov=True, momentum_warmup=WARMUP)
    by_hand = made(cls, nesterov=True)
    for number, beta in enumerate(betas(0.95)):
        stepped(*warming, [number])
        by_hand[1].param_groups[0]["momentum"] = beta
        stepped(*by_hand, [number])
        torch.testing.assert_close(warming[0], by_hand[0], rtol=1e-12, atol=1e-12)


def test_a_state_that_was_saved_without_goes_on_without():
    straight, again = made(), made(momentum_warmup=WARMUP)
    stepped(*straight, range(2))
    again[0].data.copy_(straight[0])
    again[1].load_state_dict(copy.deepcopy(straight[1].state_dict()))
    for run in (straight, again):
        stepped(*run, range(2, STEPS))
    assert torch.equal(again[0], straight[0])


def test_a_momentum_that_is_smaller_stays():
    low, without = made(momentum=0.8, momentum_warmup=WARMUP), made(momentum=0.8)
    for run in (low, without):
        stepped(*run, range(STEPS))
    assert torch.equal(low[0], without[0])
