"""Modifiers of Muon's step, on one rank, against their formulas written out in fp64."""

import copy
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
SIZES = [{}, {"relative_update": "match", "update_ratio": 0.7}, {"relative_update": "bound", "update_ratio": 0.7}]
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
    u = u * {"match": ratio, "bound": min(1.0, ratio)}.get(settings.get("relative_update"), 1.0)
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
    if settings:
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


def test_groups_have_their_own():
    modifiers = [{}, {"weight_norm": "hold", "weight_decay": 0.0}, {"cautious_weight_decay": True}]
    modifiers += [{"weight_norm": "brake", "brake_inward": 0.2}, {"relative_update": "match"}]
    together = [matrix(9, 6, dtype=torch.float64) for _ in modifiers]
    groups = [{"params": [p], **settings} for p, settings in zip(together, modifiers, strict=True)]
    several = TensorParallelMuon(groups, LR, BETA, weight_decay=DECAY)
    alone = [matrix(9, 6, dtype=torch.float64) for _ in modifiers]
    single = [
        TensorParallelMuon([p], LR, BETA, **{"weight_decay": DECAY, **settings})
        for p, settings in zip(alone, modifiers, strict=True)
    ]
    for step in range(4):
        for p in together + alone:
            p.grad = gradient(p, step)
        for opt in (several, *single):
            opt.step()
    assert all(map(torch.equal, together, alone))
    assert not any(torch.equal(p, q) for p, q in itertools.combinations(together, 2))
    assert [list(several.state[p]) for p in together].count(["momentum_buffer", "radius"]) == 1
    assert several.settings()["of_groups"][3] == {"weight_norm": "brake", "brake_inward": 0.2}


@pytest.mark.parametrize("name", ["adaptive_muon", "mars_muon", "scion", "polargrad"])
def test_relatives_take_them(name):
    p, q = (matrix(9, 6, dtype=torch.float64) for _ in range(2))
    build = OPTIMIZERS[name].cls
    plain, braked = build([p], lr=LR), build([q], lr=LR, weight_norm="brake", brake_outward=0.0, brake_inward=0.0)
    decayed = plain._rates_of(plain.param_groups[0])[1] * LR
    for step in range(3):
        before = q.detach().norm() * (1 - decayed)
        for opt, x in ((plain, p), (braked, q)):
            x.grad = gradient(x, step)
            opt.step()
        assert q.detach().norm().item() == pytest.approx(before.item(), rel=1e-12)
    assert abs(p.detach().norm() - q.detach().norm()) > 1e-6


@pytest.mark.parametrize("norm", ["hold", "brake"])
def test_a_resume_is_bit_for_bit(norm):
    settings = {"weight_norm": norm} | ({} if norm == "hold" else {"cautious_weight_decay": True})
    opt, p = trained(settings, range(3))
    state, weight = copy.deepcopy(opt.state_dict()), p.detach().clone()
    run(opt, p, range(3, 6))
    other, q = trained(settings, ())
    q.data.copy_(weight)
    other.load_state_dict(state)
    run(other, q, range(3, 6))
    assert torch.equal(p, q)


def test_a_state_without_norms_goes_on_with_those_of_the_weights_and_one_with_them_is_told(caplog):
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


def test_settings_of_groups_stay_where_a_state_lacks_them():
    plain, _ = trained({}, range(2))
    p = matrix(9, 6, dtype=torch.float64)
    held = TensorParallelMuon([{"params": [p], "weight_norm": "brake"}], LR, BETA)
    held.load_state_dict(plain.state_dict())
    assert held.param_groups[0]["weight_norm"] == "brake"


@pytest.mark.parametrize("settings", [{"weight_norm": "brake"}, {"cautious_weight_decay": True}], ids=str)
def test_what_does_not_step_stays_bit_for_bit(settings):
    opt, p = trained(settings, range(2))
    before = p.detach().clone()
    p.grad = torch.full_like(p, torch.nan)
    opt.step()
    assert torch.equal(p, before)
    opt.param_groups[0]["lr"] = 0.0
    run(opt, p, range(2))
    assert torch.equal(p, before)


def test_a_norm_that_becomes_held_is_that_of_the_next_step():
    opt, p = trained({}, range(2))
    norm = p.detach().norm().item()
    opt.param_groups[0].update(weight_norm="hold", weight_decay=0.0)
    run(opt, p, range(2, 4))
    assert p.detach().norm().item() == pytest.approx(norm, rel=1e-12)


REFUSED = {
    "unknown norm": (
        {"weight_norm": "keep"},
        "unknown weight_norm 'keep': expected one of none, hold, brake",
    ),
    "unknown size": (
        {"relative_update": "clip"},
        "unknown relative_update 'clip': expected one of none, match, bound",
    ),
    "part above 1": ({"weight_norm": "brake", "brake_outward": 1.5}, r"brake_outward must lie in \[0, 1\], got 1.5"),
    "ratio of 0": (
        {"relative_update": "bound", "update_ratio": 0},
        "update_ratio must be .* above 0, got 0",
    ),
    "ratio alone": ({"update_ratio": 2.0}, "update_ratio has no effect with relative_update 'none', got 2.0"),
    "part alone": ({"weight_norm": "hold", "brake_inward": 0.5}, "brake_inward has no effect with weight_norm 'hold'"),
    "two sizes": (
        {"weight_norm": "hold", "relative_update": "match"},
        "relative_update, align_rms and cautious_weight_decay have no effect",
    ),
    "no decay": ({"weight_norm": "hold", "cautious_weight_decay": True}, "which has no weight decay"),
    "l2": (
        {"cautious_weight_decay": True, "weight_decay_method": "l2", "use_decoupled_weight_decay": False},
        "cautious_weight_decay compares signs of weights and updates, of which l2 decay is a part",
    ),
    "decay": (
        {"weight_norm": "hold", "weight_decay": 0.1},
        "'hold' has no weight decay, got 0.1: it keeps",
    ),
    "scale": (
        {"relative_update": "match", "scale_mode": "spectral"},
        "by relative_update 'match'; set lr, take",
    ),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelMuon([{"params": [matrix()], "weight_decay": 0.0, **settings}])
    if "scale_mode" not in settings:
        with pytest.raises(ValueError, match=message):
            TensorParallelMuon([matrix()], **settings)


def test_a_flag_is_a_bool():
    with pytest.raises(TypeError, match="cautious_weight_decay must be True or False, got 1"):
        TensorParallelMuon([matrix()], cautious_weight_decay=1)
    with pytest.raises(TypeError, match="cautious_weight_decay must be True or False, got 'no'"):
        TensorParallelMuon([{"params": [matrix()], "cautious_weight_decay": "no"}])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("scion", {"weight_norm": "hold"}),
        ("scion", {"cautious_weight_decay": True}),
        ("polargrad", {"relative_update": "match"}),
        ("muon_hyperball", {"weight_norm": "none"}),
    ],
)
def test_relatives_that_decide_themselves_refuse_others(name, settings):
    cls, (key, value) = OPTIMIZERS[name].cls, *settings.items()
    with pytest.raises(ValueError, match=f"{cls.__name__} has no {key} {value!r}, only "):
        cls([matrix()], **settings)
    with pytest.raises(ValueError, match=f"{cls.__name__} has no {key} {value!r}, only "):
        cls([{"params": [matrix()], **settings}])
    assert len(cls.only[key]) > 1 or key not in cls([matrix()]).settings_of_groups()


@pytest.mark.parametrize("settings", [{"weight_norm": "hold", "weight_decay": 0.0}, {"relative_update": "bound"}])
def test_a_weight_that_would_never_move_is_refused_before_anything_changes(settings):
    p, q = matrix(), torch.nn.Parameter(torch.zeros(5, 3))
    opt = TensorParallelMuon([("first", p), ("second", q)], **settings)
    p.grad, q.grad, before = gradient(p, 1), gradient(q, 1), p.detach().clone()
    with pytest.raises(ValueError, match="that of second is 0: initialize it, or give it to another optimizer"):
        opt.step()
    assert torch.equal(p, before)


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


@pytest.mark.parametrize("name", ["muon", "muon_hyperball"])
def test_normuon_on_a_hyperball_is_two_settings(name):
    p = matrix(9, 6, dtype=torch.float64)
    w, m, v, radius = p.detach().clone(), 0.0, 0.0, p.detach().norm()
    for step in range(6):  # in fp64, but for the moment
        g = gradient(p, step)
        m = BETA * m + (1 - BETA) * g
        o = factor(BETA * m + (1 - BETA) * g)
        v = 0.9 * v + 0.1 * o.square().mean(1, keepdim=True)
        w = stepped(w, o / v.sqrt(), LR, 0.0, radius, {"weight_norm": "hold"})
    hold = {"weight_norm": "hold", "weight_decay": 0.0} if name == "muon" else {}
    opt = OPTIMIZERS[name].cls([p], LR, BETA, fp32_matmul_prec="highest", moment2_method="normuon", beta2=0.9, **hold)
    run(opt, p, range(6))
    assert_close(p.detach(), w, 1e-6)
    assert list(opt.state[p]) == ["momentum_buffer", "radius", "moment2_buffer"]


def test_groups_have_second_moments_of_their_own():
    modifiers = [{}, *({"moment2_method": method, "beta2": 0.8} for method in METHODS)]
    modifiers += [{"moment2_method": "normuon", "weight_norm": "brake"}]
    together, alone = ([matrix(9, 6) for _ in modifiers] for _ in range(2))
    groups = [{"params": [p], **settings} for p, settings in zip(together, modifiers, strict=True)]
    opts = [TensorParallelMuon(groups, LR, BETA)]
    opts += [TensorParallelMuon([p], LR, BETA, **settings) for p, settings in zip(alone, modifiers, strict=True)]
    for step in range(3):
        for p in together + alone:
            p.grad = gradient(p, step)
        for opt in opts:
            opt.step()
    assert all(map(torch.equal, together, alone))
    assert not any(torch.equal(p, q) for p, q in itertools.combinations(together, 2))


def test_a_state_without_second_moments_goes_on_with_new_ones():
    plain, p = trained({}, range(3))
    other, q = trained({"moment2_method": "normuon"}, ())
    q.data.copy_(p.detach())
    other.load_state_dict({**plain.state_dict(), "param_groups": other.state_dict()["param_groups"]})
    run(other, q, [3])
    fresh, r = trained({"moment2_method": "normuon"}, ())
    run(fresh, r, [3])
    assert other.state[q]["moment2_buffer"].shape == fresh.state[r]["moment2_buffer"].shape == (9,)
    # (1 - beta2) times means of squares, whose sum is that of squared singular values over the columns
    assert other.state[q]["moment2_buffer"].sum().item() == pytest.approx(0.05 * 6 / 6, rel=0.1)


# Settings of the constructor, each with what it is named by where a load goes on without it.
FORGOTTEN = [
    ({"weight_norm": "brake"}, "weight_norm 'brake' and goes on with 'none'"),
    ({"weight_norm": "hold"}, "weight_norm 'hold' and goes on with 'none'"),
    ({"relative_update": "bound"}, "relative_update 'bound' and goes on with 'none'"),
    ({"cautious_weight_decay": True}, "cautious_weight_decay True and goes on with False"),
    ({"moment2_method": "normuon", "beta2": 0.5}, "moment2_method 'normuon' and goes on with 'none'"),
    ({"num_ns_steps": 3}, "num_ns_steps 3 and goes on with 5"),
    ({"scale_mode": "unit_rms_norm"}, "scale_mode 'unit_rms_norm' and goes on with 'spectral'"),
    ({"coefficient_type": [(3.0, -3.2, 1.2)] * 5}, "coefficient_type [[3.0, -3.2, 1.2], "),
]


def saved_and_read(opt):
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("settings", "named"), FORGOTTEN, ids=str)
def test_a_load_that_forgets_a_setting_of_the_constructor_names_it(settings, named, caplog):
    first, _ = trained(settings, range(2), dtype=torch.float32)
    state = saved_and_read(first)
    again, _ = trained(settings, (), dtype=torch.float32)
    caplog.clear()
    again.load_state_dict(state)
    assert "goes on" not in caplog.text
    without, p = trained({}, ())
    without.load_state_dict(state)
    assert f"TensorParallelMuon loads a state that was made with {named}" in caplog.text
    run(without, p, [3])
    caplog.clear()
    trained({}, ())[0].load_state_dict(saved_and_read(without))  # which has gone on without it
    for group in state["param_groups"]:
        group["state_of"] = "TensorParallelMuon"  # as earlier states have it
    trained({}, ())[0].load_state_dict(state)
    assert "goes on" not in caplog.text


@pytest.mark.parametrize(("settings", "named"), FORGOTTEN[:4], ids=str)
def test_a_group_that_has_the_setting_itself_has_not_forgotten_it(settings, named, caplog):
    state = saved_and_read(trained(settings, range(2))[0])
    decay = {"weight_decay": DECAY if settings.get("weight_norm") != "hold" else 0.0}
    opt = TensorParallelMuon([{"params": [matrix(9, 6)], **settings}], LR, BETA, fp32_matmul_prec="highest", **decay)
    opt.load_state_dict(state)
    assert "goes on" not in caplog.text


@pytest.mark.parametrize(("modifier", "key"), [("hold", "radius"), ("normuon", "moment2_buffer")])
def test_state_of_a_modifier_that_a_load_lacks_begins_anew_and_is_named(modifier, key, caplog):
    settings = {"weight_norm": "hold"} if modifier == "hold" else {"moment2_method": modifier}
    state = saved_and_read(trained({}, range(2))[0])
    for group in state["param_groups"]:
        group["weight_decay"] = 0.0
    trained(settings, ())[0].load_state_dict(state)
    assert f"TensorParallelMuon loads a state without {key}, which begins anew" in caplog.text


@pytest.mark.parametrize("name", ["scion", "polargrad", "mars_muon"])
def test_relatives_have_no_second_moment(name):
    cls = OPTIMIZERS[name].cls
    with pytest.raises(ValueError, match=f"{cls.__name__} has no moment2_method 'normuon', only 'none'"):
        cls([{"params": [matrix()], "moment2_method": "normuon"}])
    assert not {"moment2_method", "beta2", "eps", "align_rms"} & cls([matrix()]).settings_of_groups().keys()
