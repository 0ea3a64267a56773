"""Every optimizer of the package, built for a few parameters."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from megatron_eopt import DistributedMuon, Muon, OrthogonalizedOptimizer
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.settings.execution import gathered


@dataclass(frozen=True, kw_only=True)
class Record:
    """What tests have to know of an optimizer beside what its class says."""

    settings: dict = field(default_factory=dict)  # let a few steps of small matrices show what it does
    megatron: str = ""  # flags with which a small GPT trains
    # Several ranks are compared with one: settings of the optimizer, and further ones of the first of two groups.
    over_ranks: dict = field(default_factory=dict)
    first_group: dict = field(default_factory=dict)
    modes: tuple = ("owner",)  # values of tp_mode, where it has that
    tolerance: float = 1e-11  # of the largest entry; in fp64 that is rounding, multiplied by the iteration at most
    calls: dict = field(default_factory=dict)  # collective -> calls in a step over TP=2, but for Muon's schemes
    unbounded: bool = False  # whether updates are as large as gradients
    by_line: bool = False  # whether rows step each for itself, so that a split along them changes nothing
    refuses: tuple = ()  # layouts, and parameters, of tests/distributed/layouts.py


# Collectives. There are two groups of ranks, of matrices and of experts, and matrices of two dtypes in the first.
SUMS = {"all_reduce": 2}  # of whole matrices
OWNED = {"all_to_all": 2 * 3}  # there and back
FACTORED = {**OWNED, "all_reduce": 1}  # a matrix that has only had zeros is asked for in each step
STACKS = ("experts", "gate and up of experts", "gate and up by turns (in, out)")  # of DTensors
IN_FP32 = 1e-6  # second moments are in fp32, so that another order of a sum moves them by a rounding
OF_FACTORS = {"precondition_frequency": 2, "max_dim": 24, "weight_decay": 0.1}

# One row for each optimizer that needs one; others have the defaults.
RECORDS = defaultdict(Record) | {
    "muon": Record(modes=("duplicated", "owner", "auto", "distributed", "gram")),
    "adaptive_muon": Record(
        settings={"moment2_method": "normuon"},
        tolerance=IN_FP32,
        calls=SUMS,
        refuses=("both", *STACKS),
    ),
    "spectron": Record(
        settings={"rank": 3},
        megatron="--spectron-rank 16 --lr 1e-2",
        over_ranks={"rank": 7, "momentum_beta": 0.8, "num_power_iterations": 2},
        first_group={"rank": 3, "weight_decay": 0.2},
        modes=("duplicated", "auto"),
        # of gradients, of vectors and of norms (in fp64) in each power iteration, and of quotients
        calls={"all_reduce": 3 + 2 * (3 + 2) + 3},
        refuses=("both", "one row", "heads", "gate over up", *STACKS),
    ),
    "soap": Record(
        settings={"precondition_frequency": 2},
        megatron="--lr 3e-3 --min-lr 3e-3",
        over_ranks=OF_FACTORS,
        first_group={"precondition_frequency": 3},
        calls=FACTORED,
    ),
    "shampoo": Record(
        megatron="--lr 1e-2 --min-lr 1e-2",
        over_ranks={**OF_FACTORS, "precondition_frequency": 1, "damping": 1e-3},
        calls=FACTORED,
        refuses=("long sides",),
    ),
    "kl_shampoo": Record(
        megatron="--lr 1e-2 --min-lr 1e-2",
        over_ranks={**OF_FACTORS, "precondition_frequency": 1, "damping": 1e-3, "maximize": True},
        calls=FACTORED,
        refuses=("long sides",),
    ),
    "psgd_kron": Record(megatron="--lr 4e-3 --min-lr 4e-3", over_ranks={"max_dim": 24}, calls=OWNED),
    "lion": Record(settings={"weight_decay": 0.1}, megatron="--lr 1e-3 --min-lr 1e-3"),
    "signum": Record(settings={"weight_decay": 0.1}, megatron="--lr 1e-3 --min-lr 1e-3"),
    "schedule_free_adamw": Record(settings={"warmup_steps": 2, "weight_decay": 0.1}),
    "ademamix": Record(
        settings={"alpha_warmup": 2, "beta3_warmup": 4, "weight_decay": 0.1}, megatron="--lr 3e-3 --min-lr 3e-3"
    ),
    "scion": Record(settings={"radius": 1.0}, megatron="--muon-lr 4e-4 --muon-min-lr 4e-4"),
    "polargrad": Record(megatron="--lr 1e-1 --min-lr 1e-1", calls=SUMS, unbounded=True),
    "muon_hyperball": Record(megatron="--lr 2e-2 --min-lr 2e-2", calls=SUMS),
    "mars_muon": Record(megatron="--lr 3e-3 --min-lr 3e-3", calls=SUMS),
    "dion": Record(
        megatron="--lr 2e-2 --min-lr 2e-2",
        over_ranks={"weight_decay": 0.1},
        first_group={"rank_fraction": 0.4},
        calls={"all_reduce": 2 * 3},
        refuses=STACKS[2:],
    ),
    "dion2": Record(megatron="--lr 2e-2 --min-lr 2e-2", over_ranks={"fraction": 0.4}, calls=OWNED),
    "sinkgd": Record(
        megatron="--lr 3e-3 --min-lr 3e-3",
        first_group={"iterations": 2},
        calls={"all_reduce": 2 * 5 * 3},  # of rows and of columns in each iteration
    ),
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
FOR_VECTORS = [
    name for name, row in OPTIMIZERS.items() if name in ELEMENTWISE or "vectors" in getattr(row.cls, "takes", "")
]


def _users(params, **settings):
    given = {"momentum_beta": 0.9, "use_nesterov": True, "weight_decay": 0.1, "use_decoupled_weight_decay": True}
    given |= {"split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": None, "fp32_matmul_prec": "highest"}
    given |= {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 0.2}
    return OrthogonalizedOptimizer(params, **{**given, **settings})


def _with_adamw(params, **settings):
    return Muon(params, [torch.nn.Parameter(torch.ones(5))], **settings)


FURTHER = {"with_adamw": _with_adamw, "distributed_muon": DistributedMuon, "users_own": _users}  # in no row


def build(name, params, **settings):
    """An optimizer of the family, a variant of one, or one of those in no row."""
    if name in FURTHER:
        return FURTHER[name](params, **{"lr": 0.01, **settings})
    if name not in OPTIMIZERS:
        name, own = VARIANTS[name]
        settings = {**own, **settings}
    cls = OPTIMIZERS[name].cls
    return cls(params, **gathered(cls, {"lr": 0.01, **RECORDS[name].settings, **settings}))


def having(*settings):
    """Names of the optimizers whose constructors take all of these."""
    return [name for name, row in OPTIMIZERS.items() if all(map(row.takes, settings))]


def options(name, **further):
    """What ``build_optimizer`` is told of an optimizer beside the fields of its config, of what it has."""
    of_fields = ("weight_decay", "warmup_steps")
    settings = {**further, **RECORDS[name].settings} if name in OPTIMIZERS else {}
    return {key: x for key, x in settings.items() if OPTIMIZERS[name].takes(key) and key not in of_fields}


def decays(name):
    """Whether an optimizer has a weight decay."""
    return OPTIMIZERS[name].cls.decays_weights


def matrices(count=2, shape=(6, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


def keeps_state(name):
    """Whether an optimizer, or one in no row, keeps anything between steps."""
    [p] = matrices(1)
    optimizer = build(name, [p])
    return bool(getattr(optimizer, "matrices", optimizer).state_tensors(p))


def others(name, key):
    """Values of a setting of groups that are not its default; some may be out of range."""
    setting = OPTIMIZERS[name].settings[key]
    match setting.default:
        case _ if setting.choices:
            return [choice for choice in setting.choices if choice != setting.default]
        case bool():
            return [not setting.default]
        case tuple():
            return [tuple(each / 2 for each in setting.default)]
        case str():
            return [*get_supported_coefficient_types()]
        case int():
            return [setting.default + 1, 2, 3, 5]
    return [(setting.default or 1) / 2, 0.1, 0.01]


def take(optimizer, steps, start=0):
    """Steps with gradients that depend on the number of the step alone."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


WITH_STATE = [name for name in OPTIMIZERS if keeps_state(name)]
every = pytest.mark.parametrize("name", OPTIMIZERS)
every_with_state = pytest.mark.parametrize("name", WITH_STATE)
every_variant = pytest.mark.parametrize("name", [*VARIANTS, *FURTHER])
every_class = pytest.mark.parametrize("name", [*OPTIMIZERS, *FURTHER])
every_class_with_state = pytest.mark.parametrize("name", [*WITH_STATE, *FURTHER])
