"""Modifiers of Muon's step, on one rank, against their formulas written out in fp64."""

import io
import itertools

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.optimizers.hyperball import MuonHyperball
from tests.optimizers.field import assert_close, factor, gradient, matrix, run

LR, DECAY, BETA = 0.05, 0.3, 0.8
NORMS = [{}, {"weight_norm": "hold"}, {"weight_norm": "brake", "brake_outward": 0.3, "brake_inward": 0.8}]
SIZES = [{}, {"relative_update": "match", "update_ratio": 0.7}, {"max_update_rms": 0.3}, {"max_update_rms": 3.0}]
COMBINED = [
    (cautious, norm, size)
    for cautious, norm, size in itertools.product([{}, {"cautious_weight_decay": True}], NORMS, SIZES)
    if "hold" not in norm.values() or not (cautious or size)
]


def stepped(w, u, lr, decay, radius, settings):
    """One step of a weight, from its update before the rate; nothing of the package is used."""
    if settings.get("weight_norm") == "hold":
        w = w - lr * radius * u / u.norm()
        return radius * w / w.norm()
    kept = (u * w >= 0).to(w.dtype) if settings.get("cautious_weight_decay") else 1.0
    w = w - lr * decay * kept * w
    ratio = settings.get("update_ratio", 1.0) * w.norm() / u.norm()
    u = u * (ratio if "relative_update" in settings else 1.0)
    u = u * min(1.0, settings.get("max_update_rms", torch.inf) / u.square().mean().sqrt())
    new = w - lr * u
    if settings.get("weight_norm") == "brake":
        change = new.norm() - w.norm()
        part = settings["brake_outward"] if change > 0 else settings["brake_inward"]
        new = new * (w.norm() + part * change) / new.norm()
    return new


def reference(p, gradients, scale, settings, lr=LR, decay=DECAY):
    w, m = p.detach().double().clone(), 0.0
    radius = w.norm()
    for g in gradients:
        m = BETA * m + (1 - BETA) * g.double()
        w = stepped(w, scale * factor(BETA * m + (1 - BETA) * g.double()), lr, decay, radius, settings)
    return w


def trained(settings, steps=range(12), dtype=torch.float64, shape=(9, 6), optimizer=TensorParallelMuon):
    p = matrix(*shape, dtype=dtype)
    decay = {} if settings.get("weight_norm") == "hold" else {"weight_decay": DECAY}
    opt = optimizer([p], LR, BETA, **{"weight_decay": 0.0, **decay}, fp32_matmul_prec="highest", **settings)
    run(opt, p, steps)
    return opt, p


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)], ids=str)
@pytest.mark.parametrize("modifiers", COMBINED, ids=str)
def test_steps_follow_the_formulas(modifiers, shape):
    settings = {key: value for each in modifiers for key, value in each.items()}
    _, p = trained(settings, shape=shape)
    gradients = [gradient(p, step) for step in range(12)]
    # the norm grows in some of these steps and shrinks in others, and signs differ in some entries
    expected = reference(matrix(*shape, dtype=torch.float64), gradients, 9**0.5, settings)
    assert_close(p.detach(), expected, 1e-9)
    if settings and settings.get("max_update_rms") != 3.0:  # which no update of RMS 1 exceeds
        _, plain = trained({})
        assert shape != (9, 6) or not torch.equal(plain, p)


@pytest.mark.parametrize("method", ["decoupled", "independent", "palm"])
def test_cautious_decay_takes_the_methods_that_there_are(method):
    settings = {"cautious_weight_decay": True}
    p = matrix(9, 6, dtype=torch.float64)
    power = {"decoupled": 1.0, "independent": 1 / LR, "palm": LR}[method]
    gradients = [gradient(p, step) for step in range(6)]
    expected = reference(p, gradients, 3.0, settings, decay=DECAY * power)
    opt = TensorParallelMuon(
        [p], LR, BETA, weight_decay=DECAY, weight_decay_method=method, fp32_matmul_prec="highest", **settings
    )
    run(opt, p, range(6))
    assert_close(p.detach(), expected, 1e-9)


def test_cautious_decay_takes_signs_of_entries_however_small():
    p = matrix(9, 6)
    with torch.no_grad():
        p[0] *= 1e-40  # a product with an update of this size would be zero in fp32
    opt = TensorParallelMuon([p], 1e-10, BETA, weight_decay=5e9, extra_scale_factor=1e-39, cautious_weight_decay=True)
    before = p.detach().clone()
    p.grad = gradient(p, 0)
    opt.step()
    update = opt.orthogonalize(p, gradient(p, 0))
    halved = (before.sign() * update.sign() >= 0).float() / 2
    assert 0 < halved.count_nonzero() < halved.numel()
    torch.testing.assert_close(p.detach(), before * (1 - halved))


def test_held_norms_are_those_of_muon_hyperball_bit_for_bit():
    one, p = trained({"weight_norm": "hold"}, dtype=torch.float32)
    other, q = trained({"weight_norm": "hold"}, dtype=torch.float32, optimizer=MuonHyperball)
    assert torch.equal(p, q)
    assert list(one.state[p]) == list(other.state[q]) == ["momentum_buffer", "radius"]


def test_a_state_without_norms_goes_on_with_those_of_the_weights(caplog):
    plain, p = trained({}, range(3))
    held, q = trained({"weight_norm": "hold"}, ())
    q.data.copy_(p.detach())
    held.load_state_dict({**plain.state_dict(), "param_groups": held.state_dict()["param_groups"]})
    run(held, q, range(3, 5))
    assert held.state[q]["radius"].item() == pytest.approx(p.detach().norm().item(), rel=1e-15)
    assert q.detach().norm().item() == pytest.approx(p.detach().norm().item(), rel=1e-12)
    [begun] = [record.getMessage() for record in caplog.records]
    assert begun == "TensorParallelMuon loads a state without radius, which begins anew"
    caplog.clear()
    plain.load_state_dict({**held.state_dict(), "param_groups": plain.state_dict()["param_groups"]})
    assert list(plain.state[p]) == ["momentum_buffer"]
    assert "the state has radius, which no modifier here keeps: dropped" in caplog.text


METHODS = ("adamuon", "normuon", "namo")


@pytest.mark.parametrize("method", METHODS)
def test_a_second_moment_is_that_of_adaptive_muon_bit_for_bit(method):
    one, p = trained({"moment2_method": method, "beta2": 0.9}, range(4), dtype=torch.float32)
    q = matrix(9, 6)
    kind = OPTIMIZERS["adaptive_muon"].cls
    other = kind([q], LR, BETA, weight_decay=DECAY, fp32_matmul_prec="highest", moment2_method=method, beta2=0.9)
    run(other, q, range(4))
    assert torch.equal(p, q)
    assert list(one.state[p]) == list(other.state[q]) == ["momentum_buffer", "moment2_buffer"]
    assert one.predicted_rms(9, 6) == other.predicted_rms(9, 6)


# Settings of a state, each with how it is named where a load takes it in place of the constructor's.
TAKEN = [
    ({"weight_norm": "brake"}, "weight_norm 'none' -> 'brake'"),
    ({"moment2_method": "normuon", "beta2": 0.5}, "beta2 0.95 -> 0.5, moment2_method 'none' -> 'normuon'"),
    ({"scale_mode": "unit_rms_norm"}, "scale_mode 'spectral' -> 'unit_rms_norm'"),
    ({"coefficient_type": [(3.0, -3.2, 1.2)] * 5}, "coefficient_type 'quintic' -> [(3.0, -3.2, 1.2), "),
]


def saved_and_read(opt):
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("settings", "named"), TAKEN, ids=str)
def test_a_load_takes_the_settings_of_the_state_and_names_them(settings, named, caplog):
    first, p = trained(settings, range(2), dtype=torch.float32)
    state = saved_and_read(first)
    again, _ = trained(settings, (), dtype=torch.float32)
    caplog.clear()
    again.load_state_dict(state)
    assert "takes the settings" not in caplog.text
    other, q = trained({}, (), dtype=torch.float32)
    other.load_state_dict(state)
    assert f"TensorParallelMuon takes the settings of the loaded state: {named}" in caplog.text
    q.data.copy_(p.data)
    run(first, p, [3])
    run(other, q, [3])
    assert torch.equal(p, q)


def test_a_load_names_settings_that_it_goes_on_without(caplog):
    first, other = (TensorParallelMuon([matrix(9, 6)], fp32_matmul_prec=each) for each in ("highest", "medium"))
    first.load_state_dict(first.state_dict())
    assert not caplog.text
    other.load_state_dict(first.state_dict())
    assert "a state that was made with fp32_matmul_prec 'highest' and goes on with 'medium'" in caplog.text


def test_cautious_decay_takes_entries_that_have_no_update():
    p = matrix(9, 6, dtype=torch.float64)
    before = p.detach().clone()
    opt = TensorParallelMuon([p], LR, 0.0, weight_decay=DECAY, cautious_weight_decay=True)
    p.grad = gradient(p, 0)
    p.grad[0] = 0
    opt.step()
    torch.testing.assert_close(p.detach()[0], before[0] * (1 - LR * DECAY), rtol=1e-12, atol=0)
