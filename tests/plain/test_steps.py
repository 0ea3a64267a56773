"""AdamW of build_optimizer and Muon of plain torch take the steps of formulas and of torch, in fp32 and in bf16."""

import copy

import pytest
import torch
from torch import nn

from megatron_eopt.optimizers.with_adamw import Muon
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.optimizers.field import assert_close, assert_close_in_bf16
from tests.plain.made import adamw_reference, gradients, muon_reference, parameters, run, values
from tests.plain.test_muon import STEPS

ADAM = {"betas": (0.8, 0.9), "eps": 1e-6}


def model(dtype):
    torch.manual_seed(0)
    return nn.ModuleDict({"embedding": nn.Embedding(7, 5), "layer": nn.Linear(5, 6), "norm": nn.LayerNorm(6)}).to(dtype)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_takes_the_steps_of_its_formula_and_of_torch(dtype, fused):
    own = model(dtype)
    other = copy.deepcopy(own)
    config = OptimizerConfig(name="adamw", lr=0.05, weight_decay=0.3, fused=fused, **ADAM)
    params = [p for _, p in own.named_parameters()]
    decay = {name: 0.3 if p.ndim > 1 else 0.0 for name, p in own.named_parameters()}
    groups = [{"params": [p], "weight_decay": decay[name]} for name, p in other.named_parameters()]
    starts, steps = values(params), gradients(params, STEPS)
    run(build_optimizer(own, config), params, steps)
    run(torch.optim.AdamW(groups, lr=0.05, **ADAM, fused=fused), list(other.parameters()), steps)
    for i, (name, p) in enumerate(own.named_parameters()):
        expected = adamw_reference(
            starts[i].double(), [of_step[i].double() for of_step in steps], 0.05, weight_decay=decay[name], **ADAM
        )
        torch.testing.assert_close(p, other.get_parameter(name), rtol=0, atol=0)
        if dtype == torch.float32:
            assert_close(p.detach(), expected, 1e-6)
        else:
            # torch keeps the moments in bf16 too: an update is off by less than 2^-4, and each step is rounded
            way = (expected - starts[i].double()).abs().max()
            error = (p.detach().double() - expected).abs().max()
            assert error <= 2**-4 * way + 20**0.5 * 2**-8 * starts[i].abs().max()


def hybrid(params, **settings):
    *matrices, vector, embedding = params
    return Muon(
        matrices,
        [{"params": [vector, embedding], "weight_decay": settings.get("weight_decay", 0.0)}],
        momentum=0.8,
        adam_betas=ADAM["betas"],
        adam_eps=ADAM["eps"],
        adam_lr=0.01,
        **settings,
    )


SHAPES = [(12, 7), (7, 12), (4, 3, 2, 2), (9,), (11, 4)]


def test_muon_in_fp32_takes_the_steps_of_the_references():
    # the iteration multiplies rounding by up to 493, as in tests/optimizers/field.py, and steps are small
    params = parameters(*SHAPES)
    starts, steps = values(params), gradients(params, STEPS)
    run(hybrid(params, lr=0.01, weight_decay=0.1), params, steps)
    for i, p in enumerate(params):
        start, own = starts[i].double(), [of_step[i].double() for of_step in steps]
        expected = (
            muon_reference(start, own, 0.01, 0.8, 0.1)
            if i < 3
            else adamw_reference(start, own, 0.01, weight_decay=0.1, **ADAM)
        )
        assert_close(p.detach(), expected, 1e-6)


def test_muon_of_bf16_matrices_follows_the_reference_as_far_as_they_can():
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    starts, steps = values(params), gradients(params, STEPS)
    run(hybrid(params, lr=0.05), params, steps)
    for i, p in enumerate(params[:3]):
        start, own = starts[i].double(), [of_step[i].double() for of_step in steps]
        expected = muon_reference(start, own, 0.05, 0.8)
        assert_close_in_bf16(p.detach(), start, expected, roundings=STEPS)


def test_both_parts_take_the_steps_of_torch():
    # torch's Muon computes in bf16, which turns a step by 2^-6 where a matrix is not nearly singular
    params, others = parameters((12, 7), (7, 12), (9,), (11, 4)), parameters((12, 7), (7, 12), (9,), (11, 4))
    starts, steps = values(params), gradients(params, STEPS)
    same = {"lr": 0.02, "weight_decay": 0.1}
    run(hybrid(params, **same), params, steps)
    muon = torch.optim.Muon(others[:2], momentum=0.8, nesterov=False, **same)
    adam = torch.optim.AdamW(others[2:], lr=0.01, weight_decay=0.1, **ADAM)
    run(muon, others[:2], [of_step[:2] for of_step in steps])
    run(adam, others[2:], [of_step[2:] for of_step in steps])
    for p, q, start in zip(params[:2], others[:2], starts[:2], strict=True):
        assert (p - q).norm() <= 2**-6 * (q - start).norm()
    for p, q in zip(params[2:], others[2:], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
