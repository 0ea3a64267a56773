"""Parameters with given values and gradients."""

import torch
from torch import nn


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
