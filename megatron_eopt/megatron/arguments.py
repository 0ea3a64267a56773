"""What our optimizers change in Megatron's command line."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_eopt.checkpoints.contents import TRACKER
from megatron_eopt.family import DEFAULT_TP_MODE as DEFAULT_TP_MODE
from megatron_eopt.family import MUON, OPTIMIZERS, Flag
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import of_command_line, refuse_different
from megatron_eopt.megatron.config import PRESET_FLAGS_GIVEN, refuse_settings
from megatron_eopt.megatron.support.layout import clear_where_refused
from megatron_eopt.megatron.support.run import on, primary_of
from megatron_eopt.optimizers.weight_average import AverageRule
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.redirect import Original, Redirection, Redirections, around
from megatron_eopt.registry import EMERGING_OPTIMIZERS, list_optimizers, takes_matrices
from megatron_eopt.screen import refuse_once
from megatron_eopt.settings.of_class import misspelt
from megatron_eopt.settings.presets import PRESETS
from megatron_eopt.settings.records import MOMENTUM_DTYPES, SECOND_MOMENT, names_of
from megatron_eopt.settings.values import ABOVE_0, Check, count

_WARNED = "flags_warned_of"  # on arguments, of which a script may make configs more than once
OF_LAUNCHER = {"--cpu": "put it before the script, after -m megatron_eopt.run"}  # flags that are not the script's


def _check_average(called: str, rule: str) -> None:
    AverageRule.parse(rule)


RUN_FLAGS = (  # whatever the optimizer
    Flag("optimizer_overrides", "File with settings of single parameters, YAML or JSON.", default=None, metavar="FILE"),
    Flag(
        "optimizer_manifest",
        "Print which optimizer has which parameter: a line for those alike (short), for each (full), or none.",
        default="short",
        choices=("short", "full", "none"),
    ),
    Flag("optimizer_manifest_file", "Write that to this file, as JSON.", default=None, metavar="FILE"),
    Flag(
        "optimizer_workspace",
        "GiB that a step of Muon may take, beside its largest matrix.",
        default=Workspace.bytes / 2**30,
        metavar="GIB",
        check=ABOVE_0,
    ),
    Flag(
        "balanced_deal",
        "Let Megatron's distributed optimizer deal matrices by size, not by predicted time.",
        default=True,
    ),
    Flag(
        "optimizer_momentum_dtype",
        "Keep momenta of Muon and its relatives in bf16, rounded at random.",
        default="fp32",
        choices=tuple(MOMENTUM_DTYPES),
    ),
    Flag(
        "optimizer_weight_average",
        "Average the weights, and evaluate at the average: ema:DECAY, or tail:STEPS for the mean of the last steps.",
        default=None,
        metavar="RULE",
        check=_check_average,
    ),
    Flag(
        "save_weight_average",
        "Save that average as the model; the trained weights are in the optimizer state.",
        default=False,
    ),
    Flag(
        "optimizer_metrics_interval",
        "Steps from one measured step to the next; 0 for none, by default --log-interval.",
        default=None,
        kind=int,
        metavar="STEPS",
        check=count(0),
    ),
    Flag("checksums", "Save no checksums in torch_dist checkpoints, and compare none on load.", default=True),
    Flag(
        "trust_checkpoint_globals",
        "Classes and functions, with commas between, that checkpoints may name besides Megatron's and torch's.",
        default=None,
        metavar="NAMES",
    ),
)
LATER = (  # flags of Megatron's since 0.20
    Flag("use_syrk", "", default=False, shared=True, megatrons=True, optimizer="muon"),
    Flag("split_glu", "", default=True, shared=True, megatrons=True, optimizer="muon"),
)
_KNOWN = (*(flag for row in OPTIMIZERS.values() for flag in row.flags), *LATER)  # of optimizers
FLAGS = (*(flag for flag in _KNOWN if not flag.megatrons), *RUN_FLAGS)


class _Noted(argparse.Action):
    """Notes that its flag was given, which a value equal to the default does not tell."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values, option_string)
        setattr(namespace, PRESET_FLAGS_GIVEN, (*getattr(namespace, PRESET_FLAGS_GIVEN), self.dest))


def amend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let Megatron's parser know our optimizers, and :data:`FLAGS`."""
    actions = parser._option_string_actions  # argparse has no public way to look an argument up
    optimizer = actions["--optimizer"]
    optimizer.type = _check_tested
    optimizer.choices = list(dict.fromkeys([*(optimizer.choices or ()), *list_optimizers()]))
    actions["--muon-tp-mode"].default = DEFAULT_TP_MODE
    parser.set_defaults(**{PRESET_FLAGS_GIVEN: ()})
    parser.usage = "%(prog)s [FLAGS], which --help lists"  # theirs is 700 lines, before the error
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    group = parser.add_argument_group("megatron_eopt")
    for flag in FLAGS:
        if flag.name not in actions:
            group.add_argument(flag.name, dest=flag.dest, help=flag.help, **flag.options)
    set_by_presets = set()
    for preset in PRESETS.values():
        set_by_presets |= {f"muon_{setting}" for setting in preset.settings}
        set_by_presets |= {f"soap_{setting}" for setting in preset.of_soap}
    for action in parser._actions:
        if action.dest in set_by_presets:
            action.__class__ = type("Noted", (_Noted, type(action)), {})
    for flag in (*_KNOWN, *RUN_FLAGS):
        taken = actions.get(flag.name)
        if taken is None:  # of a later Megatron
            continue
        if flag.megatrons and flag.choices:
            taken.choices = list(flag.choices)
            taken.help = flag.help
        if flag.check is not None and callable(taken.type) and not taken.choices:
            taken.type = _checked(taken.type, flag.check)
    return parser


def _checked(kind: Callable[[str], Any], check: Check) -> Callable[[str], Any]:
    """A type of argparse's that refuses what a setting cannot be."""

    @functools.wraps(kind)
    def parse(text: str) -> Any:
        value = kind(text)
        try:
            check("the value", value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return parse


def _check_tested(name: str) -> str:
    """Type of ``--optimizer``: refuses untested optimizers of emerging-optimizers."""
    if name in EMERGING_OPTIMIZERS and name not in list_optimizers():
        raise argparse.ArgumentTypeError(
            f"{name} is in Megatron's registry from the package emerging-optimizers, which knows neither shards nor "
            f"checkpoints of Megatron: take another one, or register an entry of yours under another name"
        )
    return name


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Replaces ``parser.error``: names the nearest flags, and tells torchrun."""
    refuse_once(parser, message + _meant(message, parser._option_string_actions))


def _meant(message: str, known: Iterable[str]) -> str:
    """What unknown flags may mean, if a message is of such."""
    _, unknown, words = message.partition("unrecognized arguments: ")
    given = [word.partition("=")[0] for word in words.split()] if unknown else []
    lines = [f"{flag} is the launcher's: {OF_LAUNCHER[flag]}" for flag in given if flag in OF_LAUNCHER]
    lines += [f"{flag}: did you mean {near}?" for flag, near in misspelt(given, known).items()]
    return "".join(f"\n{line}" for line in lines)


def _refuse_mistakes(args: argparse.Namespace) -> None:
    """Refuse what Megatron ends on without a reason, or overlooks."""
    if args.lr is not None and args.min_lr is not None and args.min_lr > args.lr:
        raise ValueError(
            f"--min-lr {args.min_lr} is above --lr {args.lr}: rates fall from --lr to --min-lr, so lower the one or "
            f"raise the other"
        )
    if builds(args) and _begins_anew(args):
        folder = Path(args.load)
        instead = "a folder that a run saved to"
        if folder.name.startswith("iter_"):
            instead = f"its parent, {folder.absolute().parent}, with --ckpt-step"
        raise ValueError(
            f"--load {folder} has no {TRACKER}, and the run would begin with random weights: name {instead}, or leave "
            f"--load out. A first run may load from the folder of its --save"
        )


def _begins_anew(args: argparse.Namespace) -> bool:
    """Whether ``--load`` has no checkpoint, nor will get one."""
    load = args.load
    elsewhere = on(args, "pretrained_checkpoint", "non_persistent_ckpt_type", "enable_msc")  # where one may be, too
    if load is None or elsewhere:
        return False
    return not loads_its_own(args) and not Path(load, TRACKER).exists()


def loads_its_own(args: Any) -> bool:
    """Whether a run loads from the folder that it saves to."""
    named = on(args, "load") and on(args, "save")
    return named and Path(args.save).resolve() == Path(args.load).resolve()


@around
def validated(validate: Original, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
    """Replaces ``validate_args``: refuses mistakes, and hides three flags.

    - The optimizer's name under an FSDP: Megatron asserts sgd or adam for Megatron-FSDP, and for others no FSDP and
      ckpt_format torch or torch_dist; and makes ``use_distributed_optimizer``, which Megatron-FSDP needs, layer-wise.
    - ``--optimizer-cpu-offload``: Megatron's is an Adam that steps on the CPU, and wants flags for that.
    - ``--qk-clip``: Megatron wants Transformer Engine. Attention that records its largest logits will do (``qk_clip``).
    """
    _refuse_mistakes(args)
    name = args.optimizer
    hidden: dict[str, Any] = {}
    changes = []
    if builds(args):
        hidden = {"optimizer_cpu_offload": False, "qk_clip": False}
        if args.qk_clip and (not 0 < args.qk_clip_alpha < 1 or not args.qk_clip_threshold > 0):
            raise ValueError(
                f"--qk-clip needs an alpha between 0 and 1 and a threshold above 0, got --qk-clip-alpha "
                f"{args.qk_clip_alpha} and --qk-clip-threshold {args.qk_clip_threshold}"
            )
    fsdp = on(args, "use_torch_fsdp2", "use_megatron_fsdp")
    if fsdp and name not in ("adam", "sgd") and not name.startswith("dist_"):  # which means the layer-wise optimizer
        hidden["optimizer"] = "adam"
        named = around(lambda show, title, args: show(title, argparse.Namespace(**vars(args) | {"optimizer": name})))
        reason = "the arguments that are printed name the optimizer of the run"
        changes.append(Redirection(validate.__module__, "_print_args", named, reason))
    given = {key: getattr(args, key) for key in hidden}
    vars(args).update(hidden)
    try:
        with Redirections(changes):
            result = validate(args, *rest, **kwargs)
    finally:
        vars(args).update(given)
    if builds(args):
        refuse_settings(args)
    if primary_of(args) in EMERGING_OPTIMIZERS:
        clear_where_refused(args)
    return result


@around
def with_flags(make_config: Original, args: argparse.Namespace) -> Any:
    """Replaces ``get_megatron_optimizer_config``: our flags reach the config."""
    if dist.is_initialized():  # else all ranks come again
        refuse_different(of_command_line(args))
    config, overrides = make_config(args)
    warnings = []
    if builds(args) and not hasattr(args, PRESET_FLAGS_GIVEN):
        warnings.append(
            f"activate() came after Megatron had parsed its arguments, so its own defaults hold, such as "
            f"--muon-tp-mode {args.muon_tp_mode}, and flags of this package are unknown: call it before, or start the "
            f"script by python -m megatron_eopt.run"
        )
    _refuse_unread(args)
    name = primary_of(args)
    if name not in EMERGING_OPTIMIZERS:  # else after overrides are resolved
        warnings += without_effect(args, [name])
    if getattr(args, "rank", 0) == 0 and not hasattr(args, _WARNED):
        for warning in warnings:
            print(f"megatron_eopt: warning: {warning}", flush=True)
    setattr(args, _WARNED, True)
    for flag in FLAGS:
        if hasattr(args, flag.dest) and not hasattr(config, flag.dest):
            setattr(config, flag.dest, getattr(args, flag.dest))
    # of the scheduler, not of the optimizer: whether overrides may let a weight decay change, and where rates end
    for dest in ("weight_decay_incr_style", "lr_decay_style"):
        setattr(config, dest, getattr(args, dest, None))
    return config, overrides


def unread(config: Any) -> list[str]:
    """Warnings of settings of Megatron's that no optimizer here reads."""
    read = {flag.dest for flag in _KNOWN}
    warnings = []
    for field in dataclasses.fields(releases.core_optimizer(".optimizer_config").OptimizerConfig):
        value = getattr(config, field.name, None)
        if "muon" in field.name and field.name not in read and value != field.default:
            what = "without effect: a setting of Megatron's Muon, unknown here; leave it out"
            warnings.append(f"{field.name}={value} {what}")
    fraction = getattr(config, "optimizer_offload_fraction", 0.0)
    if fraction not in (0.0, 1.0) and not on(config, "optimizer_cpu_offload"):  # the defaults, of config and flag
        warnings.append(f"optimizer_offload_fraction={fraction} without effect: add --optimizer-cpu-offload")
    if not getattr(config, "decoupled_weight_decay", True):
        warnings.append(
            "decoupled_weight_decay=False without effect on all optimizers but adam, as in Megatron: they decay as "
            "their weight_decay_method says, which is decoupled by default; an override can set it to l2"
        )
    return warnings


def builds(args: argparse.Namespace) -> bool:
    """Whether the run's optimizer is in this package's table."""
    return primary_of(args) in OPTIMIZERS


def _reads(name: str, flag: Flag) -> bool:
    if name == flag.optimizer:
        return True
    if name in OPTIMIZERS and flag.setting in (*MUON, *names_of(SECOND_MOMENT)):
        return flag.optimizer == "muon" and flag.setting in OPTIMIZERS[name].of_muon
    return flag.shared and takes_matrices(name)


def _refuse_unread(args: argparse.Namespace) -> None:
    """Refuse flags for all optimizers of a run that adam and sgd do not read."""
    if args.optimizer not in ("adam", "sgd"):
        return
    flags = {"optimizer_overrides": None, "optimizer_momentum_dtype": "fp32", "optimizer_weight_average": None}
    for name, default in flags.items():
        value = getattr(args, name, default)
        if value != default:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} would have no effect with --optimizer {args.optimizer}, which "
                f"Megatron builds by itself: leave it away, or take an optimizer of this package "
                f"({', '.join(sorted(OPTIMIZERS))})"
            )


def without_effect(args: argparse.Namespace, built: Collection[str]) -> list[str]:
    """Warnings of given flags that none of the optimizers built reads."""
    name = primary_of(args)
    # a user's optimizer may read any flag of Megatron's, whose defaults are others where activate() came too late
    all_known = name in (*OPTIMIZERS, "adam", "sgd") and hasattr(args, PRESET_FLAGS_GIVEN)
    ignored: dict[str, list[str]] = {}  # by those that read them
    for flag in _KNOWN:
        given = getattr(args, flag.dest, None) not in (None, flag.default)
        if given and (all_known or not flag.megatrons) and not any(_reads(each, flag) for each in built):
            readers = " or ".join(each for each in OPTIMIZERS if _reads(each, flag))
            ignored.setdefault(readers, []).append(flag.name)
    return [
        f"{', '.join(flags)} without effect, with --optimizer {name}: leave out, or take --optimizer {readers}"
        for readers, flags in ignored.items()
    ]
