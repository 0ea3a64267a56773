"""The table of optimizers.

From it follow the entries of the registry, flags, builders of plain torch, names of the package, lists of support and
of the doctor, what a checkpoint must hold, tables of the docs (``python scripts/tables.py``), and parameters of tests.
A new optimizer needs its file, its import here, and its row.
"""

from dataclasses import replace
from typing import Literal, get_args

from torch.optim.optimizer import Optimizer

from megatron_eopt.flags import CliFlag
from megatron_eopt.optimizer_spec import OptimizerSpec
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon as TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.ademamix import AdEMAMix as AdEMAMix
from megatron_eopt.optimizers.dion import Dion as Dion
from megatron_eopt.optimizers.dion2 import Dion2 as Dion2
from megatron_eopt.optimizers.hyperball import MuonHyperball as MuonHyperball
from megatron_eopt.optimizers.lion import Lion as Lion
from megatron_eopt.optimizers.lion import Signum as Signum
from megatron_eopt.optimizers.mars_muon import MarsMuon as MarsMuon
from megatron_eopt.optimizers.polar_grad import PolarGrad as PolarGrad
from megatron_eopt.optimizers.psgd import PSGDKron as PSGDKron
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion as Scion
from megatron_eopt.optimizers.shampoo import KLShampoo as KLShampoo
from megatron_eopt.optimizers.shampoo import Shampoo as Shampoo
from megatron_eopt.optimizers.sinkgd import SinkGD as SinkGD
from megatron_eopt.optimizers.soap import SOAP as SOAP
from megatron_eopt.optimizers.spectron import Spectron as Spectron
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon as TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.settings.presets import PRESETS
from megatron_eopt.settings.records import (
    CAUTION,
    DECAY,
    EXECUTION,
    ITERATION,
    MOMENTUM,
    NORM,
    RELATIVE,
    SCALE,
    SECOND_MOMENT,
    names_of,
)
from megatron_eopt.settings.values import AT_LEAST_0, BELOW_1

ADAMW_RMS = 0.2  # of the entries of a typical AdamW update, before the learning rate (arXiv 2502.16982, section 2.2)

SplitName = Literal["default", "none", "all", "per_head"]
"""How fused parameters are split: as Megatron does, not at all, into all their matrices, or also into heads."""

DEFAULT_TP_MODE: TpMode = "auto"  # of runs of Megatron, plans, and builders of plain torch

OF_ITERATION = (*names_of(ITERATION + EXECUTION), "split_qkv")
"""How Muon orthogonalizes and exchanges matrices."""

MUON = (*OF_ITERATION, *names_of(DECAY + MOMENTUM + SCALE + CAUTION + NORM + RELATIVE))
"""Settings of Muon that its flags give to relatives, too."""

_SHARED = (
    CliFlag(
        "preset",
        "Settings of a publication: the size of updates, and of some also momentum and Newton-Schulz steps.",
        default=None,
        choices=tuple(PRESETS),  # refused by those whose updates have a size of their own
    ),
    CliFlag("num_ns_steps"),
    CliFlag("coefficient_type", choices=get_supported_coefficient_types()),
    CliFlag("fp32_matmul_prec"),
    CliFlag("tp_mode", default=DEFAULT_TP_MODE),
    CliFlag("symmetric_products"),
    CliFlag("step_kernels"),
    CliFlag("cuda_graphs"),
    CliFlag("split_qkv", default=True),
    CliFlag(
        "split",
        "Matrices of fused parameters: as Megatron splits them, none of their own, all, or heads as well.",
        default="default",
        choices=get_args(SplitName),
    ),
    CliFlag("lr", "Largest learning rate of the matrices; --lr is for the rest.", None, float, field="matrix_lr"),
    CliFlag("min_lr", "Smallest learning rate of the matrices.", None, float, field="matrix_min_lr", check=AT_LEAST_0),
    CliFlag("weight_decay", "Weight decay of the matrices.", None, float, field="matrix_weight_decay"),
    CliFlag(
        "share_over_dp",
        "Data-parallel ranks share the work on matrices, but for those of experts.",
        default=False,
        execution=True,
    ),
    CliFlag(
        "scalar_optimizer",
        "Optimizer of the parameters that are no matrices.",
        default="adam",
        choices=("adam", "lion"),
        megatrons=True,
    ),
    *map(CliFlag, names_of(CAUTION + NORM + RELATIVE)),
    CliFlag(
        "momentum_from_adam",
        "Where --load has a checkpoint of Adam's, its first moment is the momentum.",
        default=False,
    ),
)
"""Muon's flags that are those of all optimizers of matrices which have the setting."""

_OF_SHAMPOO = (
    "momentum",
    "shampoo_beta",
    "damping",
    "precondition_frequency",
    "basis_method",
    "scale_mode",
    "weight_norm",
    "max_dim",
    CliFlag("share_over_dp", default=True),
)

_SPECS = (
    OptimizerSpec(
        name="muon",
        cls=TensorParallelMuon,
        of_muon=MUON,
        flags=(
            CliFlag("momentum", "Decay rate of the momentum, in [0, 1); papers have 0.95.", default=0.9),
            CliFlag("nesterov", default=False),
            *names_of(SCALE),
            *(replace(flag, shared=True) for flag in _SHARED),
            *names_of(SECOND_MOMENT),
        ),
    ),
    OptimizerSpec(
        name="adaptive_muon",
        cls=TensorParallelAdaptiveMuon,
        of_muon=MUON,
        flags=(CliFlag("moment2_method", "What the second moment is taken of."), "beta2", "eps", "align_rms"),
    ),
    OptimizerSpec(
        name="spectron",
        cls=Spectron,
        of_muon=tuple(name for name in OF_ITERATION if name in settings_of(Spectron)),
        flags=(
            "rank",
            "momentum_beta",
            "num_power_iterations",
        ),
    ),
    OptimizerSpec(
        name="soap",
        cls=SOAP,
        of_muon=("symmetric_products", "split_qkv"),
        betas="adam",
        flags=(
            "shampoo_beta",
            CliFlag(
                "precondition_frequency",
                "Steps from one refresh of the bases to the next: 4 refreshes them in steps 5, 9 and 13.",
            ),
            "use_kl_shampoo",
            "basis_of",
            "basis_method",
            "sort_bases",
            "weight_norm",
            "nesterov",
            "orthogonalize",
            "scale_mode",
            "max_dim",
            CliFlag("share_over_dp", default=True),
        ),
        update_rms=ADAMW_RMS,
    ),
    OptimizerSpec(
        name="shampoo",
        cls=Shampoo,
        of_muon=("symmetric_products", "split_qkv"),
        flags=_OF_SHAMPOO,
    ),
    OptimizerSpec(
        name="kl_shampoo",
        cls=KLShampoo,
        of_muon=("symmetric_products", "split_qkv"),
        flags=_OF_SHAMPOO,
    ),
    OptimizerSpec(
        name="psgd_kron",
        cls=PSGDKron,
        of_muon=("split_qkv",),
        flags=(
            "momentum",
            "precond_lr",
            "min_precond_lr",
            "precond_decay_steps",
            "precondition_frequency",
            "precond_init_scale",
            "damping_noise_scale",
            "max_update_rms",
            "max_dim",
        ),
    ),
    OptimizerSpec(
        name="lion",
        cls=Lion,
        betas="lion",
        flags=(
            CliFlag(
                "beta1",
                "Weight of the momentum in the update, in [0, 1).",
                default=0.95,
                megatrons=True,
                check=BELOW_1,
            ),
            CliFlag("beta2", "Decay rate of the momentum, in [0, 1).", default=0.98, megatrons=True, check=BELOW_1),
        ),
        update_rms=1.0,
    ),
    OptimizerSpec(
        name="signum",
        cls=Signum,
        flags=(CliFlag("momentum", "Decay rate of the momentum, in [0, 1); 0 is signSGD."),),
        update_rms=1.0,
    ),
    OptimizerSpec(
        name="schedule_free_adamw",
        cls=ScheduleFreeAdamW,
        betas="adam",
        flags=(
            "warmup_steps",
            "variant",
            "r",
            "weight_lr_power",
        ),
        update_rms=ADAMW_RMS,
    ),
    OptimizerSpec(
        name="ademamix",
        cls=AdEMAMix,
        betas="adam",
        flags=(
            "beta3",
            "alpha",
            "alpha_warmup",
            "beta3_warmup",
        ),
        update_rms=ADAMW_RMS,
    ),
    OptimizerSpec(
        name="scion",
        cls=Scion,
        of_muon=(*OF_ITERATION, *names_of(NORM)),
        flags=(
            CliFlag("momentum", "Decay rate of the momentum, in [0, 1); one minus the paper's alpha."),
            "radius",
            "constrained",
        ),
    ),
    OptimizerSpec(
        name="polargrad",
        cls=PolarGrad,
        of_muon=(*OF_ITERATION, *names_of(CAUTION + NORM), "max_update_rms"),
        flags=("momentum",),
    ),
    OptimizerSpec(
        name="muon_hyperball",
        cls=MuonHyperball,
        of_muon=(*OF_ITERATION, *names_of(MOMENTUM), "moment2_method", "beta2", "eps"),
    ),
    OptimizerSpec(
        name="mars_muon",
        cls=MarsMuon,
        of_muon=MUON,
        flags=("gamma",),
    ),
    OptimizerSpec(
        name="dion",
        cls=Dion,
        of_muon=("split_qkv",),
        flags=(
            "rank_fraction",
            CliFlag("momentum", "Decay rate of what an update takes from the momentum, in [0, 1)."),
        ),
    ),
    OptimizerSpec(
        name="dion2",
        cls=Dion2,
        of_muon=("split_qkv", "num_ns_steps", "coefficient_type", "fp32_matmul_prec", "symmetric_products"),
        flags=(
            "fraction",
            CliFlag("momentum", "What selected rows keep of their momentum, in [0, 1)."),
        ),
    ),
    OptimizerSpec(
        name="sinkgd",
        cls=SinkGD,
        of_muon=("split_qkv",),
        flags=("iterations",),
    ),
)
"""In the order of the docs."""

OPTIMIZERS = {row.name: row for row in _SPECS}
CLASSES: dict[str, type[Optimizer]] = {row.cls.__name__: row.cls for row in _SPECS}
LIKE_MUON = tuple(row.name for row in _SPECS if row.of_muon == MUON)
"""Optimizers with all of Muon's flags: their updates have Muon's size, and their weight decay may be L2."""
