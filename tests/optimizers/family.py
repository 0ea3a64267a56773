"""Every optimizer of the package, built for a few parameters."""

import pytest
import torch

from megatron_eopt import DistributedMuon, Muon, OrthogonalizedOptimizer
from megatron_eopt.family import OPTIMIZERS

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
ELEMENTWISE = tuple(name for name, row in OPTIMIZERS.items() if row.owns == "all")
FOR_VECTORS = tuple(name for name, row in OPTIMIZERS.items() if row.vectors)
every = pytest.mark.parametrize("name", OPTIMIZERS)


def _users(params, lr):
    settings = {"momentum_beta": 0.9, "use_nesterov": True, "weight_decay": 0.1, "use_decoupled_weight_decay": True}
    split = {"split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": None, "fp32_matmul_prec": "highest"}
    functions = {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 0.2}
    return OrthogonalizedOptimizer(params, lr, **settings, **split, **functions)


def _with_adamw(params, **settings):
    return Muon(params, [torch.nn.Parameter(torch.ones(5))], **settings)


# Optimizers that are in no row, and every class with those.
FURTHER = {"with_adamw": _with_adamw, "distributed_muon": DistributedMuon, "users_own": _users}
every_class = pytest.mark.parametrize("name", [*OPTIMIZERS, *FURTHER])


def build(name, params, **settings):
    """An optimizer of the family, or of those in no row."""
    if name in FURTHER:
        return FURTHER[name](params, **{"lr": 0.01, **settings})
    return OPTIMIZERS[name].cls(params, **{"lr": 0.01, **SETTINGS.get(name, {}), **settings})


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
