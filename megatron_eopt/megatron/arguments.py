"""What our optimizers change in Megatron's command line."""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from megatron_eopt.megatron.fused import SplitName
from megatron_eopt.optimizers.second_moment import Moment2Method
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.scale import PRESETS
from megatron_eopt.parallel.plan import TpMode
from megatron_eopt.registry import list_optimizers

DEFAULT_TP_MODE: TpMode = "duplicated"


@dataclass(frozen=True)
class Flag:
    """A flag that Megatron has not: named ``--OPTIMIZER-SETTING``.

    Attributes:
        optimizer: the registered name; empty for a flag that speaks of all.
        setting: what the optimizer's ``__init__`` calls it, where it is for that.
        options: of argparse.
        negated: whether the flag turns the setting off, and is ``--OPTIMIZER-no-SETTING``.
        attribute: of the config, where the constructor would take it for an argument of its own by the usual name.
    """

    optimizer: str
    setting: str
    options: dict[str, Any]
    negated: bool = False
    attribute: str = ""

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
    ),
    Flag("muon", "min_lr", {"type": float, "help": "Smallest rate of what it owns."}, attribute="matrix_min_lr"),
    Flag(
        "muon",
        "weight_decay",
        {"type": float, "help": "Weight decay of what it owns."},
        attribute="matrix_weight_decay",
    ),
    Flag(
        "muon",
        "preset",
        {"choices": list(PRESETS), "help": "Size of the updates: sets --muon-scale-mode and its factor."},
    ),
    Flag(
        "muon",
        "split",
        {
            "choices": get_args(SplitName),
            "default": "default",
            "help": "Fused parameters: as Megatron, as one matrix, as all the matrices in them, or heads, too.",
        },
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
)
"""A line each; one that a later Megatron has itself is left to it."""


def amend(parser: argparse.ArgumentParser, unavailable: frozenset[str] = frozenset()) -> argparse.ArgumentParser:
    """Let Megatron's parser know our optimizers, and refuse there what would fail in the first step.

    - ``--optimizer`` takes every registered name, and no longer those that nothing here can build.
    - ``--muon-coefficient-type`` takes the known names only.
    - ``--muon-fp32-matmul-prec`` also takes highest.
    - ``--muon-tp-mode`` is exact where the user gives none.
    - :data:`FLAGS` are added.

    Args:
        parser: Megatron's parser, with its arguments added.
        unavailable: names of optimizers to take out of ``--optimizer``.

    Returns:
        The same parser.
    """
    optimizer = _action(parser, "--optimizer")
    theirs = [name for name in optimizer.choices or () if name not in unavailable]
    optimizer.choices = theirs + [name for name in list_optimizers() if name not in unavailable.union(theirs)]
    _restrict(parser, "--muon-coefficient-type", get_supported_coefficient_types())
    _restrict(parser, "--muon-fp32-matmul-prec", get_args(MatmulPrecision))
    _restrict(parser, "--muon-tp-mode", get_args(TpMode))
    tp_mode = _action(parser, "--muon-tp-mode")
    tp_mode.default = DEFAULT_TP_MODE
    tp_mode.help = (
        "How matrices that are sharded over tensor-parallel ranks are orthogonalized: all exact but blockwise, which "
        "treats each shard as a matrix of its own. auto takes the cheapest exact way for each bucket of equal "
        "matrices. Default: %(default)s."
    )
    group = parser.add_argument_group("megatron_eopt")
    for flag in FLAGS:
        if flag.optimizer not in unavailable and flag.name not in parser._option_string_actions:
            group.add_argument(flag.name, dest=flag.dest, **flag.options)
    return parser


def with_flags(make_config: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``get_megatron_optimizer_config``: what our flags say gets onto a config without such a field."""

    @functools.wraps(make_config)
    def make_config_with_flags(args: argparse.Namespace) -> Any:
        config, overrides = make_config(args)
        _refuse_without_effect(args)
        _warn_without_effect(args)
        for flag in FLAGS:
            if hasattr(args, flag.dest) and not hasattr(config, flag.dest):
                setattr(config, flag.dest, getattr(args, flag.dest))
        return config, overrides

    return make_config_with_flags


def _refuse_without_effect(args: argparse.Namespace) -> None:
    """Refuse settings that were asked for by name, where nothing here builds the optimizer."""
    if getattr(args, "optimizer", None) in ("adam", "sgd") and getattr(args, "optimizer_overrides", None) is not None:
        raise ValueError(
            f"--optimizer-overrides {args.optimizer_overrides} would have no effect with --optimizer {args.optimizer}, "
            f"which Megatron builds by itself: take an optimizer of this package ({', '.join(list_optimizers())}), in "
            f"whose overrides 'optimizer: adam' gives parameters to Adam"
        )


def _warn_without_effect(args: argparse.Namespace) -> None:
    """Say which of Muon's flags, of those that Megatron has not, another optimizer leaves without effect."""
    if getattr(args, "optimizer", None) not in ("adam", "sgd") or getattr(args, "rank", 0) != 0:
        return
    given = [flag.name for flag in FLAGS if flag.optimizer and _is_given(flag, getattr(args, flag.dest, None))]
    if given:
        print(
            f"megatron_eopt: warning: {', '.join(given)} without effect, with --optimizer {args.optimizer}", flush=True
        )


def _is_given(flag: Flag, value: Any) -> bool:
    return value is False if flag.negated else value not in (None, False, flag.options.get("default"))


def _restrict(parser: argparse.ArgumentParser, flag: str, choices: tuple[Any, ...]) -> None:
    action = _action(parser, flag)
    action.choices = list(choices)
    action.help = f"{(action.help or '').split(' Valid types')[0]} One of {', '.join(choices)}."


def _action(parser: argparse.ArgumentParser, flag: str) -> argparse.Action:
    # argparse has no public way to look an argument up
    return parser._option_string_actions[flag]
