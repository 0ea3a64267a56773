"""What a run was given, by flags and by its config, and what of that nothing reads."""

import dataclasses
import re
from argparse import Namespace
from collections.abc import Collection, Iterable
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_eopt.family import MUON, OPTIMIZERS
from megatron_eopt.flags import CliFlag
from megatron_eopt.from_config import constructor_arguments
from megatron_eopt.megatron.run_flags import FLAGS, OF_OPTIMIZERS, RUN_FLAGS
from megatron_eopt.megatron.support.facts import on, primary_of
from megatron_eopt.orthogonalize.choices import did_you_mean
from megatron_eopt.registry import EMERGING_OPTIMIZERS, class_named, list_optimizers, takes_matrices
from megatron_eopt.settings.records import SECOND_MOMENT, names_of

TYPED = "flags_typed"  # on parsed arguments: destinations of the flags below that were typed
_OF_SCHEDULER = "lr_decay_style"  # not of the optimizer: where rates end
_RATES = ("lr", "weight_decay")  # arguments of optimizers that groups have, and no config
_MEGATRONS = ("adam", "sgd")


def typed_flags(args: Any) -> list[CliFlag]:
    """The flags that were typed; none of arguments that our parser has not parsed."""
    typed = getattr(args, TYPED, ())
    return [flag for flag in (*OF_OPTIMIZERS, *RUN_FLAGS) if flag.dest in typed]


def complete(config: Any, args: Any) -> None:
    """Give a config the flags for which Megatron has no fields.

    Frameworks make the config of parsed arguments in ways of their own, and copy Megatron's fields. A ``ValueError`` is
    for flags that were typed, and of which the config says something else.
    """
    if args is None:
        return
    contradicting = []
    for flag in typed_flags(args):
        typed = getattr(args, flag.dest)
        value = getattr(config, flag.dest, typed)
        if value != typed:
            contradicting.append(f"{flag.name} was typed, for {flag.dest}={typed!r}, and the config has {value!r}")
    if contradicting:
        raise ValueError(f"{'; '.join(contradicting)}: say it in one place, the command line or the config")
    for dest in (*(flag.dest for flag in FLAGS), _OF_SCHEDULER):
        if hasattr(args, dest) and not hasattr(config, dest):
            setattr(config, dest, getattr(args, dest))


def set_flags(config: Any) -> list[CliFlag]:
    """The flags of which a config has another value than by default."""
    found = []
    for flag in (*OF_OPTIMIZERS, *RUN_FLAGS):
        defaults = (None, flag.default, getattr(type(config), flag.dest, None))  # the field's may be another
        if getattr(config, flag.dest, None) not in defaults:
            found.append(flag)
    return found


def without_effect(name: str, flags: Iterable[CliFlag], built: Collection[str]) -> list[str]:
    """What to say of flags that none of the optimizers built reads; ``name`` is the run's."""
    all_known = name in (*OPTIMIZERS, *_MEGATRONS)  # a user's optimizer may read any flag of Megatron's
    names = (*_MEGATRONS, *OPTIMIZERS)
    reading = {name, *built}  # a run whose own optimizer has no parameters is told so, and not of flags
    ignored: dict[str, list[str]] = {}  # by those that read them
    for flag in flags:
        if (flag.megatrons and not all_known) or any(_reads(each, flag) for each in reading):
            continue
        readers = "an optimizer of this package"
        if flag.optimizer or flag.execution:
            readers = f"--optimizer {' or '.join(each for each in names if _reads(each, flag))}"
        ignored.setdefault(readers, []).append(flag.name)
    return [
        f"{', '.join(those)} without effect, with --optimizer {name}: leave out, or take {readers}"
        for readers, those in ignored.items()
    ]


def _reads(name: str, flag: CliFlag) -> bool:
    if flag.execution and name in OPTIMIZERS:
        return OPTIMIZERS[name].takes("execution")
    if not flag.optimizer:
        return name not in _MEGATRONS
    if flag.optimizer in (name, OPTIMIZERS[name].betas if name in OPTIMIZERS else None):
        return True
    if name in OPTIMIZERS and flag.setting in (*MUON, *names_of(SECOND_MOMENT)):
        return flag.optimizer == "muon" and flag.setting in OPTIMIZERS[name].of_muon
    return flag.shared and takes_matrices(name)


def _idle_beside(config: Any, args: Any) -> list[str]:
    """What to say of flags that have no effect beside others."""
    lines = []
    split = getattr(config, "muon_split", "default")
    if split != "default" and not getattr(config, "muon_split_qkv", True):
        lines.append(f"--muon-no-split-qkv without effect, with --muon-split {split}: leave one of the two out")
    if args is not None and on(config, "muon_momentum_from_adam"):
        unread = "--muon-momentum-from-adam without effect, with"
        if not on(args, "load"):
            lines.append(f"{unread}out --load: add it, with a checkpoint of Adam's, or leave the flag out")
        for dest in ("no_load_optim", "finetune"):
            if on(args, dest):
                lines.append(f"{unread} --{dest.replace('_', '-')}, which loads no moments: leave one of the two out")
    return lines


def idle_flags(config: Any, args: Any, built: Collection[str]) -> list[str]:
    """Errors of typed flags without effect; ``built`` are the optimizers that have parameters on any rank."""
    return [*without_effect(primary_of(config), typed_flags(args), built), *_idle_beside(config, args)]


def idle_settings(config: Any, args: Any, built: Collection[str]) -> list[str]:
    """Warnings of what was set on a config, and not typed, without effect."""
    typed = typed_flags(args)
    flags = [flag for flag in set_flags(config) if flag not in typed]
    return [*without_effect(primary_of(config), flags, built), *_scheduled_average(config, built)]


def typed_of(message: str, args: Any) -> str:
    """The typed flags of settings that a message names."""
    words = re.findall(r"\w+", message)
    names = [flag.name for flag in typed_flags(args) if flag.setting in words]
    return f" (typed: {', '.join(names)})" if names else ""


def refuse_idle_of_megatrons(args: Namespace) -> None:
    """Refuse our flags, and those of other optimizers, in a run with adam or sgd."""
    if args.optimizer in _MEGATRONS and hasattr(args, TYPED):
        found = dict.fromkeys([*typed_flags(args), *set_flags(args)])
        flags = [flag for flag in found if flag.optimizer or not flag.megatrons]  # theirs of any optimizer, they read
        lines = without_effect(args.optimizer, flags, [args.optimizer])
        if lines:
            raise ValueError("\n".join(lines))


def warnings_of(config: Any, args: Any = None) -> list[str]:
    """Warnings of settings that no optimizer here reads, and of a late activation."""
    read = {flag.dest for flag in OF_OPTIMIZERS}
    warnings = []
    if args is not None and primary_of(args) == primary_of(config) and not hasattr(args, TYPED):
        warnings.append(
            f"activate() came after Megatron had parsed its arguments, so its own defaults hold, such as "
            f"--muon-tp-mode {config.muon_tp_mode}, and flags of this package are unknown: call it before, or start "
            f"the script by python -m megatron_eopt.run"
        )
    for field in dataclasses.fields(OptimizerConfig):
        value = getattr(config, field.name, None)
        if "muon" in field.name and field.name not in read and value != field.default:
            what = "without effect: a setting of Megatron's Muon, unknown here; leave it out"
            warnings.append(f"{field.name}={value} {what}")
    warnings += _unknown(config)
    fraction = getattr(config, "optimizer_offload_fraction", 0.0)
    if fraction not in (0.0, 1.0) and not on(config, "optimizer_cpu_offload"):  # the defaults, of config and flag
        warnings.append(f"optimizer_offload_fraction={fraction} without effect: add --optimizer-cpu-offload")
    if not getattr(config, "decoupled_weight_decay", True):
        warnings.append(
            "decoupled_weight_decay=False without effect on all optimizers but adam, as in Megatron: they decay as "
            "their weight_decay_method says, which is decoupled by default; an override can set it to l2"
        )
    return warnings


def _unknown(config: Any) -> list[str]:
    """Warnings of attributes that were set on a config, and that no field or setting is called."""
    if primary_of(config) not in OPTIMIZERS:  # a user's may read anything
        return []
    fields = {*vars(OptimizerConfig())}  # it sets more than its fields
    fields |= getattr(type(config), "__dataclass_fields__", {}).keys()
    fields |= {flag.dest for flag in FLAGS}
    read = {_OF_SCHEDULER}
    for name in list_optimizers():
        for argument in constructor_arguments(EMERGING_OPTIMIZERS[name].optimizer_cls):
            if argument.name not in _RATES:
                read |= {argument.name, f"{name}_{argument.name}"}
    meant = {f"{flag.optimizer}_{flag.setting}": flag.dest for flag in FLAGS}
    lines = []
    for name, value in vars(config).items():
        if name not in fields | read and not name.startswith("_"):
            hint = f", did you mean {meant[name]!r}?" if name in meant else did_you_mean(name, fields)
            lines.append(f"{name}={value!r} of the config without effect: no field or setting is called that{hint}")
    return lines


def _scheduled_average(config: Any, built: Iterable[str]) -> list[str]:
    """A warning of a schedule of rates for an optimizer that needs none."""
    style = getattr(config, "lr_decay_style", None)
    if style in (None, "constant") or config.lr == config.min_lr:
        return []
    return [
        f"{name} needs no schedule of the learning rate, and --lr-decay-style {style} lets it fall to --min-lr: take "
        f"--lr-decay-style constant, and its own warmup_steps"
        for name in built
        if class_named(name).train_weight_key is not None
    ]
