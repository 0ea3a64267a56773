"""What Muon's relatives promise beyond their formulas: sizes, bounds, rates of zero, and what users may override."""

import copy
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import (
    MarsMuon,
    MuonHyperball,
    PolarGrad,
    Scion,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
    registry,
)
from megatron_eopt.optimizers.mars_muon import corrected
from megatron_eopt.registry import kwargs_from_config
from tests.optimizers.family import VARIANTS, build, matrices
from tests.optimizers.field import SHAPES, assert_close, gradient, matrix, run
from tests.optimizers.test_muon_steps import muon, reference
from tests.test_registry import config, model

EXACT = {"coefficient_type": "polar_express", "num_ns_steps": 8, "fp32_matmul_prec": "highest"}


@pytest.mark.parametrize(
    ("cls", "settings", "size"),
    [
        (TensorParallelMuon, {}, 1.0),
        (TensorParallelAdaptiveMuon, {"moment2_method": "normuon"}, 1.0),
        (TensorParallelAdaptiveMuon, {"moment2_method": "namo"}, 0.1 * 1.9 / 0.2),
        (TensorParallelAdaptiveMuon, {"moment2_method": "namo", "nesterov": False}, 0.1 / 0.2),
        (TensorParallelAdaptiveMuon, {"moment2_method": "adamuon"}, 1.0),
        (TensorParallelAdaptiveMuon, {"moment2_method": "adamuon", "align_rms": False}, 5 * 60**0.5),
        (Scion, {"constrained": False, "radius": 7.0}, 7.0 * (60 / 24) ** 0.5 / 60**0.5),
        (PolarGrad, {}, None),
        (MuonHyperball, {}, None),
    ],
    ids=str,
)
def test_the_first_update_has_the_predicted_size(cls, settings, size):
    p = matrix(60, 24)
    of_moments = {"beta2": 0.96} if "moment2_method" in settings else {}
    opt = cls([p], lr=1.0, momentum=0.9, weight_decay=0.0, **EXACT, **settings, **of_moments)
    before = p.detach().clone()
    run(opt, p, [1])
    predicted = opt.predicted_rms(60, 24, opt.param_groups[0])
    if size is None:
        size = before.norm() / (60 * 24) ** 0.5 if cls is MuonHyperball else None
        assert predicted is None or predicted == pytest.approx(float(size), rel=0.1)
        return
    assert predicted == pytest.approx(size)
    assert (p.detach() - before).square().mean().sqrt().item() == pytest.approx(size, rel=2e-3)


@pytest.mark.parametrize(
    "name", ["muon", *(name for name, (row, _) in VARIANTS.items() if "muon" in row), "dion", "scion"]
)
def test_a_zero_gradient_is_a_zero_update_and_the_next_is_a_step(name):
    (p,) = matrices(1)
    settings = {"constrained": False} if name == "scion" else {"weight_decay": 0.0}
    optimizer = build(name, [p], **settings)
    before = p.detach().clone()
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)
    run(optimizer, p, [1])
    assert not torch.equal(p, before)
    assert p.isfinite().all()


def test_an_optimizer_with_second_moments_takes_no_orthogonalize_of_ones_own():
    class Own(TensorParallelAdaptiveMuon):
        def orthogonalize(self, p, grad, **group_settings):
            return grad

    with pytest.raises(TypeError, match=r"Own has an orthogonalize of its own.*all matrices together"):
        Own([matrix()])
    namo, plain = (
        cls([matrix()], fp32_matmul_prec="highest") for cls in (TensorParallelAdaptiveMuon, TensorParallelMuon)
    )
    updates = [opt.orthogonalize(opt.param_groups[0]["params"][0], gradient(matrix(), 1)) for opt in (namo, plain)]
    torch.testing.assert_close(6**0.5 * updates[0], updates[1])  # without a scale it is the factor


def test_a_config_gives_adaptive_muon_the_settings_of_muon_and_its_own():
    settings = {"adaptive_muon_moment2_method": "normuon", "adaptive_muon_beta2": 0.7, "adaptive_muon_eps": 1e-3}
    given = config(decoupled_weight_decay=True, **settings)
    made, init_state = registry.create_emerging_optimizer(
        given, [{"params": [matrix()]}], "adaptive_muon", model(), None
    )
    assert type(made) is TensorParallelAdaptiveMuon
    group = made.param_groups[0]
    assert (group["moment2_method"], group["align_rms"], group["scale_mode"]) == ("normuon", True, "unit_rms_norm")
    assert [group[key] for key in ("momentum", "beta2", "eps")] == [0.8, 0.7, 1e-3]
    init_state(made)
    assert [list(state) for state in made.state.values()] == [["momentum_buffer", "moment2_buffer"]]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matrices_of_a_constrained_scion_come_into_the_ball_and_stay_there(shape):
    rows, cols = shape
    p = matrix(*shape, dtype=torch.float64)
    opt = Scion([p], lr=0.2, radius=0.5, coefficient_type="polar_express", num_ns_steps=8)

    def norm():
        return torch.linalg.matrix_norm(p.detach(), 2) * (cols / rows) ** 0.5

    start = norm()
    assert start > 1
    for step in range(40):
        run(opt, p, [step])
        assert norm() <= 0.5 + 0.8 ** (step + 1) * (start - 0.5) + 1e-3
    assert norm() > 0.05


def test_a_changed_radius_of_a_group_is_in_force_in_the_next_step():
    p, changed = matrix(), matrix()
    settings = {"lr": 0.01, "fp32_matmul_prec": "highest"}
    opt = Scion([{"params": [p], "radius": 2.0}, {"params": [matrix(5, 7)]}], radius=5.0, **settings)
    run(opt, p, [0])
    opt.param_groups[0]["radius"] = 4.0
    changed.data.copy_(p.data)
    again = Scion([changed], radius=4.0, momentum=0.0, **settings)
    opt.param_groups[0]["momentum"] = 0.0
    run(again, changed, [1])
    run(opt, p, [1])
    assert torch.equal(p, changed)


def test_scions_rates_above_one_are_for_unconstrained_steps():
    p = matrix()
    before = p.detach().clone()
    run(Scion([p], lr=2.0, radius=0.5, constrained=False, **EXACT), p, [0])
    size = 2.0 * 0.5 * (6 / 4) ** 0.5
    torch.testing.assert_close(torch.linalg.svdvals(before - p.detach()), torch.full((4,), size), rtol=1e-3, atol=0)


def test_an_update_of_polar_grad_is_as_large_as_the_nuclear_norm_and_as_the_gradients():
    p, q = matrix(12, 7), matrix(12, 7)
    before = p.detach().clone()
    run(PolarGrad([p], lr=1.0, momentum=0.0, weight_decay=0, **EXACT), p, [1])
    nuclear = torch.linalg.svdvals(gradient(p, 1)).sum()
    torch.testing.assert_close(torch.linalg.svdvals(before - p.detach()), nuclear.expand(7), rtol=1e-4, atol=0)
    q.grad = 64 * gradient(p, 1)
    PolarGrad([q], lr=1.0 / 64, momentum=0.0, weight_decay=0, **EXACT).step()
    assert_close(q.detach(), p.detach().double(), 1e-5)


@pytest.mark.parametrize("kind", [Scion, PolarGrad, MuonHyperball])
def test_a_config_gives_relatives_what_they_have(kind):
    given = SimpleNamespace(muon_momentum=0.7, muon_num_ns_steps=10, muon_tp_mode="auto", muon_scale_mode="spectral")
    kwargs = kwargs_from_config(kind, "muon", given)
    assert kwargs == {"momentum": 0.7, "num_ns_steps": 10, "tp_mode": "auto"}
    opt = kind([matrix()], **kwargs)
    assert (opt.param_groups[0]["num_ns_steps"], opt.tp_mode, opt.param_groups[0]["momentum"]) == (10, "auto", 0.7)
    assert not {"scale_mode", "extra_scale_factor"} & opt.param_groups[0].keys()


# MARS.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_correction_of_mars_is_rounded_once_and_none_is_exact(dtype):
    g, last = matrix(dtype=dtype).detach(), matrix(seed=1, dtype=dtype).detach()
    first, later = corrected([g, g], [last, last], [torch.tensor(0.0), torch.tensor(1.0)], 0.475)
    assert torch.equal(first, g)
    exact = g.double() + 0.475 * (g.double() - last.double())
    assert ((later.double() - exact).abs() <= torch.finfo(dtype).eps * (exact.abs() + g.abs() + last.abs())).all()
    assert torch.equal(g, matrix(dtype=dtype))  # which stays as it is, as does what it is compared with
    assert torch.equal(last, matrix(seed=1, dtype=dtype))


def small(p, steps, opt):
    """Steps with gradients that are not clipped."""
    for step in steps:
        p.grad = gradient(p, step) * 0.01
        opt.step()


@pytest.mark.parametrize(("settings", "steps"), [({}, 1), ({"gamma": 0.0}, 5), ({"momentum": 0.0}, 5)])
def test_mars_without_a_correction_or_clipping_is_muon_bit_for_bit(settings, steps):
    p, q = matrix(), matrix()
    of_muon = {key: value for key, value in settings.items() if key != "gamma"}
    small(p, range(steps), MarsMuon([p], 0.02, **settings))
    small(q, range(steps), TensorParallelMuon([q], 0.02, nesterov=False, **of_muon))
    assert torch.equal(p, q)


def test_a_gradient_of_zeros_is_a_previous_gradient_and_none_is_not():
    p, q = matrix(), matrix(seed=1)
    opt = MarsMuon([p, q], 0.05, fp32_matmul_prec="highest")
    zero, own = torch.zeros_like(p), [gradient(p, step) * 0.02 for step in range(2)]
    settings = {"lr": 0.05, "nesterov": False, "gamma": 0.025}
    (expected, _), (of_q, _) = reference(p, [zero, *own], muon, **settings), reference(q, own, muon, **settings)
    for for_p, for_q in zip([zero, *own], [None, *own], strict=True):
        p.grad, q.grad = for_p, for_q
        opt.step()
    assert_close(p.detach(), expected, 1e-5)
    assert_close(q.detach(), of_q, 1e-5)


# Rates of zero: torch.distributed.checkpoint makes state by such steps, before the weights are loaded.


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("cls", [MarsMuon, MuonHyperball])
def test_steps_with_a_rate_of_zero_leave_no_trace_before_the_first_and_change_momenta_later(cls, rate):
    p, q = matrix(), matrix(seed=9)
    optimizer = cls([p], lr=rate)
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, matrix())
    if cls is MarsMuon:
        assert not any(x.any() for x in optimizer.state[p].values())  # a gradient of theirs is no previous one
    if cls is MuonHyperball:  # whose norms begin in the first step, whatever its rate
        optimizer.state.clear()
        optimizer.load_state_dict(cls([matrix()], lr=rate).state_dict())
    p.data.copy_(q)
    optimizer.param_groups[0]["lr"] = 0.05
    straight = cls([q], lr=0.05)
    run(optimizer, p, range(2))
    run(straight, q, range(2))
    assert torch.equal(p, q)
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    optimizer.param_groups[0]["lr"] = rate
    run(optimizer, p, [2])
    assert torch.equal(p, before)
    changed = {key for key, x in state.items() if not torch.equal(optimizer.state[p][key], x)}
    assert changed == {"momentum_buffer", *(["previous_gradient"] if cls is MarsMuon else [])}


def test_a_group_without_alignment_leaves_others_aligned():
    def first_updates(*groups):
        parameters = [torch.nn.Parameter(torch.zeros(6, 4)) for _ in groups]
        optimizer = TensorParallelAdaptiveMuon(
            [{"params": [p], **group} for p, group in zip(parameters, groups, strict=True)], lr=1.0, weight_decay=0.0
        )
        for p in parameters:
            p.grad = gradient(p, 0)
        optimizer.step()
        return [p.detach() for p in parameters]

    aligned, free = {"align_rms": True}, {"align_rms": False}
    [alone] = first_updates(aligned)
    assert torch.equal(first_updates(aligned, free)[0], alone)
