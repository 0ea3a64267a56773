"""The table of the package's optimizers: one row for each, and everything that lists optimizers is derived from it.

Derived are the entries of the registry, flags, the builders of plain torch, names of the package, support and doctor
lists, what a checkpoint must hold, the tables of the docs (``python scripts/tables.py`` writes them), and the
parameters of the tests that hold for every optimizer. A new optimizer needs its file, its import here, and its row.
"""

from typing import Literal, get_args

from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon as TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.hyperball import MuonHyperball as MuonHyperball
from megatron_eopt.optimizers.lion import Lion as Lion
from megatron_eopt.optimizers.lion import Signum as Signum
from megatron_eopt.optimizers.mars_muon import MarsMuon as MarsMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon as TensorParallelMuon
from megatron_eopt.optimizers.polar_grad import PolarGrad as PolarGrad
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion as Scion
from megatron_eopt.optimizers.soap import SOAP as SOAP
from megatron_eopt.optimizers.spectron import Spectron as Spectron
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.kernels import KERNELS
from megatron_eopt.orthogonalize.scale import PRESETS
from megatron_eopt.parallel.records import TpMode
from megatron_eopt.row import ADAMW_RMS, Flag, Row

SplitName = Literal["default", "none", "all", "per_head"]
"""How fused parameters are split: as Megatron does; not at all; wherever it is geometrically right; and into heads."""

DEFAULT_TP_MODE: TpMode = "auto"  # of runs of Megatron, of plans, and of the optimizers that plain torch builds by name

ITERATION = tuple(
    "split_qkv fp32_matmul_prec coefficient_type num_ns_steps tp_mode cuda_graphs data_parallel_group plan_rates "
    "symmetric_products workspace offload_fraction momentum_dtype".split()
)
"""Settings of Muon that say how matrices are orthogonalized and exchanged."""

MOMENTUM = ("momentum", "momentum_warmup", "nesterov")
MUON = (*ITERATION, *MOMENTUM, *"scale_mode extra_scale_factor use_decoupled_weight_decay weight_decay_method".split())
"""All settings of Muon."""

FAMILY = (
    Row(
        name="muon",
        cls=TensorParallelMuon,
        of_muon=MUON,
        flags=(
            Flag("momentum", "Decay rate of the momentum, in [0, 1); papers have 0.95.", default=0.9, megatrons=True),
            Flag("nesterov", "Look ahead (--muon-use-nesterov on Megatron-Core 0.17).", default=False, megatrons=True),
            Flag("scale_mode", "How the size of an update follows from the shape.", megatrons=True),
            Flag(
                "extra_scale_factor",
                "Multiplies the update; 0.2 with spectral gives updates the size of AdamW's.",
                megatrons=True,
            ),
            Flag(
                "preset",
                "Size of the updates: sets the scale mode and the extra factor.",
                default=None,
                choices=tuple(PRESETS),
                shared=True,  # those whose updates have a size of their own refuse it
            ),
            Flag("num_ns_steps", "Newton-Schulz steps.", shared=True, megatrons=True),
            Flag(
                "coefficient_type",
                "Coefficients of the Newton-Schulz steps.",
                choices=get_supported_coefficient_types(),
                shared=True,
                megatrons=True,
            ),
            Flag(
                "fp32_matmul_prec",
                "Precision of the Newton-Schulz products: bf16 (low, medium), TF32 (high) or fp32 (highest).",
                shared=True,
                megatrons=True,
            ),
            Flag(
                "tp_mode",
                "How sharded matrices are orthogonalized: all exact but blockwise, which takes each shard for a matrix "
                "and is Megatron's default. auto takes the cheapest exact way for each shape. Where none is named, a "
                "resume keeps that of its checkpoint.",
                default=DEFAULT_TP_MODE,
                shared=True,
                megatrons=True,
            ),
            Flag(
                "symmetric_products",
                "Kernel of symmetric products; without it that of the checkpoint, else the fastest of the run, timed "
                "at start on a GPU.",
                choices=tuple(KERNELS),
                shared=True,
            ),
            Flag("split_qkv", "Orthogonalize fused projections whole.", default=True, shared=True, megatrons=True),
            Flag(
                "split",
                "Matrices of fused parameters: as Megatron splits them, none of their own, all, or heads as well.",
                default="default",
                choices=get_args(SplitName),
                shared=True,
            ),
            *(
                Flag(name, what, default=None, kind=float, field=f"matrix_{name}", shared=True)
                for name, what in (
                    ("lr", "Largest learning rate of the matrices; --lr is for the rest."),
                    ("min_lr", "Smallest learning rate of the matrices."),
                    ("weight_decay", "Weight decay of the matrices."),
                )
            ),
            Flag(
                "share_over_dp",
                "Data-parallel ranks share the work on matrices, but for those of experts.",
                default=False,
                shared=True,
            ),
            Flag(
                "scalar_optimizer",
                "Optimizer of the parameters that are no matrices; lion on Megatron-Core 0.19.",
                default="adam",
                choices=("adam", "lion"),
                shared=True,
                megatrons=True,
            ),
            Flag(
                "momentum_warmup",
                "Steps in which the momentum grows from 0.85 to its value; 0 for none.",
                shared=True,
                metavar="STEPS",
            ),
            Flag(
                "momentum_from_adam",
                "Where --load has a checkpoint of Adam's, its first moment is the momentum.",
                default=False,
                shared=True,
            ),
        ),
    ),
    Row(
        name="adaptive_muon",
        cls=TensorParallelAdaptiveMuon,
        plain=False,
        of_muon=MUON,
        flags=(
            Flag("moment2_method", "What the second moment is taken of."),
            Flag("beta2", "Decay rate of the second moment, in [0, 1)."),
            Flag("eps", "Bounds the division by the second moment from below."),
            Flag("align_rms", "Leave adamuon's update as large as the division makes it."),
        ),
        state_settings=({"moment2_method": "normuon"}, {"moment2_method": "namo"}),
        state_depends_on=("adaptive_muon_moment2_method",),
    ),
    Row(
        name="spectron",
        cls=Spectron,
        of_muon=ITERATION,
        flags=(
            Flag("rank", "Rank of the two factors of every weight."),
            Flag("momentum_beta", "Decay rate of the factors' momenta, in [0, 1); the paper has 0.95."),
            Flag("num_power_iterations", "Power iterations of a step, for the spectral norms."),
        ),
        state_depends_on=("spectron_rank", "muon_split"),
    ),
    Row(
        name="soap",
        cls=SOAP,
        vectors=True,
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
            Flag("max_dim", "The longest side that has a factor and a basis."),
            Flag(
                "share_over_dp",
                "Every data-parallel rank keeps and computes all, as where Megatron deals out "
                "parameters and where checkpoints are not torch_dist.",
                default=True,
            ),
        ),
        state_depends_on=("soap_max_dim", "muon_split"),
        update_rms=ADAMW_RMS,
    ),
    Row(
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
    Row(
        name="signum",
        cls=Signum,
        owns="all",
        flags=(Flag("momentum", "Decay rate of the momentum, in [0, 1); 0 is signSGD."),),
        update_rms=1.0,
    ),
    Row(
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
        state_settings=({"betas": (0.4, 0.95)},),
    ),
    Row(
        name="scion",
        cls=Scion,
        of_muon=(*ITERATION, "momentum_warmup"),
        flags=(
            Flag("momentum", "Decay rate of the momentum, in [0, 1); one minus the paper's alpha."),
            Flag("radius", "Radius of the ball of every matrix."),
            Flag("constrained", "Bound the steps alone, not the matrices."),
        ),
    ),
    Row(
        name="polargrad",
        cls=PolarGrad,
        of_muon=(*ITERATION, "momentum_warmup"),
        flags=(Flag("momentum", "Decay rate of the momentum, in [0, 1)."),),
    ),
    Row(
        name="muon_hyperball",
        cls=MuonHyperball,
        of_muon=(*ITERATION, *MOMENTUM),
        state_depends_on=("muon_split",),
    ),
    Row(
        name="mars_muon",
        cls=MarsMuon,
        of_muon=MUON,
        flags=(Flag("gamma", "Strength of the correction, at least 0; 0 leaves Muon of clipped gradients."),),
    ),
)
"""In the order of the docs."""

ROWS = {row.name: row for row in FAMILY}
CLASSES: dict[str, type[Optimizer]] = {row.cls.__name__: row.cls for row in FAMILY}
LIKE_MUON = tuple(row.name for row in FAMILY if row.of_muon == MUON)
"""Optimizers that all of Muon's flags hold for: their updates have Muon's size, and their weight decay may be L2."""
