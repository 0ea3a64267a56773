"""The table of optimizers.

From it follow the entries of the registry, flags, builders of plain torch, names of the package, lists of support and
of the doctor, what a checkpoint must hold, tables of the docs (``python scripts/tables.py``), and parameters of tests.
A new optimizer needs its file, its import here, and its row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any, Literal, get_args

from torch.optim.optimizer import Optimizer

from megatron_eopt.from_config import (
    execution_from,
    get_qkv_split_shapes,
    kwargs_from_config,
    symmetric_products_from,
)
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
from megatron_eopt.settings.groups import DECOUPLED
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
    Setting,
    names_of,
)
from megatron_eopt.settings.values import AT_LEAST_0, BELOW_1, Check
from megatron_eopt.step.base import BaseOptimizer

ADAMW_RMS = 0.2  # of the entries of a typical AdamW update, before the learning rate (arXiv 2502.16982, section 2.2)


@dataclass(frozen=True)
class Flag:
    """``--OPTIMIZER-SETTING``, or ``--OPTIMIZER-no-SETTING`` for the default True.

    Of a setting of the optimizer's constructor the record and the signature say what is left out here.
    """

    setting: str
    help: str = ""
    default: Any = Parameter.empty  # where Megatron's flag has another than the constructor, or a run knows more
    kind: type = str  # of a value without a default
    choices: tuple[str, ...] = ()
    field: str = ""  # of the config, where it has another name
    shared: bool = False  # by all optimizers of matrices that have the setting
    megatrons: bool = False  # Megatron has the flag itself, so that it is not added
    metavar: str | None = None
    check: Check | None = None  # which values it may have
    optimizer: str = ""  # filled in for the flags of a row; empty for a flag of the run

    def completed(self, optimizer: str, known: Mapping[str, Setting]) -> "Flag":
        """The flag of an optimizer, with what its settings say."""
        flag = replace(self, optimizer=optimizer)
        if self.setting not in known:
            return flag
        setting = known[self.setting]
        if flag.default is Parameter.empty:
            flag = replace(flag, default=setting.default)
        return replace(
            flag,
            help=flag.help or setting.help,
            choices=flag.choices or setting.choices,
            megatrons=flag.megatrons or (setting.megatrons and optimizer == "muon"),
            metavar=flag.metavar or setting.metavar,
            check=flag.check or setting.check,
        )

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
    of_muon: tuple[str, ...] = ()  # settings that it takes from Muon's flags
    betas: str = ""  # prefix of the flags for its betas and ``eps``
    flags: tuple[Any, ...] = ()  # given as flags, or as names of settings; then flags
    update_rms: float | None = None  # RMS of an update's entries, before the rate, where no matrix has one of its own

    def __post_init__(self) -> None:
        known = self.settings
        flags = [Flag(each) if isinstance(each, str) else each for each in self.flags]
        object.__setattr__(self, "flags", tuple(flag.completed(self.name, known) for flag in flags))

    @property
    def owns(self) -> Literal["matrices", "all"]:
        """The parameters that it updates in Megatron; Adam updates the rest."""
        return "all" if self.cls.elementwise else "matrices"

    @property
    def vectors(self) -> bool:
        """Whether it takes any shape, so that plain torch gives it all."""
        return self.cls.elementwise or getattr(self.cls, "takes", "") == "matrices and vectors"

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Arguments of the constructor, and what ``execution`` has."""
        known = settings_of(self.cls)
        if "execution" not in known:
            return known
        return {**known, **{setting.name: setting for setting in EXECUTION}}

    def takes(self, setting: str) -> bool:
        """Whether the optimizer has a setting."""
        return setting in self.settings

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
        if self.takes("execution"):
            kwargs["execution"] = execution_from(config, pg_collection)
        elif self.takes("symmetric_products"):
            kwargs |= symmetric_products_from(config)
        if not self.cls.decays_weights:
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
        return kwargs


SplitName = Literal["default", "none", "all", "per_head"]
"""How fused parameters are split: as Megatron does, not at all, into all their matrices, or also into heads."""

DEFAULT_TP_MODE: TpMode = "auto"  # of runs of Megatron, plans, and builders of plain torch

OF_ITERATION = (*names_of(ITERATION + EXECUTION), "split_qkv")
"""How Muon orthogonalizes and exchanges matrices."""

MUON = (*OF_ITERATION, *names_of(DECAY + MOMENTUM + SCALE + CAUTION + NORM + RELATIVE))
"""Settings of Muon that its flags give to relatives, too."""

_SHARED = (
    Flag(
        "preset",
        "Settings of a publication: the size of updates, and of some also momentum and Newton-Schulz steps.",
        default=None,
        choices=tuple(PRESETS),  # refused by those whose updates have a size of their own
    ),
    Flag("num_ns_steps"),
    Flag("coefficient_type", choices=get_supported_coefficient_types()),
    Flag("fp32_matmul_prec"),
    Flag("tp_mode", default=DEFAULT_TP_MODE),
    Flag("symmetric_products"),
    Flag("step_kernels"),
    Flag("cuda_graphs"),
    Flag("split_qkv", default=True),
    Flag(
        "split",
        "Matrices of fused parameters: as Megatron splits them, none of their own, all, or heads as well.",
        default="default",
        choices=get_args(SplitName),
    ),
    Flag("lr", "Largest learning rate of the matrices; --lr is for the rest.", None, float, field="matrix_lr"),
    Flag("min_lr", "Smallest learning rate of the matrices.", None, float, field="matrix_min_lr", check=AT_LEAST_0),
    Flag("weight_decay", "Weight decay of the matrices.", None, float, field="matrix_weight_decay"),
    Flag(
        "share_over_dp",
        "Data-parallel ranks share the work on matrices, but for those of experts.",
        default=False,
    ),
    Flag(
        "scalar_optimizer",
        "Optimizer of the parameters that are no matrices.",
        default="adam",
        choices=("adam", "lion"),
        megatrons=True,
    ),
    *map(Flag, names_of(CAUTION + NORM + RELATIVE)),
    Flag(
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
    Flag("share_over_dp", default=True),
)

_SPECS = (
    OptimizerSpec(
        name="muon",
        cls=TensorParallelMuon,
        of_muon=MUON,
        flags=(
            Flag("momentum", "Decay rate of the momentum, in [0, 1); papers have 0.95.", default=0.9),
            Flag("nesterov", default=False),
            *names_of(SCALE),
            *(replace(flag, shared=True) for flag in _SHARED),
            *names_of(SECOND_MOMENT),
        ),
    ),
    OptimizerSpec(
        name="adaptive_muon",
        cls=TensorParallelAdaptiveMuon,
        of_muon=MUON,
        flags=(Flag("moment2_method", "What the second moment is taken of."), "beta2", "eps", "align_rms"),
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
            Flag(
                "precondition_frequency",
                "Steps from one refresh of the bases to the next: 4 refreshes them in steps 5, 9 and 13. From Python "
                "the default is 10.",
                default=1,
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
            Flag("share_over_dp", default=True),
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
            Flag(
                "beta1",
                "Weight of the momentum in the update, in [0, 1).",
                default=0.95,
                megatrons=True,
                check=BELOW_1,
            ),
            Flag("beta2", "Decay rate of the momentum, in [0, 1).", default=0.98, megatrons=True, check=BELOW_1),
        ),
        update_rms=1.0,
    ),
    OptimizerSpec(
        name="signum",
        cls=Signum,
        flags=(Flag("momentum", "Decay rate of the momentum, in [0, 1); 0 is signSGD."),),
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
            Flag("momentum", "Decay rate of the momentum, in [0, 1); one minus the paper's alpha."),
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
            Flag("momentum", "Decay rate of what an update takes from the momentum, in [0, 1)."),
        ),
    ),
    OptimizerSpec(
        name="dion2",
        cls=Dion2,
        of_muon=("split_qkv", "num_ns_steps", "coefficient_type", "fp32_matmul_prec", "symmetric_products"),
        flags=(
            "fraction",
            Flag("momentum", "What selected rows keep of their momentum, in [0, 1)."),
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
