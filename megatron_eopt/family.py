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
from megatron_eopt.row import ADAMW_RMS, Flag, Row, arxiv

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
        sentence="the update of a matrix is the orthogonal factor of its momentum, scaled by its shape "
        "([how it works](how-it-works.md))",
        papers=f"[Jordan et al.](https://kellerjordan.github.io/posts/muon/), {arxiv('2502.16982')}",
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
        begin_with="--muon-momentum 0.95 --muon-nesterov --muon-preset match_adamw --muon-lr 0.018 "
        "--muon-min-lr 0.0018",
        begin_why="updates the size of AdamW's, so that its rate is one to begin with; more was better here",
    ),
    Row(
        name="adaptive_muon",
        cls=TensorParallelAdaptiveMuon,
        sentence="Muon whose orthogonal factor is normalized by a second moment: AdaMuon, NorMuon or NAMO "
        "([adaptive Muon](adaptive.md))",
        papers=arxiv("2507.11005", "2510.05491", "2602.17080"),
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
        begin_with="--adaptive-muon-moment2-method normuon --muon-momentum 0.95 --muon-nesterov --muon-preset "
        "match_adamw --muon-lr 0.018 --muon-min-lr 0.0018",
        begin_why="as Muon",
        refuses="with normuon and namo `--muon-tp-mode blockwise`; with namo decay that is not decoupled",
    ),
    Row(
        name="spectron",
        cls=Spectron,
        sentence="every weight is the product `A B^T` of two factors of low rank, which take orthogonalized steps "
        "that change the product by at most about `lr` in spectral norm",
        papers=arxiv("2602.12429"),
        of_muon=ITERATION,
        flags=(
            Flag("rank", 64, "Rank of the two factors of every weight."),
            Flag("momentum_beta", 0.9, "Decay rate of the factors' momenta, in [0, 1); the paper has 0.95."),
            Flag("num_power_iterations", 1, "Power iterations of a step, for the spectral norms."),
        ),
        state_depends_on=("spectron_rank", "muon_split"),
        begin_with="--spectron-rank 32 --spectron-momentum-beta 0.95 --muon-lr 0.06 --muon-min-lr 0.006",
        begin_why="the paper's momentum, and its rank: a quarter of the short side, which is 128 here",
        refuses="a rank above the short side of a matrix; `blockwise`; in the first step a weight that is zero or not "
        "finite; another rank than the checkpoint's",
    ),
    Row(
        name="soap",
        cls=SOAP,
        sentence="Adam in the eigenbases of Shampoo's two factors, the averages of `g g^T` and `g^T g`",
        papers=f"{arxiv('2409.11321')}, KL factors {arxiv('2509.03378')}",
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
        begin_with="--soap-precondition-frequency 10 --adam-beta1 0.95 --adam-beta2 0.95 --muon-lr 0.003 "
        "--muon-min-lr 0.0003",
        update_rms=ADAMW_RMS,
        refuses="`--muon-split none` for fused parameters whose rows follow the tensor-parallel ranks (gate and up): "
        "its bases of rows would fit no other number of ranks",
    ),
    Row(
        name="lion",
        cls=Lion,
        sentence="every entry moves by the sign of an interpolation of momentum and gradient",
        papers=arxiv("2302.06675"),
        owns="all",
        betas="lion",
        flags=(
            Flag("beta1", 0.95, "Weight of the momentum in the update, in [0, 1).", megatrons=True),
            Flag("beta2", 0.98, "Decay rate of the momentum, in [0, 1).", megatrons=True),
        ),
        begin_with="--weight-decay 0.1 --lr 0.0006 --min-lr 0.00006",
        begin_why="3 to 10 times less than AdamW's rate, as much more decay",
        update_rms=1.0,
    ),
    Row(
        name="signum",
        cls=Signum,
        sentence="every entry moves by the sign of the momentum: Lion with one beta",
        papers=arxiv("1802.04434"),
        owns="all",
        flags=(Flag("momentum", 0.9, "Decay rate of the momentum, in [0, 1); 0 is signSGD."),),
        begin_with="--weight-decay 0.1 --lr 0.0006 --min-lr 0.00006",
        begin_why="as Lion",
        update_rms=1.0,
    ),
    Row(
        name="schedule_free_adamw",
        cls=ScheduleFreeAdamW,
        sentence="AdamW at a constant rate: gradients are taken at one point, and what is evaluated is the average of "
        "the path of another",
        papers=arxiv("2405.15682"),
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
        begin_with="--lr-decay-style constant --lr-warmup-iters 0 --schedule-free-adamw-warmup-steps 10 --lr 0.002 "
        "--min-lr 0.002",
        begin_why="its own warm-up in the place of Megatron's",
        update_rms=ADAMW_RMS,
        state_settings=({"betas": (0.4, 0.95)},),
        averages=True,
        refuses="`--use-distributed-optimizer`, `--no-save-optim`, `--ckpt-format torch`: the average could not be "
        "made or saved",
    ),
    Row(
        name="scion",
        cls=Scion,
        sentence="steps to the boundary of a ball of the operator norm from RMS to RMS, which takes the place of "
        "weight decay",
        papers=arxiv("2502.07529"),
        of_muon=(*ITERATION, "momentum_warmup"),
        flags=(
            Flag("momentum", 0.9, "Decay rate of the momentum, in [0, 1); one minus the paper's alpha."),
            Flag("radius", 50.0, "Radius of the ball of every matrix."),
            Flag("constrained", True, "Bound the steps alone, not the matrices."),
        ),
        begin_with="--scion-radius 50 --muon-lr 0.0027 --muon-min-lr 0.00027",
        begin_why="the paper's radius for hidden matrices",
        refuses="a weight decay of its matrices (`--muon-weight-decay`), a radius that is not above 0, constrained an "
        "`lr` outside [0, 1]",
    ),
    Row(
        name="polargrad",
        cls=PolarGrad,
        sentence="Muon whose update is as large as the nuclear norm of the momentum, so that steps become smaller "
        "with the gradients",
        papers=arxiv("2505.21799"),
        of_muon=(*ITERATION, "momentum_warmup"),
        flags=(Flag("momentum", 0.95, "Decay rate of the momentum, in [0, 1)."),),
        begin_with="--muon-coefficient-type polar_express --muon-num-ns-steps 8 --muon-lr 0.1 --muon-min-lr 0.01",
        begin_why="steps that leave singular values at 1, as its size is a sum of them",
        refuses="`blockwise`, whose norms would be those of shards",
    ),
    Row(
        name="muon_hyperball",
        cls=MuonHyperball,
        sentence="Muon on spheres: every matrix keeps the Frobenius norm that it starts with, and a step turns it by "
        "an angle of about `lr`",
        papers="Wen et al., Fantastic Pretraining Optimizers 2.1: Hyperball Optimization (2025)",
        of_muon=(*ITERATION, *MOMENTUM),
        state_depends_on=("muon_split",),
        begin_with="--muon-momentum 0.95 --muon-nesterov --muon-lr 0.06 --muon-min-lr 0.006",
        begin_why="the rate is the angle of a step",
        refuses="a weight decay of its matrices; `blockwise`; in the first step a matrix whose norm is zero or not "
        "finite",
    ),
    Row(
        name="mars_muon",
        cls=MarsMuon,
        sentence="Muon with MARS's variance reduction: before the momentum takes it, each gradient is corrected by its "
        "difference from the previous one, and clipped",
        papers=arxiv("2411.10438"),
        of_muon=MUON,
        flags=(Flag("gamma", 0.025, "Strength of the correction, at least 0; 0 leaves Muon of clipped gradients."),),
        begin_with="--muon-momentum 0.95 --muon-preset match_adamw --muon-lr 0.018 --muon-min-lr 0.0018",
        begin_why="as Muon, without its look-ahead",
        refuses="`blockwise`, whose norms would be those of shards",
    ),
)  # fmt: skip
"""In the order of the docs."""

ROWS = {row.name: row for row in FAMILY}
CLASSES: dict[str, type[Optimizer]] = {row.cls.__name__: row.cls for row in FAMILY}
LIKE_MUON = tuple(row.name for row in FAMILY if row.of_muon == MUON)
"""Optimizers that all of Muon's flags hold for: their updates have Muon's size, and their weight decay may be L2."""
