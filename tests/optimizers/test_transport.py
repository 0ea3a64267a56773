"""What Scion, PolarGrad and MuonHyperball have in common on one rank: splits, resumes, skipped steps and refusals."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.registry import kwargs_from_config
from megatron_eopt.settings.records import SECOND_MOMENT, names_of
from tests.matrices.models import merge_rows, split_rows
from tests.optimizers.field import assert_close, gradient, matrix, run

KINDS = [Scion, PolarGrad, MuonHyperball]
QKV = {"split_qkv": True, "is_qkv_fn": lambda p: getattr(p, "is_qkv", False)}

pytestmark = pytest.mark.parametrize("kind", KINDS)


def test_the_parts_of_a_fused_projection_are_matrices_of_their_own(kind):
    shapes = (4, 2, 1)
    # in fp64, since the iteration multiplies the rounding of small singular values
    p = matrix(21, 5, dtype=torch.float64, is_qkv=True)
    parts = [torch.nn.Parameter(part.clone()) for part in split_rows(p.detach(), shapes)]
    fused, alone = kind([p], lr=0.05, qkv_split_shapes=shapes, **QKV), kind(parts, lr=0.05)
    whole = matrix(21, 5, dtype=torch.float64)
    for seed in range(4):
        p.grad = gradient(p, seed)
        for part, g in zip(parts, split_rows(p.grad, shapes), strict=True):
            part.grad = g.clone()
        fused.step()
        alone.step()
    assert_close(p.detach(), merge_rows([part.detach() for part in parts], shapes), 1e-12)
    run(kind([whole], lr=0.05), whole, range(4))
    assert (p - whole).abs().max() > 1e-3
    if kind is MuonHyperball:
        assert list(fused.state[p]) == ["momentum_buffer", "radius_0", "radius_1", "radius_2"]


def test_groups_may_have_an_iteration_of_their_own_but_no_scale_settings(kind):
    p, q = matrix(), matrix()
    opt = kind([{"params": [p]}, {"params": [q], "num_ns_steps": 10}], lr=0.05)
    alone = matrix()
    p.grad, q.grad = gradient(p, 0), gradient(q, 0)
    opt.step()
    run(kind([alone], lr=0.05, num_ns_steps=10), alone, [0])
    assert torch.equal(q, alone)
    assert not torch.equal(p, q)
    for key, value in (("scale_mode", "spectral"), ("extra_scale_factor", 0.2)):
        message = rf"{key} has no effect here, got {value!r}: the size of an update is"
        with pytest.raises(ValueError, match=message):
            kind([{"params": [matrix()], key: value}])
    assert not {"scale_mode", "extra_scale_factor"} & opt.settings().keys()
    assert opt.settings()["of_groups"][1]["num_ns_steps"] == 10


def test_the_signature_names_all_arguments_for_help_and_for_configs(kind):
    of_muon = inspect.signature(TensorParallelMuon).parameters
    own = inspect.signature(kind).parameters
    shared = own.keys() - {"lr", "momentum", "nesterov", "weight_decay", "weight_decay_method", "radius", "constrained"}
    no_place = {"nesterov", "use_decoupled_weight_decay", "scale_mode", "extra_scale_factor", "lr", "momentum"}
    no_place |= set() if kind is MuonHyperball else set(names_of(SECOND_MOMENT))
    assert shared == of_muon.keys() - no_place - {"weight_decay", "weight_decay_method"}
    fixed = kind.only
    defaults = {name: fixed.get(name, (of_muon[name].default,))[0] for name in shared - {"params"}}
    assert {name: own[name].default for name in defaults} == defaults
    config = SimpleNamespace(muon_momentum=0.7, muon_num_ns_steps=10, muon_tp_mode="auto", muon_scale_mode="spectral")
    kwargs = kwargs_from_config(kind, "muon", config)
    assert kwargs == {"momentum": 0.7, "num_ns_steps": 10, "tp_mode": "auto"}
    opt = kind([matrix()], **kwargs)
    assert (opt.newton_schulz.steps, opt.tp_mode, opt.param_groups[0]["momentum"]) == (10, "auto", 0.7)


def test_arguments_that_have_no_place_are_refused_though_muon_may_know_them(kind):
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_steps'"):
        kind([matrix()], num_steps=3)
    with pytest.raises(ValueError, match="scale_mode has no effect here, got 'shape_scaling'"):
        kind([matrix()], scale_mode="shape_scaling")
