"""The table of optimizers.

From it follow the entries of the registry, flags, builders of plain torch, names of the package, lists of support and
of the doctor, what a checkpoint must hold, tables of the docs (``python scripts/tables.py``), and parameters of tests.
A new optimizer needs its file, its import here, and its row.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter
from typing import Any, Literal, get_args, get_origin

import torch
from torch.optim.optimizer import Optimizer

from megatron_eopt.from_config import (
    get_qkv_split_shapes,
    kwargs_from_config,
    momentum_dtype_from,
    symmetric_products_from,
    workspace_from,
)
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon as TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.ademamix import AdEMAMix as AdEMAMix
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.dion import Dion as Dion
from megatron_eopt.optimizers.group_settings import DECOUPLED
from megatron_eopt.optimizers.hyperball import MuonHyperball as MuonHyperball
from megatron_eopt.optimizers.lion import Lion as Lion
from megatron_eopt.optimizers.lion import Signum as Signum
from megatron_eopt.optimizers.mars_muon import MarsMuon as MarsMuon
from megatron_eopt.optimizers.modifiers import MODIFIERS, OF_MOMENT
from megatron_eopt.optimizers.muown import Muown as Muown
from megatron_eopt.optimizers.orthogonalized import MOMENTUM_BUFFER
from megatron_eopt.optimizers.polar_grad import PolarGrad as PolarGrad
from megatron_eopt.optimizers.presets import PRESETS
from megatron_eopt.optimizers.psgd import PSGDKron as PSGDKron
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion as Scion
from megatron_eopt.optimizers.shampoo import KLShampoo as KLShampoo
from megatron_eopt.optimizers.shampoo import Shampoo as Shampoo
from megatron_eopt.optimizers.soap import SOAP as SOAP
from megatron_eopt.optimizers.spectron import Spectron as Spectron
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.step_kernels import StepForm
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon as TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.kernels import KERNELS
from megatron_eopt.parallel.records import TpMode

ADAMW_RMS = 0.2  # of the entries of a typical AdamW update, before the learning rate (arXiv 2502.16982, section 2.2)


@dataclass(frozen=True)
class Flag:
    """``--OPTIMIZER-SETTING``, or ``--OPTIMIZER-no-SETTING`` for the default True."""

    setting: str  # argument of the optimizer's constructor, if it has one
    help: str
    default: Any = Parameter.empty  # the constructor's, unless Megatron's flag has another or a run knows more
    kind: type = str  # of a value without a default
    choices: tuple[str, ...] = ()  # filled in from the constructor's ``Literal``
    field: str = ""  # of the config, where it has another name
    shared: bool = False  # by all optimizers of matrices that have the setting
    megatrons: bool = False  # Megatron has the flag itself, so that it is not added
    metavar: str | None = None
    optimizer: str = ""  # filled in for the flags of a row; empty for a flag of the run

    @property
    def name(self) -> str:
        """The flag as it is typed."""
        words = (self.optimizer, "no" if self.default is True else "", self.setting)
        return "--" + "-".join(filter(None, words)).replace("_", "-")

    @property
    def dest(self) -> str:
        """Field of the config and of the parsed arguments."""
        return self.field or "_".join(filter(None, (self.optimizer, self.setting)))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``add_argument`` without name, destination and help."""
        if isinstance(self.default, bool):
            return {"action": f"store_{not self.default}".lower()}
        kind = self.kind if self.default is None else type(self.default)
        choices = {"choices": self.choices} if self.choices else {}
        return {"type": kind, "default": self.default, "metavar": self.metavar, **choices}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """A row of the table."""

    name: str  # for ``--optimizer``, and for the config of plain torch
    cls: type[BaseOptimizer]
    owns: Literal["matrices", "all"] = "matrices"  # the parameters it updates in Megatron; Adam updates the rest
    vectors: bool = False  # takes any shape, so that plain torch gives it all; always where it owns all
    plain: bool = True  # has a builder of plain torch
    of_muon: tuple[str, ...] = ()  # settings that it takes from Muon's flags
    betas: str = ""  # prefix of the flags for its betas and ``eps``
    flags: tuple[Flag, ...] = ()
    state_settings: tuple[dict[str, Any], ...] = ()  # arguments of the constructor that change its state
    state_depends_on: tuple[str, ...] = ()  # fields of the config that change its state
    update_rms: float | None = None  # RMS of an update's entries, before the rate, where no matrix has one of its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "vectors", self.vectors or self.owns == "all")
        object.__setattr__(self, "flags", tuple(map(self._completed, self.flags)))

    def _completed(self, flag: Flag) -> Flag:
        flag = replace(flag, optimizer=self.name)
        argument = self.arguments.get(flag.setting)
        if argument is None:
            return flag
        if flag.default is Parameter.empty:
            flag = replace(flag, default=argument.default)
        if not flag.choices and get_origin(argument.annotation) is Literal:
            flag = replace(flag, choices=get_args(argument.annotation))
        return flag

    def state_tensors(self, shape: tuple[int, int] = (128, 128), **settings: Any) -> list[StateTensor]:
        """State of an fp32 matrix; ``settings`` are the constructor's."""
        matrix = torch.empty(shape, dtype=torch.float32, device="meta")
        return self.cls([matrix], **settings).state_tensors(matrix)

    @cached_property
    def state(self) -> tuple[StateTensor, ...]:
        """State with the defaults, then with each of :attr:`state_settings`."""
        return tuple(tensor for settings in ({}, *self.state_settings) for tensor in self.state_tensors(**settings))

    @property
    def state_keys(self) -> set[str]:
        """Keys of :attr:`state`."""
        return {tensor.key for tensor in self.state}

    @property
    def takes_adams(self) -> bool:
        """Whether it can start from Adam's first moment."""
        return self.state_keys == {MOMENTUM_BUFFER}

    @property
    def arguments(self) -> Mapping[str, Parameter]:
        """Arguments of the constructor."""
        return inspect.signature(self.cls).parameters

    def takes(self, setting: str) -> bool:
        """Whether the constructor has this argument."""
        return setting in self.arguments

    def config_to_kwargs(self, config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
        """Arguments of the constructor from Megatron's config.

        ``use_decoupled_weight_decay=False`` is a ``ValueError``, unless the optimizer has Muon's setting for it.
        Megatron's own field ``decoupled_weight_decay`` is Adam's alone, as in Megatron.
        """
        if DECOUPLED not in self.of_muon:
            for field in (f"{self.name}_{DECOUPLED}", DECOUPLED):
                if not getattr(config, field, True):
                    raise ValueError(f"{self.name} has decoupled weight decay only: leave {field} at True")
        of_muon = kwargs_from_config(self.cls, "muon", config)
        kwargs = {setting: value for setting, value in of_muon.items() if setting in self.of_muon}
        kwargs |= kwargs_from_config(self.cls, self.name, config)
        kwargs |= symmetric_products_from(config) if self.takes("symmetric_products") else {}
        kwargs |= workspace_from(config) if self.takes("workspace") else {}
        kwargs |= momentum_dtype_from(config) if self.takes("momentum_dtype") else {}
        if not self.cls.traits.decays_weights:
            kwargs["weight_decay"] = 0.0
        if hasattr(config, f"{self.betas}_beta1"):
            kwargs["betas"] = (getattr(config, f"{self.betas}_beta1"), getattr(config, f"{self.betas}_beta2"))
        if hasattr(config, f"{self.betas}_eps"):
            kwargs["eps"] = getattr(config, f"{self.betas}_eps")
        if self.owns == "matrices":
            model = model_chunks[0].config
            if kwargs.setdefault("split_qkv", False):  # without a flag only declared parameters are split
                kwargs["is_qkv_fn"] = lambda param: getattr(param, "is_qkv", False)
                kwargs["qkv_split_shapes"] = None
                if model.num_attention_heads and model.num_query_groups and model.kv_channels:
                    kwargs["qkv_split_shapes"] = get_qkv_split_shapes(model)
            kwargs["pg_collection"] = pg_collection
            if self.takes("data_parallel_group") and getattr(config, "muon_share_over_dp", False):
                kwargs["data_parallel_group"] = pg_collection.dp_cp
        return kwargs


SplitName = Literal["default", "none", "all", "per_head"]
"""How fused parameters are split: as Megatron does, not at all, into all their matrices, or also into heads."""

DEFAULT_TP_MODE: TpMode = "auto"  # of runs of Megatron, plans, and builders of plain torch

ITERATION = tuple(
    "split_qkv fp32_matmul_prec coefficient_type num_ns_steps tp_mode cuda_graphs data_parallel_group plan_rates "
    "symmetric_products workspace offload_fraction momentum_dtype".split()
)
"""How Muon orthogonalizes and exchanges matrices."""

MOMENTUM = ("momentum", "momentum_warmup", "nesterov")
OF_WEIGHTS = tuple(key for key in MODIFIERS if key not in OF_MOMENT)
"""Modifiers that relatives have, too."""

BOUNDS = tuple(key for key in OF_WEIGHTS if key != "cautious_weight_decay")
"""Those of what has no weight decay."""

MUON = (
    *ITERATION,
    *MOMENTUM,
    *OF_WEIGHTS,
    *"step_kernels scale_mode extra_scale_factor use_decoupled_weight_decay weight_decay_method".split(),
)
"""All settings of Muon."""

_SPLITS = ("muon_split", "muon_split_qkv")  # fields of the config that decide which logical matrices there are

_SHARED = (
    Flag(
        "preset",
        "Settings of a publication: the size of updates, and of some also momentum and Newton-Schulz steps.",
        default=None,
        choices=tuple(PRESETS),  # refused by those whose updates have a size of their own
    ),
    Flag("num_ns_steps", "Newton-Schulz steps.", megatrons=True),
    Flag(
        "coefficient_type",
        "Coefficients of the Newton-Schulz steps.",
        choices=get_supported_coefficient_types(),
        megatrons=True,
    ),
    Flag(
        "fp32_matmul_prec",
        "Precision of the Newton-Schulz products: bf16 (low, medium), TF32 (high) or fp32 (highest).",
        megatrons=True,
    ),
    Flag(
        "tp_mode",
        "How sharded matrices are orthogonalized: all exact but blockwise, which takes each shard for a matrix and is "
        "Megatron's default. auto takes the cheapest exact way for each shape. Where none is named, a resume keeps "
        "that of its checkpoint.",
        default=DEFAULT_TP_MODE,
        megatrons=True,
    ),
    Flag(
        "symmetric_products",
        "Kernel of symmetric products; without it that of the checkpoint, else the fastest of the run, timed at start "
        "on a GPU.",
        choices=tuple(KERNELS),
    ),
    Flag(
        "step_kernels",
        "What does the elementwise work of a step; without it that of the checkpoint, else, on a GPU, triton where it "
        "serves.",
        choices=get_args(StepForm),
    ),
    Flag("split_qkv", "Orthogonalize fused projections whole.", default=True, megatrons=True),
    Flag(
        "split",
        "Matrices of fused parameters: as Megatron splits them, none of their own, all, or heads as well.",
        default="default",
        choices=get_args(SplitName),
    ),
    Flag("lr", "Largest learning rate of the matrices; --lr is for the rest.", None, float, field="matrix_lr"),
    Flag("min_lr", "Smallest learning rate of the matrices.", None, float, field="matrix_min_lr"),
    Flag("weight_decay", "Weight decay of the matrices.", None, float, field="matrix_weight_decay"),
    Flag(
        "share_over_dp",
        "Data-parallel ranks share the work on matrices, but for those of experts.",
        default=False,
    ),
    Flag(
        "scalar_optimizer",
        "Optimizer of the parameters that are no matrices; lion on Megatron-Core 0.19.",
        default="adam",
        choices=("adam", "lion"),
        megatrons=True,
    ),
    Flag(
        "momentum_warmup",
        "Steps in which the momentum grows from 0.85 to its value; 0 for none.",
        metavar="STEPS",
    ),
    Flag(
        "cautious_weight_decay",
        "Decay only entries whose signs do not differ from their update's (arXiv 2510.12402).",
    ),
    Flag(
        "weight_norm",
        "What is done to the norm of a matrix: hold keeps it, as muon_hyperball does, and steps have lr times the "
        "norm; brake lets a part of its change through.",
    ),
    Flag("brake_outward", "For brake: the part of a norm's growth, in [0, 1]."),
    Flag("brake_inward", "For brake: the part of what a norm shrinks by, in [0, 1]."),
    Flag(
        "relative_update",
        "The norm of an update, before the rate: match makes it --muon-update-ratio times that of its weight, bound "
        "makes it that at most.",
    ),
    Flag("update_ratio", "For --muon-relative-update: the norm of an update over that of its weight."),
    Flag(
        "momentum_from_adam",
        "Where --load has a checkpoint of Adam's, its first moment is the momentum.",
        default=False,
    ),
)
"""Muon's flags that are those of all optimizers of matrices which have the setting."""

_SECOND_MOMENT = (
    Flag("moment2_method", "Whose second moment divides factors; none is Muon's own step."),
    Flag("beta2", "Decay rate of the second moment, in [0, 1)."),
    Flag("eps", "Bounds the division by the second moment from below."),
    Flag("align_rms", "Leave adamuon's update as large as the division makes it."),
)

_MOMENTUM = Flag("momentum", "Decay rate of the momentum, in [0, 1).")
_EACH_RANK = Flag(
    "share_over_dp",
    "Every data-parallel rank keeps and computes all, as where Megatron deals out parameters and where checkpoints "
    "are not torch_dist.",
    default=True,
)

_OF_SHAMPOO = (
    _MOMENTUM,
    Flag("shampoo_beta", "Decay rate of the factors, in [0, 1)."),
    Flag("damping", "Added to the factors, relative to them."),
    Flag("precondition_frequency", "Steps from one making of the roots to the next, counted from the first step."),
    Flag("root_method", "How inverse roots are made: by eigenvectors, or by products alone."),
    Flag("scale_mode", "How the size of an update follows from the shape."),
    Flag("weight_norm", "Whether every matrix keeps the norm that it starts with."),
    Flag("max_dim", "The longest side that has a factor; a matrix without one is refused."),
    _EACH_RANK,
)

_SPECS = (
    OptimizerSpec(
        name="muon",
        cls=TensorParallelMuon,
        of_muon=MUON,
        flags=(
            Flag("momentum", "Decay rate of the momentum, in [0, 1); papers have 0.95.", default=0.9, megatrons=True),
            Flag("nesterov", "Look ahead, as Nesterov's momentum does.", default=False, megatrons=True),
            Flag("scale_mode", "How the size of an update follows from the shape.", megatrons=True),
            Flag(
                "extra_scale_factor",
                "Multiplies the update; 0.2 with spectral gives updates the size of AdamW's.",
                megatrons=True,
            ),
            *(replace(flag, shared=True) for flag in _SHARED),
            *_SECOND_MOMENT,
        ),
    ),
    OptimizerSpec(
        name="adaptive_muon",
        cls=TensorParallelAdaptiveMuon,
        plain=False,
        of_muon=MUON,
        flags=(Flag("moment2_method", "What the second moment is taken of."), *_SECOND_MOMENT[1:]),
        state_settings=({"moment2_method": "normuon"}, {"moment2_method": "namo"}),
        state_depends_on=("adaptive_muon_moment2_method",),
    ),
    OptimizerSpec(
        name="spectron",
        cls=Spectron,
        of_muon=ITERATION,
        flags=(
            Flag("rank", "Rank of the two factors of every weight."),
            Flag("momentum_beta", "Decay rate of the factors' momenta, in [0, 1); the paper has 0.95."),
            Flag("num_power_iterations", "Power iterations of a step, for the spectral norms."),
        ),
        state_depends_on=("spectron_rank", *_SPLITS),
    ),
    OptimizerSpec(
        name="soap",
        cls=SOAP,
        vectors=True,
        of_muon=("symmetric_products", "split_qkv"),
        betas="adam",
        flags=(
            Flag("shampoo_beta", "Decay rate of the factors, in [0, 1)."),
            Flag(
                "precondition_frequency",
                "Steps from one refreshing of the bases to the next, counted from the "
                "first step as the authors do: 4 refreshes them in steps 5, 9 and 13. From Python the default is 10.",
                default=1,
            ),
            Flag("use_kl_shampoo", "Factors as Shampoo has them, which is the default from Python.", default=True),
            Flag("basis_of", "Whether a gradient is seen in a basis made before it, as published, or with it."),
            Flag("basis_method", "How bases are refreshed."),
            Flag("sort_bases", "Whether eigenvalues are sorted before a refresh, as published, or after it."),
            Flag("weight_norm", "Whether every matrix keeps the norm that it starts with (KL-SOAP-H)."),
            Flag("nesterov", "Whether the first moment looks ahead."),
            Flag("orthogonalize", "Updates are orthogonalized (SOAP-Muon)."),
            Flag("scale_mode", "How the size of an orthogonalized update follows from the shape."),
            Flag("max_dim", "The longest side that has a factor and a basis."),
            _EACH_RANK,
        ),
        state_settings=({"weight_norm": "hold"},),
        state_depends_on=("soap_max_dim", "soap_weight_norm", *_SPLITS),
        update_rms=ADAMW_RMS,
    ),
    OptimizerSpec(
        name="shampoo",
        cls=Shampoo,
        of_muon=("symmetric_products", "split_qkv"),
        flags=_OF_SHAMPOO,
        state_settings=({"weight_norm": "hold"},),
        state_depends_on=("shampoo_max_dim", "shampoo_weight_norm", *_SPLITS),
    ),
    OptimizerSpec(
        name="kl_shampoo",
        cls=KLShampoo,
        of_muon=("symmetric_products", "split_qkv"),
        flags=_OF_SHAMPOO,
        state_settings=({"weight_norm": "hold"},),
        state_depends_on=("kl_shampoo_max_dim", "kl_shampoo_weight_norm", *_SPLITS),
    ),
    OptimizerSpec(
        name="psgd_kron",
        cls=PSGDKron,
        of_muon=("split_qkv",),
        flags=(
            _MOMENTUM,
            Flag("precond_lr", "Rate of the factors, above 0 and at most 1."),
            Flag("min_precond_lr", "Least rate of the factors."),
            Flag("precond_decay_steps", "Steps by which the rate of the factors decays.", metavar="STEPS"),
            Flag("precondition_frequency", "Steps from one fit of the factors to the next."),
            Flag("precond_init_scale", "The factors start as so many identities."),
            Flag("damping_noise_scale", "Noise that is added where factors are fitted; emerging-optimizers has 0.1."),
            Flag("max_update_rms", "Largest RMS of the entries of an update; 0 for no bound."),
            Flag("max_dim", "The longest side that has a factor; a longer one has its diagonal."),
        ),
        state_settings=({"max_dim": 110},),
        state_depends_on=("psgd_kron_max_dim", *_SPLITS),
    ),
    OptimizerSpec(
        name="lion",
        cls=Lion,
        owns="all",
        betas="lion",
        flags=(
            Flag("beta1", "Weight of the momentum in the update, in [0, 1).", default=0.95, megatrons=True),
            Flag("beta2", "Decay rate of the momentum, in [0, 1).", default=0.98, megatrons=True),
        ),
        update_rms=1.0,
    ),
    OptimizerSpec(
        name="signum",
        cls=Signum,
        owns="all",
        flags=(Flag("momentum", "Decay rate of the momentum, in [0, 1); 0 is signSGD."),),
        update_rms=1.0,
    ),
    OptimizerSpec(
        name="schedule_free_adamw",
        cls=ScheduleFreeAdamW,
        owns="all",
        betas="adam",
        flags=(
            Flag("warmup_steps", "Steps in which its rate grows; take --lr-decay-style constant with it."),
            Flag(
                "variant",
                "The weights of the average: the rate, or, as schedulefree, a power of the "
                "largest rate so far; schedulefree also decays by y.",
            ),
            Flag("r", "For schedulefree: power of a step's number in the weight of the step."),
            Flag("weight_lr_power", "For schedulefree: power of the largest rate in the weight of a step."),
        ),
        update_rms=ADAMW_RMS,
        state_settings=({"betas": (0.4, 0.95)},),  # below 0.5 the average is kept
    ),
    OptimizerSpec(
        name="ademamix",
        cls=AdEMAMix,
        owns="all",
        betas="adam",
        flags=(
            Flag("beta3", "Decay rate of the slow momentum, in [0, 1)."),
            Flag("alpha", "Weight of the slow momentum in the update."),
            Flag("alpha_warmup", "Steps in which alpha grows; take those of the run.", metavar="STEPS"),
            Flag("beta3_warmup", "Steps in which beta3 grows; take those of the run.", metavar="STEPS"),
        ),
        update_rms=ADAMW_RMS,
    ),
    OptimizerSpec(
        name="scion",
        cls=Scion,
        of_muon=(*ITERATION, *BOUNDS, "step_kernels", "momentum_warmup"),
        flags=(
            Flag("momentum", "Decay rate of the momentum, in [0, 1); one minus the paper's alpha."),
            Flag("radius", "Radius of the ball of every matrix."),
            Flag("constrained", "Bound the steps alone, not the matrices."),
        ),
    ),
    OptimizerSpec(
        name="polargrad",
        cls=PolarGrad,
        of_muon=(*ITERATION, *OF_WEIGHTS, "step_kernels", "momentum_warmup"),
        flags=(_MOMENTUM,),
    ),
    OptimizerSpec(
        name="muon_hyperball",
        cls=MuonHyperball,
        of_muon=(*ITERATION, *MOMENTUM, *OF_MOMENT, "step_kernels"),
        state_depends_on=_SPLITS,
    ),
    OptimizerSpec(
        name="mars_muon",
        cls=MarsMuon,
        of_muon=MUON,
        flags=(Flag("gamma", "Strength of the correction, at least 0; 0 leaves Muon of clipped gradients."),),
    ),
    OptimizerSpec(
        name="dion",
        cls=Dion,
        of_muon=("split_qkv",),
        flags=(
            Flag("rank_fraction", "Rank of updates, as a part of the short side of a matrix, in (0, 1]."),
            Flag("momentum", "Decay rate of what an update takes from the momentum, in [0, 1)."),
        ),
        state_depends_on=("dion_rank_fraction", *_SPLITS),
    ),
    OptimizerSpec(
        name="muown",
        cls=Muown,
        of_muon=(*ITERATION, *MOMENTUM, "step_kernels", "scale_mode", "extra_scale_factor"),
        flags=(
            Flag("beta1", "Decay rate of Adam's first moment of the norms of rows, in [0, 1)."),
            Flag("beta2", "Decay rate of its second moment, in [0, 1)."),
            Flag("eps", "Added to the root of the second moment."),
        ),
        state_depends_on=_SPLITS,
    ),
)
"""In the order of the docs."""

OPTIMIZERS = {row.name: row for row in _SPECS}
CLASSES: dict[str, type[Optimizer]] = {row.cls.__name__: row.cls for row in _SPECS}
LIKE_MUON = tuple(row.name for row in _SPECS if row.of_muon == MUON)
"""Optimizers with all of Muon's flags: their updates have Muon's size, and their weight decay may be L2."""
