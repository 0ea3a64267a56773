import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt import TensorParallelMuon
from megatron_eopt.orthogonalize import muon_scale_factor, newton_schulz
from tests.optimizers.field import drawn, matrix


def is_qkv(p):
    return getattr(p, "is_qkv", False)


def test_defaults_are_those_that_scripts_are_written_against():
    opt = TensorParallelMuon([matrix()])
    group = {key: value for key, value in opt.param_groups[0].items() if key != "params"}
    assert group == {
        "lr": 3e-4,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.01,
        "use_decoupled_weight_decay": True,
        "weight_decay_method": None,
        "state_of": "TensorParallelMuon",
    }
    assert (opt.use_nesterov, opt.use_decoupled_weight_decay, opt.split_qkv) == (True, True, False)
    assert (opt.newton_schulz.steps, opt.newton_schulz.coefficient_type) == (5, "quintic")
    assert (opt.newton_schulz.fp32_matmul_prec, opt.tp_mode) == ("medium", "duplicated")
    assert (opt.scale_mode, opt.extra_scale_factor) == ("spectral", 1.0)


@given(shapes=st.lists(st.integers(1, 4), min_size=3, max_size=4), groups=st.integers(1, 3), cols=st.integers(1, 6))
def test_a_split_update_is_the_updates_of_its_matrices(shapes, groups, cols):
    # in fp64, since five quintic steps multiply the rounding of a small singular value by up to 3.4445^5
    rows = groups * sum(shapes)
    p = matrix(rows, cols, is_qkv=True)
    p.data = p.double()
    opt = TensorParallelMuon([p], split_qkv=True, is_qkv_fn=is_qkv, qkv_split_shapes=shapes, fp32_matmul_prec="highest")
    update = drawn((rows, cols), 1, torch.float64)
    result = opt.orthogonalize(p, update).view(groups, sum(shapes), cols)
    parts, results = (
        [part.reshape(-1, cols) for part in x.split(shapes, dim=1)]
        for x in (update.view(groups, sum(shapes), cols), result)
    )
    for part, found in zip(parts, results, strict=True):
        expected = muon_scale_factor(*part.shape) * newton_schulz(part)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm", [1e-12, 5e7])
def test_clipping_does_not_change_the_update(norm):
    p = matrix()
    g = drawn((6, 4), 1)
    g /= g.norm()
    opt = TensorParallelMuon([p], fp32_matmul_prec="highest")
    torch.testing.assert_close(opt.orthogonalize(p, g * norm), opt.orthogonalize(p, g), rtol=1e-4, atol=1e-5)


def test_a_resumed_run_computes_symmetric_products_as_before():
    p = matrix(64, 512)
    opt = TensorParallelMuon([p])
    p.grad = torch.ones_like(p) + torch.eye(64, 512)
    opt.step()
    state = opt.state_dict()
    assert state["param_groups"][0]["symmetric_products"] == "torch"
    state["param_groups"][0]["symmetric_products"] = "triton"
    opt.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"'triton' of symmetric products cannot serve.*the kernel of the"):
        opt.step()
    other = TensorParallelMuon([p], symmetric_products="torch")
    other.load_state_dict(state)
    other.step()
    assert other.param_groups[0]["symmetric_products"] == "torch"
