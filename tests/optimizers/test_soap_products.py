"""SOAP's factors by the kernels of symmetric products: right values."""

import pytest
import torch

from megatron_eopt.kernels.products import Blocked
from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import gradients_of, parameters, run
from tests.optimizers.soap_reference import SETTINGS


@pytest.fixture
def seen(monkeypatch):
    """Shapes that the strips of a CPU multiply with themselves."""
    shapes, gram = [], Blocked.gram
    monkeypatch.setattr(Blocked, "gram", lambda self, x, out=None: shapes.append(tuple(x.shape)) or gram(self, x, out))
    return shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(520, 24), (7, 513)])
def test_factors_are_the_averages_of_products_by_the_kernel(dtype, shape, seen):
    params = parameters([shape], dtype)
    optimizer = SOAP(params, symmetric_products="blocked", **SETTINGS)
    (gradients,) = gradients_of(optimizer, params, range(3))
    assert seen == [(1, *shape), (1, *shape[::-1])] * 3
    beta, state = SETTINGS["shampoo_beta"], optimizer.state[params[0]]
    weights = torch.tensor([beta**2, beta, 1.0], dtype=torch.float64) / (1 + beta + beta**2)
    for key, each in (("L", gradients), ("R", [g.mT for g in gradients])):
        expected = sum(w * (g.double() @ g.double().mT) for w, g in zip(weights, each, strict=True))
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype] * expected.abs().max().item()
        torch.testing.assert_close(state[key].double(), expected, rtol=0, atol=tolerance)


def test_a_kernel_that_cannot_serve_is_refused():
    (p,) = parameters([(6, 4)])
    if torch.cuda.is_available():
        return
    optimizer, before = SOAP([p], symmetric_products="triton"), p.detach().clone()
    with pytest.raises(ValueError, match="the kernel 'triton' of symmetric products cannot serve: "):
        run(optimizer, [p], [0])
    assert torch.equal(p, before)
    assert not optimizer.state
