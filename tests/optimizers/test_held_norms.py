"""Norms that are held: of MuonHyperball, and of Muon, SOAP and Shampoo with weight_norm "hold"."""

import copy

import pytest
import torch

from megatron_eopt.matrices import GATE_UP
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.shampoo import Shampoo
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.parallel import statistics
from megatron_eopt.step import foreach
from megatron_eopt.step.momenta.momentum_stack import Update, subtract
from tests.distributed.test_statistics import allocations
from tests.optimizers.family import build
from tests.optimizers.field import assert_close, drawn, gradient, matrix, run
from tests.optimizers.several import parameters
from tests.optimizers.several import run as run_all


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
def test_a_step_to_the_center_is_left_out_since_it_has_no_direction(dtype):
    p = torch.nn.Parameter(torch.eye(3, 2, dtype=dtype))
    opt = MuonHyperball([p], lr=1.0, momentum=0.0)
    p.grad = torch.eye(3, 2, dtype=dtype)
    opt.step()
    assert torch.equal(p, torch.eye(3, 2, dtype=dtype))


def test_norms_are_those_of_the_first_step_also_of_groups_that_are_added_and_of_a_state_without_steps():
    p, q = matrix(), matrix(seed=1)
    opt = MuonHyperball([p], lr=0.05)
    opt.init_state()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    p.data.mul_(2)  # a checkpoint of the model, say
    run(opt, p, [1])
    opt.add_param_group({"params": [q]})
    p.data.mul_(2)
    run(opt, q, [2])
    assert opt.state[p]["radius"] == pytest.approx(2 * matrix().detach().double().norm().item(), rel=1e-6)
    assert opt.state[q]["radius"] == pytest.approx(matrix(seed=1).detach().double().norm().item(), rel=1e-15)
    without_steps = MuonHyperball([{"params": [matrix()]}, {"params": [matrix(seed=1)]}], lr=0.05)
    without_steps.init_state()
    opt.load_state_dict(without_steps.state_dict())
    before = p.detach().double().norm().item()
    run(opt, p, [3])
    assert opt.state[p]["radius"] == pytest.approx(before, rel=1e-15)


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
def test_a_weight_that_would_never_move_is_refused_before_anything_changes(name, settings, does, value):
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


def subtracted(optimizer, factor):
    chunk = optimizer._chunk_of([0], optimizer._inputs(None))
    subtract({stack: Update([factor], 1.0) for stack in chunk.stacks}, chunk)
    chunk.end()


@torch.no_grad()
def test_a_large_matrix_moves_by_pieces(tmp_path, monkeypatch):
    p, q = matrix(150, 100), matrix(150, 100)
    whole, cut = MuonHyperball([p], lr=0.05), MuonHyperball([q], lr=0.05)
    run(whole, p, [0])
    run(cut, q, [0])
    update = drawn((150, 100), 1)
    subtracted(whole, update)
    monkeypatch.setattr(foreach, "MOST_COPY_BYTES", 2**14)  # of 60,000
    monkeypatch.setattr(statistics, "MOST_WIDE_BYTES", 2**14)
    bytes_of_each, _ = allocations(lambda: subtracted(cut, update), tmp_path / "trace.json")
    assert max(bytes_of_each) <= 2**14
    assert_close(q.detach(), p.detach().double(), 1e-6)


def test_a_norm_that_becomes_held_is_that_of_the_next_step():
    p = matrix(9, 6, dtype=torch.float64)
    opt = TensorParallelMuon([p], lr=0.05)
    run(opt, p, range(2))
    norm = p.detach().norm().item()
    opt.param_groups[0].update(weight_norm="hold", weight_decay=0.0)
    run(opt, p, range(2, 4))
    assert p.detach().norm().item() == pytest.approx(norm, rel=1e-12)


# SOAP's.

KL_SOAP_H = {"lr": 0.018, "betas": (0.95, 0.9), "shampoo_beta": 0.9, "weight_decay": 0.0, "use_kl_shampoo": True}
KL_SOAP_H |= {"precondition_frequency": 1, "correct_bias": False, "weight_norm": "hold"}


def halves(p):
    return p.detach()[:3].norm(), p.detach()[3:].norm()


def test_every_logical_matrix_keeps_its_norm_and_turns_by_the_rate():
    p, q, vector = parameters([(6, 4), (5, 5), (5,)])
    p.logical_matrices = GATE_UP
    before, of_vector = [*halves(p), q.detach().norm()], vector.detach().norm()
    optimizer = SOAP([p, q, vector], **KL_SOAP_H)
    run_all(optimizer, [p, q, vector], range(1))
    for step in range(1, 12):
        old = q.detach().clone()
        run_all(optimizer, [p, q, vector], [step])
        # a step along the sphere is an angle of the rate, and one that also goes inwards a smaller or larger one
        assert (q.detach() - old).norm() / before[2] == pytest.approx(0.018, rel=0.2)
    torch.testing.assert_close(torch.stack([*halves(p), q.detach().norm()]), torch.stack(before), rtol=1e-6, atol=0)
    assert {key for key in optimizer.state[p] if key.startswith("radius")} == {"radius_0", "radius_1"}
    assert abs(vector.detach().norm() - of_vector) > 1e-3
    assert "radius" not in optimizer.state[vector]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("cls", [SOAP, Shampoo, TensorParallelMuon])
def test_a_state_without_norms_begins_them_with_those_of_the_weights(cls, steps):
    """Also in an optimizer that has measured others before."""
    p, q = parameters([(6, 4), (6, 4)])
    without, holding = cls([p], lr=0.05, weight_decay=0.0), cls([q], lr=0.05, weight_decay=0.0, weight_norm="hold")
    run_all(without, [p], range(3))
    run_all(holding, [q], range(steps))
    holding.load_state_dict(without.state_dict())
    holding.param_groups[0]["weight_norm"] = "hold"  # settings of groups are those of the state
    with torch.no_grad():
        q.copy_(p)
    for step in range(3, 6):
        run_all(holding, [q], [step])
    assert q.norm().item() == pytest.approx(p.norm().item(), rel=1e-5)
    assert not torch.equal(q, p)
