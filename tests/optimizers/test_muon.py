import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import query_key_value
from megatron_eopt.orthogonalize import muon_scale_factor, newton_schulz
from tests.optimizers.family import build, having
from tests.optimizers.field import drawn, matrix
from tests.parallel.test_layout import Group


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


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_the_update_is_the_scaled_orthogonal_factor(mode):
    p = matrix()
    opt = TensorParallelMuon(
        [p],
        lr=0.1,
        momentum=0.8,
        weight_decay=0.2,
        scale_mode=mode,
        extra_scale_factor=0.2,
        fp32_matmul_prec="highest",
        coefficient_type="polar_express",
        num_ns_steps=8,
    )
    g = drawn((6, 4), 1)
    p.grad = g.clone()
    # the first look-ahead is a positive multiple of the gradient, whose orthogonal factor is U V^T
    u, _, vh = torch.linalg.svd(g.double(), full_matrices=False)
    expected = p.detach().double() * (1 - 0.1 * 0.2) - 0.1 * 0.2 * muon_scale_factor(6, 4, mode) * u @ vh
    opt.step()
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-4, atol=1e-4)


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


def test_a_parameters_own_split_wins():
    p = matrix(8, 4, is_qkv=True, qkv_split_shapes=[2, 1, 1])
    opt = TensorParallelMuon([p], split_qkv=True, is_qkv_fn=is_qkv, qkv_split_shapes=[4, 2, 2])
    assert opt.split_of(p) == query_key_value((2, 1, 1))
    assert TensorParallelMuon([p], split_qkv=True, is_qkv_fn=is_qkv).split_of(p) == query_key_value((2, 1, 1))
    assert TensorParallelMuon([p], is_qkv_fn=is_qkv).split_of(p).is_whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_mode": "duplicate"}, "unknown tp_mode 'duplicate': expected one of blockwise, duplicated, distributed"),
        ({"scale_mode": "spectal"}, "unknown scale_mode 'spectal'"),
        ({"coefficient_type": "quintc"}, "unknown coefficient type 'quintc'"),
        ({"num_ns_steps": 0}, "at least 1, got 0"),
        ({"num_ns_steps": 6}, "cannot be served in 6"),
        ({"coefficient_type": "cubic5", "num_ns_steps": 4}, "exactly 5"),
        ({"fp32_matmul_prec": "hihg"}, "unknown fp32_matmul_prec 'hihg'"),
        ({"split_qkv": True, "qkv_split_shapes": [2, 2, 2]}, "split_qkv needs is_qkv_fn"),
        ({"split_qkv": True, "is_qkv_fn": is_qkv}, "3 or 4 positive integers, got None"),
        ({"split_qkv": True, "is_qkv_fn": is_qkv, "qkv_split_shapes": [1, 1]}, "3 or 4 positive integers, got .1, 1"),
        ({"split_qkv": True, "is_qkv_fn": is_qkv, "qkv_split_shapes": [2, 2, 0]}, "positive integers"),
        (
            {"split_qkv": True, "is_qkv_fn": is_qkv, "qkv_split_shapes": [2, 1, 1]},
            r"shape \(6, 4\) is not what was declared of it: 6 rows .* not a multiple of the 4",
        ),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelMuon([matrix(is_qkv=True)], **settings)


def test_blockwise_cannot_split_a_query_group_that_ends_in_another_shard():
    p = matrix(6, 4, is_qkv=True, tensor_model_parallel=True, partition_dim=0)
    groups = SimpleNamespace(tp=Group(2), expt_tp=Group(1))
    settings = {"split_qkv": True, "is_qkv_fn": is_qkv, "qkv_split_shapes": [2, 1, 1], "pg_collection": groups}
    with pytest.raises(ValueError, match="shards end inside the 4 rows that hold all of its logical matrices"):
        TensorParallelMuon([p], tp_mode="blockwise", **settings)
    TensorParallelMuon([p], tp_mode="distributed", **settings)


def test_fewer_steps_than_were_fitted_together_are_noted(caplog):
    with caplog.at_level(logging.WARNING):
        TensorParallelMuon([matrix()], coefficient_type="polar_express", num_ns_steps=3)
    assert "3 Newton-Schulz steps of polar_express" in caplog.text
    assert "become 0.19 to 1.87 instead of 1" in caplog.text
    caplog.clear()
    TensorParallelMuon([matrix()])
    assert not caplog.records


def test_fewer_steps_that_do_as_well_are_not_noted(caplog):
    # s -> 1.5 s - 0.5 s^3 has its fixed point at 1, and the last of 20 steps change nothing that two digits show
    TensorParallelMuon([matrix()], coefficient_type=[(1.5, -0.5, 0.0)] * 20, num_ns_steps=19)
    assert not caplog.records
    # both ends of the range: from above 1 for s = 0.01 alone
    TensorParallelMuon([matrix()], coefficient_type=[(1.5, -0.5, 0.0)] * 20, num_ns_steps=12)
    low = 0.01
    for _ in range(12):
        low = 1.5 * low - 0.5 * low**3
    assert f"become {low:.2f} to 1.00 instead of 1" in caplog.text
    assert round(low, 2) != 1


def test_a_coefficient_list_of_the_users_own():
    own = [(2.0, -1.5, 0.5)] * 2
    p = matrix()
    update = drawn((6, 4), 1)
    opt = TensorParallelMuon([p], coefficient_type=own, num_ns_steps=10, fp32_matmul_prec="highest")
    expected = muon_scale_factor(6, 4) * newton_schulz(update, 10, own)
    torch.testing.assert_close(opt.orthogonalize(p, update), expected)


@pytest.mark.parametrize("norm", [1e-12, 5e7])
def test_clipping_does_not_change_the_update(norm):
    p = matrix()
    g = drawn((6, 4), 1)
    g /= g.norm()
    opt = TensorParallelMuon([p], fp32_matmul_prec="highest")
    torch.testing.assert_close(opt.orthogonalize(p, g * norm), opt.orthogonalize(p, g), rtol=1e-4, atol=1e-5)


def test_rates_are_rates_or_measured():
    with pytest.raises(ValueError, match="plan_rates are Rates or 'measure', got 'fast'"):
        TensorParallelMuon([matrix()], plan_rates="fast")


def test_the_plan_can_be_read():
    opt = TensorParallelMuon([("layer.weight", matrix()), ("other.weight", matrix(8, 3))])
    table = opt.explain()
    assert "6 x 4" in table
    assert "local" in table


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
    with pytest.raises(ValueError, match="unknown symmetric_products 'cublas': expected one of triton, blocked, torch"):
        TensorParallelMuon([p], symmetric_products="cublas")


@pytest.mark.parametrize("name", having("workspace"))
def test_the_workspace_is_a_number_of_bytes(name):
    assert build(name, [matrix()]).workspace == 2**31
    assert build(name, [matrix()], workspace=4096).workspace == 4096
    for wrong in (0, -1, 2.5, True, "2GiB", None):
        with pytest.raises(ValueError, match="workspace must be a whole number"):
            build(name, [matrix()], workspace=wrong)


def test_muon_and_its_relatives_have_the_settings_of_how_a_step_is_done():
    relatives = [name for name, row in OPTIMIZERS.items() if issubclass(row.cls, TensorParallelMuon)]
    for setting in ("workspace", "offload_fraction", "momentum_dtype"):
        assert having(setting) == relatives
