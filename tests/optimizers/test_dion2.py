"""Dion2 on one rank: its formula written out, and refusals."""

from math import ceil

import pytest
import torch

from megatron_eopt.optimizers.dion2 import Dion2
from tests.optimizers.field import SHAPES, assert_close, factor, gradient, matrix, run


def reference(p, gradients, lr, fraction, momentum=0.95, decay=0.01):
    """Dion2 (arXiv 2512.16928) with the size ``sqrt(rows / cols)``, in fp64."""
    w = p.detach().double().clone()
    m = torch.zeros_like(w)
    short = 0 if w.shape[0] <= w.shape[1] else 1
    for g in gradients:
        m = m + g.double()
        selected = m.abs().sum(1 - short).topk(ceil(fraction * m.shape[short])).indices
        part = m.index_select(short, selected)
        w = (1 - lr * decay) * w
        w.index_add_(short, selected, factor(part), alpha=-lr * (w.shape[0] / w.shape[1]) ** 0.5)
        m.index_copy_(short, selected, momentum * part)
    return w, m


@pytest.mark.parametrize("fraction", [0.25, 0.6, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_twenty_steps_are_the_formula(shape, fraction):
    p = matrix(*shape, dtype=torch.float64)
    expected, momentum = reference(p, [gradient(p, step) for step in range(20)], 0.01, fraction)
    opt = Dion2([p], lr=0.01, fraction=fraction)
    run(opt, p, range(20))
    assert_close(p.detach(), expected, 1e-11)
    assert_close(opt.state[p]["momentum_sum"], momentum, 1e-11)


@pytest.mark.parametrize("fraction", [0, 1.5, -0.1])
def test_refuses_a_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match="fraction"):
        Dion2([matrix()], fraction=fraction)
