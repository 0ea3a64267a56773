"""Optimizers with bases by products, as on a GPU: the steps of LAPACK's, and a resume to the last bit."""

import counting
import pytest
import torch

from megatron_eopt.factors import eigenbases
from megatron_eopt.optimizers import dion
from megatron_eopt.optimizers.dion import Dion
from megatron_eopt.optimizers.shampoo import KLShampoo, Shampoo
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.orthogonalize import bases
from megatron_eopt.orthogonalize.bases import by_products
from tests.optimizers.dions import reference
from tests.optimizers.several import parameters, run, set_gradients

SHAPES = [(12, 9), (9, 12), (10, 10), (10, 10)]
EVERY = {"lr": 0.01, "shampoo_beta": 0.8, "precondition_frequency": 1}
VARIANTS = [
    (SOAP, {"eps": 1e-3}),
    (SOAP, {"eps": 1e-3, "sort_bases": "after"}),
    (SOAP, {"eps": 1e-3, "basis_of": "current"}),
    (Shampoo, {"damping": 1e-2}),
    (KLShampoo, {"damping": 1e-2}),
]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As a GPU makes bases, in panels so small that there are several."""

    def patch():
        monkeypatch.setattr(bases, "PANEL", 4)
        monkeypatch.setattr(eigenbases, "orthonormal_columns", by_products)
        monkeypatch.setattr(dion, "orthonormal_columns", by_products)

    return patch


@pytest.mark.parametrize(("cls", "settings"), VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.float64, 1e-5)])
def test_steps_are_those_of_lapack(cls, settings, dtype, tolerance, on_a_gpu):
    by_lapack = parameters(SHAPES, dtype)
    run(cls(by_lapack, **EVERY, **settings), by_lapack, range(8))
    on_a_gpu()
    params = parameters(SHAPES, dtype)
    before = [p.detach().clone() for p in params]
    run(cls(params, **EVERY, **settings), params, range(8))
    for p, expected, start in zip(params, by_lapack, before, strict=True):
        assert not torch.equal(p, expected)  # these are other bases
        assert (p - expected).norm() < tolerance * (expected - start).norm()


def test_bases_stay_orthonormal_where_gradients_span_little(on_a_gpu):
    on_a_gpu()
    params = parameters([(24, 16)])
    optimizer = SOAP(params, **EVERY)
    for step in range(6):
        set_gradients(params, step)
        for p in params:
            p.grad[::2] = 0
            p.grad[1::2] = p.grad[1:2]
        optimizer.step()
        for key, n in (("Q_L", 24), ("Q_R", 16)):
            Q = optimizer.state[params[0]][key].double()
            torch.testing.assert_close(Q.mT @ Q, torch.eye(n, dtype=torch.float64), rtol=0, atol=3e-6)
    assert params[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dion_takes_its_steps(dtype, on_a_gpu):
    on_a_gpu()
    for start in parameters(SHAPES, dtype):
        p = torch.nn.Parameter(start.detach().clone())
        gradients = []
        optimizer = Dion([p], lr=0.05, rank_fraction=0.7)
        for step in range(10):
            set_gradients([p], step)
            gradients.append(p.grad.clone())
            optimizer.step()
        rank = optimizer.state[p]["Q"].shape[1]
        expected, _, _ = reference(start, gradients, 0.05, rank=rank)
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=tolerance)


def test_a_gpu_makes_no_basis_matrix_by_matrix():
    few, many = (
        counting.launches_of_step("soap", [(256, 128)] * number, precondition_frequency=1).kernels for number in (2, 30)
    )
    assert "linalg_qr" not in few + many
    assert many.total() < 1.2 * few.total()
