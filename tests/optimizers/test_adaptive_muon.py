"""AdaMuon, NorMuon and NAMO: what they keep, refuse and promise; their steps are in test_adaptive_steps.py."""

import copy
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon, registry
from megatron_eopt.orthogonalize import muon_scale_factor
from tests.matrices.models import merge_rows, split_rows
from tests.optimizers.field import assert_close, gradient, matrix, run
from tests.optimizers.test_muon import is_qkv
from tests.test_registry import config, model

METHODS = ("adamuon", "normuon", "namo")
VARIANTS = [("adamuon", True), ("adamuon", False), ("normuon", True), ("namo", True)]


def optimizer(params, method, **settings):
    defaults = {"lr": 0.1, "fp32_matmul_prec": "highest"}
    return TensorParallelAdaptiveMuon(params, moment2_method=method, **{**defaults, **settings})


@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_the_parts_of_a_fused_projection_are_matrices_of_their_own(method, align):
    shapes = (4, 2, 1)
    p = matrix(21, 5, is_qkv=True)
    parts = [torch.nn.Parameter(part.clone()) for part in split_rows(p.detach(), shapes)]
    fused = optimizer([p], method, align_rms=align, split_qkv=True, is_qkv_fn=is_qkv, qkv_split_shapes=shapes)
    alone = optimizer(parts, method, align_rms=align)
    for seed in range(1, 5):
        p.grad = gradient(p, seed)
        for part, g in zip(parts, split_rows(p.grad, shapes), strict=True):
            part.grad = g.clone()
        fused.step()
        alone.step()
    assert_close(p.detach(), merge_rows([part.detach() for part in parts], shapes).double())
    kept, each = fused.state[p], [alone.state[part]["moment2_buffer"] for part in parts]
    if method == "adamuon":
        assert list(kept) == ["momentum_buffer", "moment2_buffer"]
        torch.testing.assert_close(kept["moment2_buffer"], merge_rows(each, shapes), rtol=1e-4, atol=1e-6)
        return
    assert list(kept) == ["momentum_buffer", "moment2_buffer_0", "moment2_buffer_1", "moment2_buffer_2"]
    for index, wanted in enumerate(each):
        torch.testing.assert_close(kept[f"moment2_buffer_{index}"], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale_mode", ["spectral", "shape_scaling"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_the_first_update_has_the_predicted_size(method, align, nesterov, scale_mode):
    p = matrix(60, 24)
    accurate = {"coefficient_type": "polar_express", "num_ns_steps": 8}
    sizes = {"scale_mode": scale_mode, "extra_scale_factor": 0.2, "momentum": 0.9, "nesterov": nesterov}
    opt = optimizer([p], method, lr=1.0, weight_decay=0, align_rms=align, beta2=0.96, **sizes, **accurate)
    before = p.detach().clone()
    run(opt, p, [1])
    rms = (p.detach() - before).square().mean().sqrt().item()
    assert rms == pytest.approx(opt.predicted_rms(60, 24), rel=2e-3)
    muon = 0.2 if scale_mode == "spectral" else 0.2 * (60 / 24) ** 0.5 / 60**0.5
    scale = muon * 60**0.5
    first = {
        "normuon": muon,
        "namo": muon * 0.1 * (1.9 if nesterov else 1) / 0.2,
        "adamuon": muon if align else 5 * scale,
    }
    assert opt.predicted_rms(60, 24) == pytest.approx(first[method])


@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_a_zero_gradient_is_a_zero_update(method, align):
    p = matrix()
    opt = optimizer([p], method, align_rms=align, weight_decay=0)
    before = p.detach().clone()
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert torch.equal(p, before)
    assert not opt.state[p]["moment2_buffer"].any()
    run(opt, p, [1])
    assert not torch.equal(p, before)
    assert p.isfinite().all()


def test_a_norm_whose_square_is_beyond_fp32_does_not_stop_namo_for_ever():
    p = matrix()
    opt = optimizer([p], "namo", beta2=0.5, momentum=0.0)
    p.grad = gradient(p, 1) * 1e20
    opt.step()
    assert opt.state[p]["moment2_buffer"].isfinite()
    for _ in range(300):
        run(opt, p, [2])
    assert opt.state[p]["moment2_buffer"] == pytest.approx(gradient(p, 2).square().sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moment2_method": "adamoun"}, "unknown moment2_method 'adamoun': expected one of adamuon, normuon, namo"),
        ({"eps": -1e-8}, "eps must be a finite number above 0, got -1e-08"),
        (
            {"eps": 0.0, "moment2_method": "normuon"},
            "eps must be a finite number above 0, got 0.0",
        ),
        (
            {"moment2_method": "namo", "use_decoupled_weight_decay": False},
            "L2 decay would add to: take use_decoupled_weight_decay=True, or weight_decay=0 instead of 0.01",
        ),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelAdaptiveMuon([matrix()], **settings)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"beta2": 2.0}, "beta2 must lie in"),
        ({"eps": 0.0}, "eps must be a finite number above 0"),
        ({"weight_decay": 0.1}, "L2 decay"),
    ],
)
def test_a_groups_own_settings_are_checked_and_used(group, message):
    settings = {"use_decoupled_weight_decay": False, "weight_decay": 0}
    with pytest.raises(ValueError, match=message):
        optimizer([{"params": [matrix()], **group}], "namo", **settings)
    p, q = matrix(), matrix()
    opt = optimizer([{"params": [p]}, {"params": [q], "beta2": 0.5}], "adamuon", momentum=0.0, align_rms=False)
    p.grad, q.grad = gradient(p, 1), gradient(q, 1)
    opt.step()
    torch.testing.assert_close(opt.state[q]["moment2_buffer"], 10 * opt.state[p]["moment2_buffer"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["between steps", "loaded"])
@pytest.mark.parametrize(("key", "value"), [("beta2", 1.5), ("beta2", -0.1), ("eps", 0.0), ("eps", torch.inf)])
def test_a_changed_setting_out_of_its_range_is_refused_before_anything_changes(method, how, key, value):
    p = matrix()
    opt = optimizer([p], method)
    run(opt, p, range(2))
    before, state, saved = p.detach().clone(), copy.deepcopy(opt.state_dict()), copy.deepcopy(opt.state_dict())
    (opt if how == "between steps" else SimpleNamespace(**saved)).param_groups[0][key] = value
    message = rf"TensorParallelAdaptiveMuon: {key} must .*, got {value}"
    with pytest.raises(ValueError, match=message):
        run(opt, p, [2]) if how == "between steps" else opt.load_state_dict(saved)
    assert torch.equal(p, before)
    for kept, new in zip(state["state"][0].values(), opt.state_dict()["state"][0].values(), strict=True):
        assert torch.equal(kept, new)
    opt.param_groups[0][key] = state["param_groups"][0][key]
    run(opt, p, [2])
    assert not torch.equal(p, before)


@pytest.mark.parametrize("method", METHODS)
def test_the_second_moments_settings_may_be_tensors_of_one_entry(method):
    number, tensor = matrix(), matrix()
    one = {"beta2": 0.9, "eps": 1e-6}
    run(optimizer([number], method, **one), number, range(3))
    run(optimizer([tensor], method, **{key: torch.tensor([x]) for key, x in one.items()}), tensor, range(3))
    torch.testing.assert_close(tensor, number, rtol=1e-5, atol=1e-6)


def test_a_subclass_with_an_orthogonalize_of_its_own_is_refused():
    class Own(TensorParallelAdaptiveMuon):
        def orthogonalize(self, p, grad, **group_settings):
            return grad

    with pytest.raises(TypeError, match=r"Own has an orthogonalize of its own.*all matrices together"):
        Own([matrix()])


@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_a_restored_optimizer_goes_on_bit_for_bit_and_keeps_fp32_statistics(method, align):
    def start(p):
        settings = {"align_rms": align, "split_qkv": True, "is_qkv_fn": is_qkv, "qkv_split_shapes": (2, 1, 1)}
        return optimizer([p], method, lr=0.02, **settings)

    def bf16(values):
        p = torch.nn.Parameter(values.detach().bfloat16().clone())
        p.is_qkv = True
        return p

    straight, stopped = bf16(matrix(8, 6)), bf16(matrix(8, 6))
    whole, first = start(straight), start(stopped)
    run(whole, straight, range(1, 7))
    run(first, stopped, range(1, 4))
    resumed = bf16(stopped)
    second = start(resumed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for key, value in first.state[stopped].items():
        assert second.state[resumed][key].dtype == value.dtype
        assert torch.equal(second.state[resumed][key], value), key
        assert (value.dtype == torch.float32) == key.startswith("moment2_buffer")
    run(second, resumed, range(4, 7))
    assert torch.equal(resumed, straight)
    init = start(bf16(matrix(8, 6)))
    init.init_state()
    (template,) = init.state.values()
    assert {k: v.shape for k, v in template.items()} == {k: v.shape for k, v in whole.state[straight].items()}
    other = optimizer([resumed], "namo" if method != "namo" else "normuon")
    with pytest.raises(ValueError, match=r"moment2_buffer.* (of another|expected)"):
        other.load_state_dict(first.state_dict())


def test_a_config_gives_the_settings_of_muon_and_its_own():
    settings = {"adaptive_muon_moment2_method": "normuon", "adaptive_muon_beta2": 0.7, "adaptive_muon_eps": 1e-3}
    p = matrix()
    made, init_state = registry.create_emerging_optimizer(
        config(decoupled_weight_decay=True, **settings), [{"params": [p]}], "adaptive_muon", model(), None
    )
    assert type(made) is TensorParallelAdaptiveMuon
    assert (made.moment2_method, made.align_rms, made.scale_mode) == ("normuon", True, "unit_rms_norm")
    assert {key: made.param_groups[0][key] for key in ("momentum", "beta2", "eps")} == {
        "momentum": 0.8,
        "beta2": 0.7,
        "eps": 1e-3,
    }
    assert made.settings() | {"moment2_method": "normuon", "align_rms": True} == made.settings()
    init_state(made)
    assert list(made.state[p]) == ["momentum_buffer", "moment2_buffer"]
    assert registry._adaptive_muon_config_to_kwargs is registry.adaptive_muon_config_to_kwargs


def test_one_matrix_alone_is_its_orthogonal_factor():
    p = matrix()
    update = gradient(p, 1)
    scale = muon_scale_factor(*p.shape)
    muon = TensorParallelMuon([matrix()], fp32_matmul_prec="highest")
    torch.testing.assert_close(
        scale * optimizer([p], "namo").orthogonalize(p, update),
        muon.orthogonalize(muon.param_groups[0]["params"][0], update),
    )
