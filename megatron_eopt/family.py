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
from megatron_eopt.row import ADAMW_RMS, Flag, Row

SplitName = Literal["default", "none", "all", "per_head"]
"""How fused parameters are split: as Megatron does; not at all; wherever it is geometrically right; and into heads."""

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
            Flag("momentum", 0.9, "Decay rate of the momentum, in [0, 1); papers have 0.95.", megatrons=True),
            Flag("nesterov", False, "Look ahead (--muon-use-nesterov on Megatron-Core 0.17).", megatrons=True),
            Flag("scale_mode", "spectral", "How the size of an update follows from the shape.", megatrons=True),
            Flag(
                "extra_scale_factor", 1.0,
                "Multiplies the update; 0.2 with spectral gives updates the size of AdamW's.", megatrons=True,
            ),
            Flag(
                "preset", None, "Size of the updates: sets the scale mode and the extra factor.",
                choices=tuple(PRESETS), shared=True,  # those whose updates have a size of their own refuse it
            ),
            Flag("num_ns_steps", 5, "Newton-Schulz steps.", shared=True, megatrons=True),
            Flag(
                "coefficient_type", "quintic", "Coefficients of the Newton-Schulz steps.",
                choices=get_supported_coefficient_types(), shared=True, megatrons=True,
            ),
            Flag(
                "fp32_matmul_prec", "medium",
                "Precision of the Newton-Schulz products: bf16 (low, medium), TF32 (high) or fp32 (highest).",
                shared=True, megatrons=True,
            ),
            Flag(
                "tp_mode", "auto", "How sharded matrices are orthogonalized: all exact but blockwise, which takes "
                "each shard for a matrix and is Megatron's default. auto takes the cheapest exact way for each shape. "
                "Where none is named, a resume keeps that of its checkpoint.", shared=True, megatrons=True,
            ),
            Flag(
                "symmetric_products", None, "Kernel of symmetric products; without it that of the checkpoint, else the "
                "fastest of the run, timed at start on a GPU.", choices=tuple(KERNELS), shared=True,
            ),
            Flag("split_qkv", True, "Orthogonalize fused projections whole.", shared=True, megatrons=True),
            Flag(
                "split", "default",
                "Matrices of fused parameters: as Megatron splits them, none of their own, all, or heads as well.",
                choices=get_args(SplitName), shared=True,
            ),
            *(
                Flag(name, None, what, kind=float, field=f"matrix_{name}", shared=True)
                for name, what in (
                    ("lr", "Largest learning rate of the matrices; --lr is for the rest."),
                    ("min_lr", "Smallest learning rate of the matrices."),
                    ("weight_decay", "Weight decay of the matrices."),
                )
            ),
            Flag(
                "share_over_dp", False, "Data-parallel ranks share the work on matrices, but for those of experts.",
                shared=True,
            ),
            Flag(
                "scalar_optimizer", "adam",
                "Optimizer of the parameters that are no matrices; lion on Megatron-Core 0.19.",
                choices=("adam", "lion"), shared=True, megatrons=True,
            ),
            Flag(
                "momentum_warmup", 0, "Steps in which the momentum grows from 0.85 to its value; 0 for none.",
                shared=True, metavar="STEPS",
            ),
            Flag(
                "momentum_from_adam", False,
                "Where --load has a checkpoint of Adam's, its first moment is the momentum.", shared=True,
            ),
        ),
    ),
    Row(
        name="adaptive_muon",
        cls=TensorParallelAdaptiveMuon,
        plain=False,
        of_muon=MUON,
        flags=(
            Flag("moment2_method", "adamuon", "What the second moment is taken of."),
            Flag("beta2", 0.95, "Decay rate of the second moment, in [0, 1)."),
            Flag("eps", 1e-8, "Bounds the division by the second moment from below."),
            Flag("align_rms", True, "Leave adamuon's update as large as the division makes it."),
        ),
        state_settings=({"moment2_method": "normuon"}, {"moment2_method": "namo"}),
        state_depends_on=("adaptive_muon_moment2_method",),
    ),
    Row(
        name="spectron",
        cls=Spectron,
        of_muon=ITERATION,
        flags=(
            Flag("rank", 64, "Rank of the two factors of every weight."),
            Flag("momentum_beta", 0.9, "Decay rate of the factors' momenta, in [0, 1); the paper has 0.95."),
            Flag("num_power_iterations", 1, "Power iterations of a step, for the spectral norms."),
        ),
        state_depends_on=("spectron_rank", "muon_split"),
    ),
    Row(
        name="soap",
        cls=SOAP,
        vectors=True,
        betas="adam",
        flags=(
            Flag("shampoo_beta", 0.95, "Decay rate of the factors, in [0, 1)."),
            Flag(
                "precondition_frequency", 1, "Steps from one refreshing of the bases to the next, counted from the "
                "first step as the authors do: 4 refreshes them in steps 5, 9 and 13. From Python the default is 10.",
            ),
            Flag("use_kl_shampoo", True, "Factors as Shampoo has them, which is the default from Python."),
            Flag(
                "basis_of", "previous",
                "Whether a gradient is seen in a basis made before it, as published, or with it.",
            ),
            Flag("basis_method", "qr", "How bases are refreshed."),
            Flag("max_dim", 10000, "The longest side that has a factor and a basis."),
            Flag(
                "share_over_dp", True, "Every data-parallel rank keeps and computes all, as where Megatron deals out "
                "parameters and where checkpoints are not torch_dist.",
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
            Flag("beta1", 0.95, "Weight of the momentum in the update, in [0, 1).", megatrons=True),
            Flag("beta2", 0.98, "Decay rate of the momentum, in [0, 1).", megatrons=True),
        ),
        update_rms=1.0,
    ),
    Row(
        name="signum",
        cls=Signum,
        owns="all",
        flags=(Flag("momentum", 0.9, "Decay rate of the momentum, in [0, 1); 0 is signSGD."),),
        update_rms=1.0,
    ),
    Row(
        name="schedule_free_adamw",
        cls=ScheduleFreeAdamW,
        owns="all",
        betas="adam",
        flags=(
            Flag("warmup_steps", 0, "Steps in which its rate grows; take --lr-decay-style constant with it."),
            Flag(
                "variant", "kempnerforge", "The weights of the average: the rate, or, as schedulefree, a power of the "
                "largest rate so far; schedulefree also decays by y.",
            ),
            Flag("r", 0.0, "For schedulefree: power of a step's number in the weight of the step."),
            Flag("weight_lr_power", 2.0, "For schedulefree: power of the largest rate in the weight of a step."),
        ),
        update_rms=ADAMW_RMS,
        state_settings=({"betas": (0.4, 0.95)},),
        averages=True,
    ),
    Row(
        name="scion",
        cls=Scion,
        of_muon=(*ITERATION, "momentum_warmup"),
        flags=(
            Flag("momentum", 0.9, "Decay rate of the momentum, in [0, 1); one minus the paper's alpha."),
            Flag("radius", 50.0, "Radius of the ball of every matrix."),
            Flag("constrained", True, "Bound the steps alone, not the matrices."),
        ),
    ),
    Row(
        name="polargrad",
        cls=PolarGrad,
        of_muon=(*ITERATION, "momentum_warmup"),
        flags=(Flag("momentum", 0.95, "Decay rate of the momentum, in [0, 1)."),),
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
        flags=(Flag("gamma", 0.025, "Strength of the correction, at least 0; 0 leaves Muon of clipped gradients."),),
    ),
)  # fmt: skip
"""In the order of the docs."""

ROWS = {row.name: row for row in FAMILY}
CLASSES: dict[str, type[Optimizer]] = {row.cls.__name__: row.cls for row in FAMILY}
LIKE_MUON = tuple(row.name for row in FAMILY if row.of_muon == MUON)
"""Optimizers that all of Muon's flags hold for: their updates have Muon's size, and their weight decay may be L2."""
