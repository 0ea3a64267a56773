"""Spectron as its users write it: dense weights, the paper's form with factors as parameters, public helpers."""

import copy
import inspect

import pytest
import torch
from torch import nn

from megatron_eopt import Spectron, factor_pairs
from megatron_eopt.orthogonalize import power_iteration, rayleigh_quotient
from tests.optimizers.field import assert_close
from tests.optimizers.several import set_gradients
from tests.optimizers.spectrons import factor_steps, parameters, reference_steps


def test_the_defaults_are_those_of_the_contract():
    names = inspect.signature(Spectron).parameters
    assert list(names)[:5] == ["params", "lr", "rank", "momentum_beta", "weight_decay"]
    assert [names[name].default for name in list(names)[1:5]] == [3e-4, 64, 0.9, 0.01]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_step_as_written(dtype):
    params = parameters()
    before, gradients = copy.deepcopy(params), [[] for _ in params]
    optimizer = Spectron(params, 0.02, 4, 0.9, 0.01, fp32_matmul_prec="highest")
    for step in range(3):
        set_gradients(params, step)
        for seen, p in zip(gradients, params, strict=True):
            p.grad = p.grad.to(dtype).to(p.dtype)  # what a backward pass in bf16 leaves
            seen.append(p.grad.clone())
        optimizer.step()
    for p, first, seen in zip(params, before, gradients, strict=True):
        assert_close(p, reference_steps(first, seen, lr=0.02), 1e-6)


def test_a_rate_of_zero_leaves_the_weight_as_it_was():
    params = parameters()
    before = copy.deepcopy(params)
    optimizer = Spectron(params, lr=0.0, rank=4)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


class LowRankLinear(nn.Module):
    """The paper's layer: it holds the factors alone."""

    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.A = nn.Parameter(torch.randn(outputs, rank))
        self.B = nn.Parameter(torch.randn(inputs, rank))

    def forward(self, x):
        return x @ self.B @ self.A.T


def test_a_model_that_holds_the_factors_steps_as_written():
    torch.manual_seed(0)
    layer = LowRankLinear(12, 20, 3)
    before = layer.A.detach().clone(), layer.B.detach().clone()
    optimizer = Spectron(
        [factor_pairs([(layer.A, layer.B)])], lr=0.05, momentum_beta=0.95, weight_decay=0.01, fp32_matmul_prec="highest"
    )
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(8, 12)).square().mean().backward()
        of_step = layer.A.grad.double(), layer.B.grad.double()
        gradients.append(lambda A, B, of_step=of_step: of_step)
        optimizer.step()
    for factor, expected in zip((layer.A, layer.B), factor_steps(before, gradients, 0.05, beta=0.95), strict=True):
        assert_close(factor, expected, 1e-5)


def test_power_iteration_and_rayleigh_quotient_find_the_spectral_norm():
    W = torch.randn(20, 12, generator=torch.Generator().manual_seed(0))
    u, v = power_iteration(W, torch.ones(20) / 20**0.5, steps=100)
    torch.testing.assert_close(rayleigh_quotient(W, u, v), torch.linalg.matrix_norm(W, 2))
