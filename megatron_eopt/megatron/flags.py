"""The flags that our optimizers have and Megatron has not."""

from dataclasses import dataclass
from typing import Any, get_args

from megatron_eopt.megatron.fused import SplitName
from megatron_eopt.optimizers.schedule_free import Variant
from megatron_eopt.optimizers.second_moment import Moment2Method
from megatron_eopt.optimizers.soap import Gradients
from megatron_eopt.optimizers.soap_math import BasisMethod
from megatron_eopt.orthogonalize.scale import PRESETS


@dataclass(frozen=True)
class Flag:
    """A flag that Megatron has not: named ``--OPTIMIZER-SETTING``.

    Attributes:
        optimizer: the registered name; empty for a flag that speaks of all.
        setting: what the optimizer's ``__init__`` calls it, where it is for that.
        options: of argparse.
        negated: whether the flag turns the setting off, and is ``--OPTIMIZER-no-SETTING``.
        attribute: of the config, where the constructor would take it for an argument of its own by the usual name.
        shared: whether it speaks of every optimizer of matrices, like Megatron's own flags of Muon's iteration.
    """

    optimizer: str
    setting: str
    options: dict[str, Any]
    negated: bool = False
    attribute: str = ""
    shared: bool = False

    @property
    def name(self) -> str:
        """As it is typed."""
        words = (self.optimizer, "no" if self.negated else "", self.setting)
        return "--" + "-".join(filter(None, words)).replace("_", "-")

    @property
    def dest(self) -> str:
        """As Megatron's config has it, or would have it."""
        return self.attribute or "_".join(filter(None, (self.optimizer, self.setting)))


FLAGS = (
    Flag(
        "muon",
        "lr",
        {"type": float, "help": "Largest rate of what it owns; --lr is for the rest."},
        attribute="matrix_lr",
        shared=True,
    ),
    Flag(
        "muon",
        "min_lr",
        {"type": float, "help": "Smallest rate of what it owns."},
        attribute="matrix_min_lr",
        shared=True,
    ),
    Flag(
        "muon",
        "weight_decay",
        {"type": float, "help": "Weight decay of what it owns."},
        attribute="matrix_weight_decay",
        shared=True,
    ),
    Flag(
        "muon",
        "preset",
        {"choices": list(PRESETS), "help": "Size of the updates: sets --muon-scale-mode and its factor."},
        shared=True,  # those that have a size of their own refuse it
    ),
    Flag(
        "muon",
        "split",
        {
            "choices": get_args(SplitName),
            "default": "default",
            "help": "Fused parameters: as Megatron, as one matrix, as all the matrices in them, or heads, too.",
        },
        shared=True,
    ),
    Flag("", "optimizer_overrides", {"metavar": "FILE", "help": "Settings of single parameters, in YAML or JSON."}),
    Flag(
        "",
        "optimizer_manifest",
        {
            "choices": ("short", "full", "none"),
            "default": "short",
            "help": "Print who owns which parameter: a line for parameters that are alike, or one for each.",
        },
    ),
    Flag("", "optimizer_manifest_file", {"metavar": "FILE", "help": "Write that as JSON, too."}),
    Flag(
        "muon",
        "momentum_from_adam",
        {"action": "store_true", "help": "Where --load has a checkpoint of Adam's, its first moment is the momentum."},
        shared=True,
    ),
    Flag(
        "",
        "checksums",
        {"action": "store_false", "help": "Save no checksums in torch_dist checkpoints, and compare none on load."},
        negated=True,
    ),
    Flag(
        "",
        "check_replicas",
        {"action": "store_false", "help": "Do not compare parameters over data-parallel ranks before the first step."},
        negated=True,
    ),
    Flag(
        "adaptive_muon",
        "moment2_method",
        {"choices": get_args(Moment2Method), "default": "adamuon", "help": "What the second moment is taken of."},
    ),
    Flag("adaptive_muon", "beta2", {"type": float, "default": 0.95, "help": "Of the second moment, in [0, 1)."}),
    Flag("adaptive_muon", "eps", {"type": float, "default": 1e-8, "help": "Bounds the division by it from below."}),
    Flag(
        "adaptive_muon",
        "align_rms",
        {"action": "store_false", "help": "Leave adamuon's update as large as the division makes it."},
        negated=True,
    ),
    Flag("spectron", "rank", {"type": int, "default": 64, "help": "Of the factors that every weight becomes."}),
    Flag("spectron", "momentum_beta", {"type": float, "default": 0.9, "help": "Of the factors' momenta."}),
    Flag("spectron", "num_power_iterations", {"type": int, "default": 1, "help": "Of a step."}),
    Flag("soap", "shampoo_beta", {"type": float, "default": 0.95, "help": "Of its factors, in [0, 1)."}),
    Flag("soap", "precondition_frequency", {"type": int, "default": 1, "help": "Steps between refreshed bases."}),
    Flag("soap", "use_kl_shampoo", {"action": "store_false", "help": "Factors as Shampoo has them."}, negated=True),
    Flag(
        "soap",
        "basis_of",
        {
            "choices": get_args(Gradients),
            "default": "previous",
            "help": "Whether a gradient is seen in a basis made before it, as published, or with it.",
        },
    ),
    Flag(
        "soap", "basis_method", {"choices": get_args(BasisMethod), "default": "qr", "help": "How bases are refreshed."}
    ),
    Flag("soap", "max_dim", {"type": int, "default": 10000, "help": "The longest side that is preconditioned."}),
    Flag(
        "schedule_free_adamw",
        "warmup_steps",
        {"type": int, "default": 0, "help": "Steps in which its rate grows; take --lr-decay-style constant with it."},
    ),
    Flag(
        "schedule_free_adamw",
        "variant",
        {"choices": get_args(Variant), "default": "kempnerforge", "help": "Whose weights of the average."},
    ),
    Flag(
        "schedule_free_adamw", "r", {"type": float, "default": 0.0, "help": "Power of a step's number in its weight."}
    ),
    Flag("schedule_free_adamw", "weight_lr_power", {"type": float, "default": 2.0, "help": "Power of the rate there."}),
    Flag("signum", "momentum", {"type": float, "default": 0.9, "help": "In [0, 1)."}),
    Flag("scion", "momentum", {"type": float, "default": 0.9, "help": "In [0, 1); one minus the paper's alpha."}),
    Flag("scion", "radius", {"type": float, "default": 50.0, "help": "Of the ball of every matrix."}),
    Flag("scion", "constrained", {"action": "store_false", "help": "Bound steps alone, not matrices."}, negated=True),
    Flag("polargrad", "momentum", {"type": float, "default": 0.95, "help": "In [0, 1)."}),
)
"""A line each; one that a later Megatron has itself is left to it."""
