"""What Scion, PolarGrad and MuonHyperball have in common on one rank: splits, resumes, skipped steps and refusals."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.optimizers.cuda_graph import GraphedUpdate
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.registry import kwargs_from_config
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


def test_a_step_that_is_left_out_leaves_the_parameter_and_its_state_as_they_are(kind):
    p, q = matrix(), matrix(seed=1)
    opt = kind([p, q], lr=0.05)
    for seed in (1, 2):
        p.grad, q.grad = gradient(p, seed), gradient(q, seed)
        opt.step()
    before, other = p.detach().clone(), q.detach().clone()
    state = {key: value.clone() for key, value in opt.state[p].items()}
    for bad in (torch.nan, torch.inf, None):
        q.grad, p.grad = gradient(q, 3), None if bad is None else gradient(p, 3)
        if bad is not None:
            p.grad[1, 2] = bad
        opt.step()
    assert torch.equal(p, before)
    assert all(torch.equal(opt.state[p][key], value) for key, value in state.items())
    assert not torch.equal(q, other)
    assert opt.skipped_steps() == {"parameter 0 of group 0, of shape (6, 4)": 2}


def test_a_captured_step_is_that_of_every_step(kind):
    plain, captured = ([matrix(), matrix(5, 7, 1)] for _ in range(2))
    one, other = (kind(params, lr=0.05, fp32_matmul_prec="highest") for params in (plain, captured))
    other.cuda_graphs = True
    other._session.plans.graphed = GraphedUpdate(other._run, lambda run: run)
    for step in range(4):
        for params, opt in ((plain, one), (captured, other)):
            opt.param_groups[0]["lr"] = 0.05 / (step + 1)
            for p in params:
                p.grad = gradient(p, step)
            opt.step()
    for p, q in zip(plain, captured, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


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
        message = rf"{kind.__name__}: group 0: {key} has no effect here, got {value!r}: the size of an update is"
        with pytest.raises(ValueError, match=message):
            kind([{"params": [matrix()], key: value}])
    assert not {"scale_mode", "extra_scale_factor"} & opt.settings().keys()
    assert opt.settings()["of_groups"][1]["num_ns_steps"] == 10


def test_the_signature_names_all_arguments_for_help_and_for_configs(kind):
    of_muon = inspect.signature(TensorParallelMuon).parameters
    own = inspect.signature(kind).parameters
    shared = own.keys() - {"lr", "momentum", "nesterov", "weight_decay", "weight_decay_method", "radius", "constrained"}
    no_place = {"nesterov", "use_decoupled_weight_decay", "scale_mode", "extra_scale_factor", "lr", "momentum"}
    assert shared == of_muon.keys() - no_place - {"weight_decay", "weight_decay_method"}
    assert all(own[name].default == of_muon[name].default for name in shared - {"params"})
    config = SimpleNamespace(muon_momentum=0.7, muon_num_ns_steps=10, muon_tp_mode="auto", muon_scale_mode="spectral")
    kwargs = kwargs_from_config(kind, "muon", config)
    assert kwargs == {"momentum": 0.7, "num_ns_steps": 10, "tp_mode": "auto"}
    opt = kind([matrix()], **kwargs)
    assert (opt.newton_schulz.steps, opt.tp_mode, opt.param_groups[0]["momentum"]) == (10, "auto", 0.7)


@pytest.mark.parametrize(
    "argument", [{"num_steps": 3}, {"scale_mode": "spectral"}, {"use_decoupled_weight_decay": False}]
)
def test_arguments_that_have_no_place_are_refused_though_muon_may_know_them(kind, argument):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(argument))}'"):
        kind([matrix()], **argument)
