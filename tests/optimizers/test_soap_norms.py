"""SOAP that holds the norms of its matrices: KL-SOAP-H and what becomes of the norms."""

import pytest
import torch

from megatron_eopt.matrices import GATE_UP
from megatron_eopt.optimizers.shampoo import Shampoo
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from tests.optimizers.several import parameters, run, set_gradients

KL_SOAP_H = {"lr": 0.018, "betas": (0.95, 0.9), "shampoo_beta": 0.9, "weight_decay": 0.0, "use_kl_shampoo": True}
KL_SOAP_H |= {"precondition_frequency": 1, "correct_bias": False, "weight_norm": "hold"}


def halves(p):
    return p.detach()[:3].norm(), p.detach()[3:].norm()


def test_every_logical_matrix_keeps_its_norm_and_turns_by_the_rate():
    p, q, vector = parameters([(6, 4), (5, 5), (5,)])
    p.logical_matrices = GATE_UP
    before, of_vector = [*halves(p), q.detach().norm()], vector.detach().norm()
    optimizer = SOAP([p, q, vector], **KL_SOAP_H)
    run(optimizer, [p, q, vector], range(1))
    for step in range(1, 12):
        old = q.detach().clone()
        run(optimizer, [p, q, vector], [step])
        # a step along the sphere is an angle of the rate, and one that also goes inwards a smaller or larger one
        assert (q.detach() - old).norm() / before[2] == pytest.approx(0.018, rel=0.2)
    torch.testing.assert_close(torch.stack([*halves(p), q.detach().norm()]), torch.stack(before), rtol=1e-6, atol=0)
    assert {key for key in optimizer.state[p] if key.startswith("radius")} == {"radius_0", "radius_1"}
    assert abs(vector.detach().norm() - of_vector) > 1e-3
    assert "radius" not in optimizer.state[vector]


class AuthorsKlSoapH:
    """KL-SOAP-H of modded-nanogpt (pull request 290), for a matrix, with eigenvalues of the factors in their bases."""

    def __init__(self, p, lr, betas, shampoo_beta):
        self.p, self.lr, self.betas, self.beta, self.started = p.detach().double(), lr, betas, shampoo_beta, False

    def step(self, g):
        g = g.double()
        m, n = g.shape
        if not self.started:  # the first gradient makes the bases alone
            self.F = [(1 - self.beta) * g @ g.T / n, (1 - self.beta) * g.T @ g / m]
            self.Q = [torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in self.F]
            self.m, self.v, self.started = torch.zeros_like(g), torch.zeros_like(g), True
            return
        left, right = self.Q
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * g
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * (left.T @ g @ right) ** 2
        update = left @ (left.T @ self.m @ right / (self.v.sqrt() + 1e-8)) @ right.T
        values = [(Q.T @ F @ Q).diag() for F, Q in zip(self.F, self.Q, strict=True)]
        half = [Q * x.clamp(min=1e-6 * x.max()).rsqrt() for x, Q in zip(values, self.Q, strict=True)]
        seen = [g @ half[1], g.T @ half[0]]
        for side, (x, count) in enumerate(zip(seen, (n, m), strict=True)):
            self.F[side] = self.beta * self.F[side] + (1 - self.beta) * x @ x.T / count
            order = (self.Q[side].T @ self.F[side] @ self.Q[side]).diag().argsort(descending=True)
            self.v = self.v[order] if side == 0 else self.v[:, order]
            self.Q[side] = torch.linalg.qr(self.F[side] @ self.Q[side][:, order]).Q
        norm = self.p.norm()
        moved = self.p - self.lr * update * norm / update.norm()
        self.p = moved / moved.norm() * norm


def test_it_is_kl_soap_h_with_exact_eigenvalues():
    (p,) = parameters([(5, 5)], torch.float64)
    theirs = AuthorsKlSoapH(p, 0.018, (0.95, 0.9), 0.9)
    optimizer = SOAP([p], **KL_SOAP_H)
    for step in range(25):
        set_gradients([p], step)
        theirs.step(p.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach(), theirs.p, rtol=1e-7, atol=1e-7)


def test_a_matrix_without_norm_is_refused_before_anything_is_changed():
    (p,), q = parameters([(6, 4)]), torch.nn.Parameter(torch.zeros(4, 4))
    before, optimizer = p.detach().clone(), SOAP([("up", p), ("down", q)], weight_norm="hold")
    with pytest.raises(ValueError, match="keeps the norm that a matrix starts with, and that of down is 0"):
        run(optimizer, [p, q], range(1))
    assert torch.equal(p, before)
    q.data.fill_(1.0)
    run(optimizer, [p, q], range(3))
    assert q.detach().norm() == pytest.approx(4, rel=1e-6)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match=r"SOAP: unknown weight_norm .*hold"):
        SOAP(parameters([(6, 4)]), weight_norm="keep")


def test_rows_that_are_scaled_scale_the_norm_that_is_kept():
    p, q = parameters([(6, 4), (5, 5)])
    optimizer = SOAP([{"params": [p]}, {"params": [q], "weight_norm": "none"}], weight_norm="hold")
    run(optimizer, [p, q], range(3))
    optimizer.scale_rows([p, q], [torch.tensor([2.0] * 3 + [1.0] * 3), torch.full((5,), 0.5)])
    after = p.detach().norm()
    run(optimizer, [p, q], range(3, 6))
    assert p.detach().norm() == pytest.approx(after.item(), rel=1e-6)


def test_a_load_goes_on_at_the_norm_that_was_kept():
    (p,), (q,) = parameters([(6, 4)]), parameters([(6, 4)])
    a, b = SOAP([p], **KL_SOAP_H), SOAP([q], **KL_SOAP_H)
    run(a, [p], range(3))
    q.data.copy_(p.detach() * 1.001)  # as rounding, but more of it
    b.load_state_dict(a.state_dict())
    run(b, [q], range(3, 4))
    assert q.detach().norm() == pytest.approx(a.state[p]["radius"].item(), rel=1e-6)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("cls", [SOAP, Shampoo, TensorParallelMuon])
def test_a_state_without_norms_begins_them_with_those_of_the_weights(cls, steps):
    """Also in an optimizer that has measured others before."""
    p, q = parameters([(6, 4), (6, 4)])
    without, holding = cls([p], lr=0.05, weight_decay=0.0), cls([q], lr=0.05, weight_decay=0.0, weight_norm="hold")
    run(without, [p], range(3))
    run(holding, [q], range(steps))
    holding.load_state_dict(without.state_dict())
    holding.param_groups[0]["weight_norm"] = "hold"  # settings of groups are those of the state
    with torch.no_grad():
        q.copy_(p)
    for step in range(3, 6):
        run(holding, [q], [step])
    assert q.norm().item() == pytest.approx(p.norm().item(), rel=1e-5)
    assert not torch.equal(q, p)
