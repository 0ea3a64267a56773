"""TensorParallelMuon, as those call it who know the original: positions, names, overrides, copies of parameters."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.matrices import Split
from megatron_eopt.optimizers import MuonHyperball, PolarGrad, Scion
from tests.contracts.made import (
    BETA,
    DECAY,
    LR,
    MUON,
    SHAPES,
    assert_equal,
    assert_near,
    gradients,
    iterated,
    parameters,
    reference,
    run,
    spectral,
)
from tests.distributed.ranks import run_ranks


def test_all_arguments_by_position():
    params, steps = parameters(), gradients()
    args = (LR, BETA, False, DECAY, False, False, None, None, "highest", "polar_express", 8, "spectral", 0.5, None)
    opt = TensorParallelMuon(params, *args, "duplicated")
    expected = reference(
        params, steps, lambda *_: (False, "l2"), lambda u, _: 0.5 * spectral(*u.shape) * iterated(u, 8, "polar_express")
    )
    run(opt, params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("kind", ["decoupled", "l2", "independent", "palm"])
@pytest.mark.parametrize("cls", [PolarGrad, "adamuon"])
def test_kinds_of_weight_decay_of_relatives(kind, cls):
    given = {} if cls == "adamuon" else {"cls": cls}
    if cls == "adamuon":
        given = {"cls": TensorParallelAdaptiveMuon, "moment2_method": "adamuon"}
    by_argument, by_group, decayed = parameters(), parameters(), parameters()
    steps = gradients(steps=1)
    run(MUON.made(by_argument, weight_decay_method=kind, **given), by_argument, steps)
    run(MUON.made([{"params": by_group, "weight_decay_method": kind}], **given), by_group, steps)
    assert_equal(by_argument, by_group)
    # the first step of the same optimizer without decay, from where decay puts the parameter or the gradient
    factor = {"decoupled": LR * DECAY, "independent": DECAY, "palm": LR**2 * DECAY, "l2": 0.0}[kind]
    of_l2 = DECAY if kind == "l2" else 0.0
    steps = [[g + of_l2 * p.detach() for g, p in zip(steps[0], decayed, strict=True)]]
    for p in decayed:
        p.data *= 1 - factor
    run(MUON.made(decayed, **{**given, "weight_decay": 0.0}), decayed, steps)
    assert_near(by_argument, decayed)


def test_namo_refuses_decay_in_the_gradient():
    with pytest.raises(ValueError, match=r"namo compares the norms .* which L2 decay would add to"):
        MUON.made(parameters(), TensorParallelAdaptiveMuon, moment2_method="namo", weight_decay_method="l2")
    opt = MUON.made(parameters(), TensorParallelAdaptiveMuon, moment2_method="namo")
    params, before = opt.param_groups[0]["params"], parameters()
    opt.param_groups[0].update(use_decoupled_weight_decay=False)
    with pytest.raises(ValueError, match="namo compares the norms"):
        run(opt, params, gradients(steps=1))
    assert_equal(params, before)


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_the_positional_order_of_emerging_optimizers_is_refused(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__}: nesterov must be True or False, got 0.1"):
        cls(parameters(), 0.02, 0.95, 0.1)


class Plain(TensorParallelMuon):
    def orthogonalize(self, p, grad):
        return 2 * super().orthogonalize(p, grad)


class All(TensorParallelMuon):
    def orthogonalize(self, p, grad, **group_settings):
        return 2 * super().orthogonalize(p, grad, **group_settings)


class OfACopy(TensorParallelMuon):
    def orthogonalize(self, p, grad, **group_settings):
        wide = p.detach().float().clone()
        vars(wide).update(vars(p))
        return 2 * super().orthogonalize(wide, grad, **group_settings)


class Some(TensorParallelMuon):
    def orthogonalize(self, p, grad, num_ns_steps=5, scale_mode="spectral"):
        return 2 * super().orthogonalize(p, grad, num_ns_steps=num_ns_steps, scale_mode=scale_mode)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kind", ["decoupled", "l2", "palm"])
@pytest.mark.parametrize("cls", [Plain, All, OfACopy, Some])
def test_an_override_of_any_signature_steps(cls, kind, nesterov):
    params, steps = parameters(), gradients()
    params[1].is_qkv = True
    own = {"num_ns_steps": 10, "scale_mode": "unit_rms_norm"}

    def doubled(u, index):
        if index == 0:
            return 2 * spectral(*u.shape) * iterated(u)
        parts = u.split([6, 3, 3]) if index == 1 else [u]
        return torch.cat([2 * (len(x) / x.shape[1]) ** 0.5 * iterated(x, 10) for x in parts])

    expected = reference(params, steps, lambda *_: (nesterov, kind), doubled)
    split = {"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "is_qkv"), "qkv_split_shapes": (6, 3, 3)}
    groups = [{"params": params[:1]}, {"params": params[1:], **own}]
    run(MUON.made(groups, cls, weight_decay_method=kind, nesterov=nesterov, **split), params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("cls", [TensorParallelMuon, PolarGrad, Scion, MuonHyperball])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_failing_override_leaves_no_trace(cls, steps_before):
    class Fails(cls):
        now = False

        def orthogonalize(self, p, grad):
            if self.now and p.shape == SHAPES[2]:
                raise RuntimeError("in the step")
            return super().orthogonalize(p, grad)

    params = parameters()
    given = {"lr": LR, "momentum": BETA, "weight_decay": 0.0 if cls in (Scion, MuonHyperball) else DECAY}
    opt = Fails(params, **given)
    run(opt, params, gradients(steps=steps_before))
    before, state = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict()["state"])
    opt.now = True
    with pytest.raises(RuntimeError, match="in the step"):
        run(opt, params, gradients(steps=1, seed=7))
    assert_equal(params, before)
    after = opt.state_dict()["state"]
    if cls is MuonHyperball and not steps_before:  # it measures its matrices before the first step
        state = {i: {"momentum_buffer": 0 * p, "radius": p.norm()} for i, p in enumerate(before)}
    assert {i: kept.keys() for i, kept in after.items()} == {i: kept.keys() for i, kept in state.items()}
    assert all(torch.equal(value, state[i][key]) for i, kept in after.items() for key, value in kept.items())
    opt.now = False
    run(opt, params, gradients(steps=1, seed=8))
    others = parameters()
    run(cls(others, **given), others, [*gradients(steps=steps_before), *gradients(steps=1, seed=8)])
    assert_near(params, others)


def with_attributes_of(p, x):
    vars(x).update(vars(p))
    return x


def test_orthogonalize_takes_any_tensor_for_the_parameter():
    params = parameters([(12, 4), (6, 10), (2, 6, 4)], dtype=torch.bfloat16)
    params[0].is_qkv = True
    params[2].logical_matrices = Split(stacked=2)
    split = {"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "is_qkv"), "qkv_split_shapes": (2, 1, 1)}
    groups = [{"params": params[:2], "num_ns_steps": 10}, {"params": params[2:]}]
    opt = MUON.made(groups, nesterov=False, weight_decay=0.0, momentum=0.0, **split)
    for p, g in zip(params, gradients([p.shape for p in params], 1)[0], strict=True):
        update, own = g.float(), {"num_ns_steps": 10} if p.ndim == 2 else {}
        direct = opt.orthogonalize(p, update)
        wide = opt.orthogonalize(with_attributes_of(p, p.detach().float()), update, **own)
        clone = opt.orthogonalize(with_attributes_of(p, p.detach().clone()), update, **own)
        torch.testing.assert_close(wide, direct, rtol=1e-5, atol=1e-5)
        assert torch.equal(clone, wide)
        # the step does the same
        q = torch.nn.Parameter(with_attributes_of(p, p.detach().float()))
        with_attributes_of(p, q)
        alone = MUON.made([{"params": [q], **own}], nesterov=False, weight_decay=0.0, momentum=0.0, lr=1.0, **split)
        before = q.detach().clone()
        run(alone, [q], [[update]])
        torch.testing.assert_close(before - q.detach(), wide, rtol=1e-5, atol=1e-5)
    assert opt.newton_schulz_calls == 0


@pytest.mark.parametrize("known", [True, False])
def test_settings_that_orthogonalize_is_given_count(known):
    (p, *_), (g, *_) = parameters(), gradients(steps=1)[0]
    opt = MUON.made([{"params": [p], "num_ns_steps": 10, "extra_scale_factor": 0.5}])
    x = p if known else p.detach().clone()
    expected = spectral(6, 4) * iterated(g, 10 if known else 5) * (0.5 if known else 1.0)
    torch.testing.assert_close(opt.orthogonalize(x, g), expected)
    own = {"num_ns_steps": 8, "coefficient_type": "polar_express", "scale_mode": "unit_rms_norm"}
    expected = (6 / 4) ** 0.5 * iterated(g, 8, "polar_express") * (0.5 if known else 1.0)
    torch.testing.assert_close(opt.orthogonalize(x, g, lr=1.0, **own), expected)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        opt.orthogonalize(x, g, num_ns_steps=0)
    with pytest.raises(ValueError, match=r"grad must have the shape of p, \(6, 4\), got \(4, 6\)"):
        opt.orthogonalize(x, g.mT)
    # and change nothing for the parameters
    torch.testing.assert_close(opt.orthogonalize(p, g), 0.5 * spectral(6, 4) * iterated(g, 10))


def test_orthogonalize_refuses_what_the_constructor_would():
    opt = MUON.made(parameters(), split_qkv=True, is_qkv_fn=lambda p: hasattr(p, "is_qkv"), qkv_split_shapes=(2, 1, 1))
    with pytest.raises(ValueError, match=r"TensorParallelMuon orthogonalizes matrices, but p has shape \(3,\)"):
        opt.orthogonalize(torch.ones(3), torch.ones(3))
    fused = torch.ones(6, 4)
    fused.is_qkv = True
    with pytest.raises(ValueError, match="6 rows over all ranks are not a multiple"):
        opt.orthogonalize(fused, torch.ones(6, 4))


def _on_two_ranks(rank, _):
    groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD)
    (whole, *_), (g, *_) = parameters(), gradients(steps=1)[0]
    p = torch.nn.Parameter(whole.detach().chunk(2)[rank].clone())
    p.tensor_model_parallel, p.partition_dim = True, 0
    opt = MUON.made([p], pg_collection=groups)
    copied = with_attributes_of(p, p.detach().clone())
    update = g.chunk(2)[rank].contiguous()
    return (
        opt.orthogonalize(p, update),
        opt.orthogonalize(copied, update),
        opt.orthogonalize(copied, update, num_ns_steps=10),
    )


def test_a_copy_of_a_shard_lies_as_the_shard_does():
    (g, *_) = gradients(steps=1)[0]
    results = run_ranks(_on_two_ranks, 2)
    for index, steps in enumerate([5, 5, 10]):
        found = torch.cat([of_rank[index] for of_rank in results])
        torch.testing.assert_close(found, spectral(6, 4) * iterated(g, steps))


def test_without_an_override_three_dimensions_are_refused_unless_they_are_declared():
    stack = torch.nn.Parameter(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="or declare a stack of 2 matrices"):
        TensorParallelMuon([stack])
    stack.logical_matrices = Split(stacked=2)
    TensorParallelMuon([stack])


def test_state_that_is_made_before_lets_torchs_checkpoints_read_an_independent_decay():
    model = torch.nn.Linear(4, 6, bias=False)
    before = model.weight.detach().clone()
    opt = MUON.made([model.weight], weight_decay_method="independent")
    opt.init_state()
    assert get_optimizer_state_dict(model, opt)["state"]["weight"]["momentum_buffer"].shape == (6, 4)
    assert torch.equal(model.weight, before)
