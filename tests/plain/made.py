"""Parameters with given values and gradients, and the steps that Muon and AdamW make of them."""

import torch
from torch import nn

from megatron_eopt import Muon

SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5


def parameters(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def gradients(params, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params] for _ in range(steps)]


def run(optimizer, params, per_step):
    for of_step in per_step:
        for p, g in zip(params, of_step, strict=True):
            p.grad = g.clone()
        optimizer.step()


def newton_schulz(x, coefficients):
    """The quintic iteration, of the wide form of a matrix."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm()
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def of_steps(value, gradients):
    """A setting of each step: a list of them, or one for all."""
    return value if isinstance(value, list) else [value] * len(gradients)


def muon_reference(p, gradients, lr, momentum, weight_decay=0.0, coefficients=SIMPLE, nesterov=False):
    """Heavy ball, scale max(1, rows / columns)^0.5, decoupled decay; more dimensions are rows x the rest."""
    m = torch.zeros_like(p).flatten(1)
    for g, rate, beta in zip(gradients, of_steps(lr, gradients), of_steps(momentum, gradients), strict=True):
        m = beta * m + g.flatten(1)
        u = g.flatten(1) + beta * m if nesterov else m
        p = p * (1 - rate * weight_decay)
        p = p - rate * max(1, m.shape[0] / m.shape[1]) ** 0.5 * newton_schulz(u, coefficients).view_as(p)
    return p


def adamw_reference(p, gradients, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01):
    m = v = torch.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, of_steps(lr, gradients), strict=True), 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        p = p * (1 - rate * weight_decay)
        p = p - rate * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p


def muon(*shapes, steps=0, **settings):
    """Muon of one matrix, beside which AdamW has the other parameters, after steps; and all parameters."""
    params = parameters(*shapes)
    optimizer = Muon(params[:1], params[1:], **settings)
    run(optimizer, params, gradients(params, steps))
    return optimizer, params


def values(params):
    return [p.detach().clone() for p in params]


def assert_same(a, b):
    """Nested dicts, lists and tensors are equal bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for each, other in zip(a, b, strict=True):
            assert_same(each, other)
    else:
        assert a == b
