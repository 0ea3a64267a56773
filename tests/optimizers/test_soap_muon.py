"""SOAP-Muon: SOAP whose updates are orthogonalized, as modded-nanogpt's third track runs it."""

import pytest
import torch

from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import parameters, set_gradients
from tests.optimizers.soap_reference import polar

SOAP_MUON = {"lr": 0.0375, "betas": (0.95, 0.9), "shampoo_beta": 0.9, "weight_decay": 0.0, "precondition_frequency": 1}
SOAP_MUON |= {"correct_bias": False, "nesterov": True, "orthogonalize": True}


class Authors:
    """The matrices of pull request 321, for one: without its gates and floors, and from the second gradient on."""

    def __init__(self, p, lr, mu, beta):
        self.p, self.lr, self.mu, self.beta, self.started = p.detach().clone(), lr, mu, beta, False

    def step(self, g):
        if not self.started:
            self.F = [(1 - self.beta) * g @ g.T, (1 - self.beta) * g.T @ g]
            self.Q = [torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in self.F]
            self.M, self.V, self.started = torch.zeros_like(g), torch.zeros_like(g), True
            return
        self.M = self.mu * self.M + (1 - self.mu) * g
        ahead = (1 - self.mu) * g + self.mu * self.M
        projected = self.Q[0].T @ ahead @ self.Q[1]
        self.V = self.beta * self.V + (1 - self.beta) * projected**2
        self.p -= self.lr * polar(self.Q[0] @ (projected / (self.V.sqrt() + 1e-8)) @ self.Q[1].T)
        for side, new in enumerate([g @ g.T, g.T @ g]):
            self.F[side] = self.beta * self.F[side] + (1 - self.beta) * new
            order = (self.Q[side].T @ self.F[side] @ self.Q[side]).diag().argsort(descending=True)
            self.V = self.V[order] if side == 0 else self.V[:, order]
            self.Q[side] = torch.linalg.qr(self.F[side] @ self.Q[side][:, order]).Q


@pytest.mark.parametrize("shape", [(5, 5), (6, 6)])
def test_it_takes_the_steps_of_the_record_but_for_gates_and_floors(shape):
    (p,) = parameters([shape], torch.float64)
    theirs, optimizer = Authors(p, 0.0375, 0.95, 0.9), SOAP([p], **SOAP_MUON)
    for step in range(25):
        set_gradients([p], step)
        theirs.step(p.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach(), theirs.p, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "size"), [("shape_scaling", 2.0**0.5), ("spectral", 8.0**0.5), ("unit_rms_norm", 2**0.5)]
)
def test_all_singular_values_of_an_update_are_its_scale(mode, size):
    (p,) = parameters([(8, 4)])
    optimizer = SOAP([p], lr=1.0, weight_decay=0.0, precondition_frequency=1, orthogonalize=True, scale_mode=mode)
    for step in range(6):
        before = p.detach().clone()
        set_gradients([p], step)
        optimizer.step()
    values = torch.linalg.svdvals(before - p.detach())
    torch.testing.assert_close(values, torch.full((4,), size), rtol=0.01, atol=0)


def test_vectors_get_adam_and_a_matrix_without_factor_is_refused():
    vector, other = parameters([(5,)])[0], parameters([(5,)])[0]
    a, b = SOAP([vector], orthogonalize=True), SOAP([other])
    for step in range(4):
        set_gradients([vector], step)
        other.grad = vector.grad.clone()
        a.step()
        b.step()
    assert torch.equal(vector, other)
    with pytest.raises(ValueError, match=r"SOAP with orthogonalize needs a factor of every matrix, and parameter 1"):
        SOAP(parameters([(6, 4), (6, 6)]), orthogonalize=True, max_dim=5)
    SOAP(parameters([(6, 4), (6, 6)]), max_dim=5)
