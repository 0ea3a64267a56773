"""Norms that are held: of MuonHyperball, and of Muon, SOAP and Shampoo with weight_norm "hold"."""

import pytest
import torch

from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from tests.optimizers.family import build
from tests.optimizers.field import gradient, matrix, run


def test_the_norm_does_not_drift():
    # rounding is off by 2^-8 / sqrt(7) of an entry (see field.py), so of the norm of 84 normally distributed ones by
    # sqrt(3 / 84) of that; a norm found anew in every step would take all these errors along
    p = matrix(12, 7, dtype=torch.bfloat16)
    start = p.detach().double().norm()
    opt = MuonHyperball([p], lr=0.05)
    for step in range(200):
        run(opt, p, [step])
        assert abs(p.detach().double().norm() / start - 1) <= 5 * 2**-8 * (3 / 7 / 84) ** 0.5


def test_without_an_update_a_matrix_stays_as_it_is():
    p = matrix()
    opt = MuonHyperball([p], lr=0.5)
    for stretch in (1.0, 1.25):  # on its sphere, and off it
        p.data.mul_(stretch)
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        opt.step()
        assert torch.equal(p, before)
    assert opt.state[p]["radius"] == pytest.approx(matrix().detach().double().norm().item(), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_to_the_center_is_left_out(dtype):
    p = torch.nn.Parameter(torch.eye(3, 2, dtype=dtype))
    opt = MuonHyperball([p], lr=1.0, momentum=0.0)
    p.grad = torch.eye(3, 2, dtype=dtype)
    opt.step()
    assert torch.equal(p, torch.eye(3, 2, dtype=dtype))


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("name", "settings", "does"),
    [
        ("muon_hyperball", {}, "keeps the norm that a matrix starts with"),
        ("muon held", {}, "keeps the norm that a matrix starts with"),
        ("soap held", {}, "keeps the norm that a matrix starts with"),
        ("muon", {"relative_update": "match"}, "sizes updates by norms"),
    ],
)
def test_a_weight_that_would_never_move_is_refused(name, settings, does, value):
    p, q = matrix(), torch.nn.Parameter(torch.full((5, 3), value))
    opt = build(name, [("first", p), ("second", q)], **settings)
    p.grad, q.grad, before = gradient(p, 1), gradient(q, 1), p.detach().clone()
    with pytest.raises(ValueError, match=rf"{does}, and that of second is {value:g}: initialize it, or give it to"):
        opt.step()
    assert torch.equal(p, before)
    q.data.fill_(1.0)
    for _ in range(2):
        opt.step()
    assert not torch.equal(p, before)


def test_a_norm_that_becomes_held_is_that_of_the_next_step():
    p = matrix(9, 6, dtype=torch.float64)
    opt = TensorParallelMuon([p], lr=0.05)
    run(opt, p, range(2))
    norm = p.detach().norm().item()
    opt.param_groups[0].update(weight_norm="hold", weight_decay=0.0)
    run(opt, p, range(2, 4))
    assert p.detach().norm().item() == pytest.approx(norm, rel=1e-12)
