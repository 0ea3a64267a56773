"""SinkGD on one rank: its steps against the formula, gradients of any size, and what it refuses."""

import pytest
import torch

from megatron_eopt import SinkGD
from tests.optimizers.field import SHAPES, TOLERANCE, assert_close, gradient, matrix, run


def reference(w, gradients, lr, weight_decay=0.01, iterations=5):
    """SR-Sinkhorn of arXiv 2502.06742 in fp64, then decoupled weight decay."""
    w = w.detach().double().clone()
    m, n = w.shape
    for x in gradients:
        x = x.double()
        for _ in range(iterations):
            x = n**0.5 * torch.diag(1 / x.norm(dim=1)) @ x
            x = m**0.5 * x @ torch.diag(1 / x.norm(dim=0))
        w = (1 - lr * weight_decay) * w - lr * x
    return w


@pytest.mark.parametrize("settings", [{}, {"iterations": 1, "weight_decay": 0.5}, {"iterations": 9}], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_are_the_formula(shape, dtype, settings):
    p = matrix(*shape, dtype=dtype)
    expected = reference(p, [gradient(p, step) for step in range(20)], 0.01, **settings)
    run(SinkGD([p], lr=0.01, **settings), p, range(20))
    assert_close(p.detach(), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("size", [1e-36, 1e-30, 1.0, 1e14])
def test_neither_the_size_of_gradients_nor_zeros_matter(size):
    p = matrix(12, 8)
    before = p.detach().clone()
    p.grad = gradient(p, 0) * size
    p.grad[3] = p.grad[:, 5] = 0
    expected = p.grad.double()[[i for i in range(12) if i != 3]][:, [j for j in range(8) if j != 5]]
    expected = reference(torch.zeros_like(expected), [expected * (11 * 7 / (12 * 8)) ** 0.5], 1.0)
    given = p.grad.clone()
    optimizer = SinkGD([p], lr=1.0, weight_decay=0.0)
    optimizer.step()
    update = before - p.detach()
    assert not update[3].any()
    assert not update[:, 5].any()
    kept = update[[i for i in range(12) if i != 3]][:, [j for j in range(8) if j != 5]]
    assert_close(kept, -expected * (12 / 11) ** 0.5)
    assert torch.equal(p.grad, given)
    assert not optimizer.state[p]
