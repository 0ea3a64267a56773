"""Signum against its formula written out, and against Lion with one beta."""

import copy

import emerging_optimizers.scalar_optimizers as oracle
import pytest
import torch

from megatron_eopt.optimizers.lion import Signum
from tests.optimizers.several import gradients_of, parameters, run, set_gradients
from tests.optimizers.test_lion import METHODS


def reference(p, gradients, lr, momentum, weight_decay):
    """Algorithm 1 of arXiv 1802.04434 in fp64, with decoupled decay; what is kept is rounded to the dtype of ``p``."""
    kept = p.dtype
    p, m = p.detach().double().clone(), torch.zeros_like(p, dtype=torch.float64)
    for g in gradients:
        m = (momentum * m + (1 - momentum) * g.double()).to(kept).double()
        p = (p - lr * weight_decay * p).to(kept).double()
        p = (p - lr * m.sign()).to(kept).double()
    return p.to(kept), m.to(kept)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    # near a tie of bf16 the reference rounds to another neighbour than we do, which is a fifth of a step at most
    [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 2**-7, 2e-3)],
)
def test_twenty_steps_follow_the_formula(dtype, rtol, atol):
    settings = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    params = parameters(dtype=dtype)
    before, opt = copy.deepcopy(params), Signum(params, **settings)
    gradients = gradients_of(opt, params, range(20))
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected, momentum = reference(first, seen, **settings)
        torch.testing.assert_close(p.detach(), expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(opt.state[p]["exp_avg"], momentum, rtol=rtol, atol=atol)
        assert list(opt.state[p]) == ["exp_avg"]


@pytest.mark.parametrize("method", METHODS)
def test_equals_lion_of_emerging_optimizers_with_one_beta(method):
    decay = {"weight_decay": 0.1, "weight_decay_method": method}
    ours, theirs = parameters(), parameters()
    run(Signum(ours, lr=0.01, momentum=0.8, **decay), ours, range(20))
    with torch.compiler.set_stance("force_eager"):  # theirs is compiled, which takes longer than the steps
        run(oracle.Lion(theirs, lr=0.01, betas=(0.8, 0.8), **decay), theirs, range(20))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_without_momentum_it_is_sign_sgd():
    params = parameters()
    before = copy.deepcopy(params)
    run(Signum(params, lr=0.5, momentum=0.0), params, [3])
    for p, first in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), first.detach() - 0.5 * p.grad.sign())


def test_the_defaults_and_the_settings_of_groups():
    p, q = parameters([(6, 4), (5,)])
    opt = Signum([{"params": [p]}, {"params": [q], "momentum": 0.5, "lr": 0.1}])
    groups = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    same = {"weight_decay": 0.0, "weight_decay_method": "decoupled", "maximize": False, "state_of": "Signum"}
    assert groups == [{"lr": 1e-4, "momentum": 0.9, **same}, {"lr": 0.1, "momentum": 0.5, **same}]
    run(opt, [p, q], [0])
    torch.testing.assert_close(opt.state[p]["exp_avg"], 0.1 * p.grad)
    torch.testing.assert_close(opt.state[q]["exp_avg"], 0.5 * q.grad)


def test_betas_that_a_group_brings_from_another_optimizer_are_not_read():
    params, others = parameters(), parameters()
    for own, group in ((params, {}), (others, {"betas": (0.1, 0.2)})):
        optimizer = Signum([{"params": own, **group}], momentum=0.9)
        for step in range(3):
            set_gradients(own, step)
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, others, strict=True))
