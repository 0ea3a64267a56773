"""Every optimizer of the package, built for a few parameters."""

import pytest
import torch

from megatron_eopt import DistributedMuon, Muon, OrthogonalizedOptimizer
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.settings.execution import gathered

# What is set to let a few steps of small matrices show what the optimizer does.
SETTINGS = {
    "adaptive_muon": {"moment2_method": "normuon"},
    "spectron": {"rank": 3},
    "soap": {"precondition_frequency": 2},
    "schedule_free_adamw": {"warmup_steps": 2, "weight_decay": 0.1},
    "ademamix": {"alpha_warmup": 2, "beta3_warmup": 4, "weight_decay": 0.1},
    "lion": {"weight_decay": 0.1},
    "signum": {"weight_decay": 0.1},
}
HOLD = {"weight_norm": "hold", "weight_decay": 0.0}
# Every optimizer, and settings that change what one keeps or does: rows of the tests that hold for all.
VARIANTS = {
    **{name: (name, {}) for name in OPTIMIZERS},
    "adamuon": ("adaptive_muon", {"moment2_method": "adamuon"}),
    "adamuon not aligned": ("adaptive_muon", {"moment2_method": "adamuon", "align_rms": False}),
    "namo": ("adaptive_muon", {"moment2_method": "namo"}),
    "muon without look-ahead": ("muon", {"nesterov": False, "weight_decay": 0.3, "weight_decay_method": "independent"}),
    "muon with l2": ("muon", {"weight_decay_method": "l2", "use_decoupled_weight_decay": False}),
    "muon held": ("muon", HOLD),
    "muon braked": ("muon", {"weight_norm": "brake", "cautious_weight_decay": True, "relative_update": "match"}),
    "muon in bf16": ("muon", {"momentum_dtype": torch.bfloat16}),
    "normuon on a hyperball": ("muon_hyperball", {"moment2_method": "normuon"}),
    "mars in bf16": ("mars_muon", {"momentum_dtype": torch.bfloat16, "gamma": 0.5}),
    "soap of KL factors": ("soap", {"use_kl_shampoo": True, "max_dim": 5}),
    "soap of current gradients": ("soap", {"basis_of": "current", "sort_bases": "after"}),
    "soap held": ("soap", {"use_kl_shampoo": True, "precondition_frequency": 1, **HOLD}),
    "soap-muon": ("soap", {"orthogonalize": True, "nesterov": True, "correct_bias": False}),
    "shampoo held": ("shampoo", {"precondition_frequency": 3, "basis_method": "eigh", **HOLD}),
    "psgd of a diagonal": ("psgd_kron", {"max_dim": 5, "precondition_frequency": 3, "precond_decay_steps": 2}),
    "schedulefree": ("schedule_free_adamw", {"variant": "schedulefree"}),
    "schedule-free with x": ("schedule_free_adamw", {"betas": (0.3, 0.9)}),
    "lion with l2": ("lion", {"weight_decay_method": "l2"}),
}
ELEMENTWISE = tuple(name for name, row in OPTIMIZERS.items() if row.owns == "all")
FOR_VECTORS = (*ELEMENTWISE, "soap")
WITHOUT_STATE = {"sinkgd"}
WITH_STATE = [name for name in OPTIMIZERS if name not in WITHOUT_STATE]
every = pytest.mark.parametrize("name", OPTIMIZERS)
every_with_state = pytest.mark.parametrize("name", WITH_STATE)


def _users(params, **settings):
    given = {"momentum_beta": 0.9, "use_nesterov": True, "weight_decay": 0.1, "use_decoupled_weight_decay": True}
    given |= {"split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": None, "fp32_matmul_prec": "highest"}
    given |= {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 0.2}
    return OrthogonalizedOptimizer(params, **{**given, **settings})


def _with_adamw(params, **settings):
    return Muon(params, [torch.nn.Parameter(torch.ones(5))], **settings)


# Optimizers that are in no row, and every class with those.
FURTHER = {"with_adamw": _with_adamw, "distributed_muon": DistributedMuon, "users_own": _users}
every_variant = pytest.mark.parametrize("name", [*VARIANTS, *FURTHER])
every_class = pytest.mark.parametrize("name", [*OPTIMIZERS, *FURTHER])
every_class_with_state = pytest.mark.parametrize("name", [*WITH_STATE, *FURTHER])


def build(name, params, **settings):
    """An optimizer of the family, a variant of one, or one of those in no row."""
    if name in FURTHER:
        return FURTHER[name](params, **{"lr": 0.01, **settings})
    if name not in OPTIMIZERS:
        name, own = VARIANTS[name]
        settings = {**own, **settings}
    cls = OPTIMIZERS[name].cls
    return cls(params, **gathered(cls, {"lr": 0.01, **SETTINGS.get(name, {}), **settings}))


def having(*settings):
    """Names of the optimizers whose constructors take all of these."""
    return [name for name, row in OPTIMIZERS.items() if all(map(row.takes, settings))]


def decays(name):
    """Whether an optimizer has a weight decay."""
    return OPTIMIZERS[name].cls.decays_weights


def matrices(count=2, shape=(6, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


def take(optimizer, steps, start=0):
    """Steps with gradients that depend on the number of the step alone."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
