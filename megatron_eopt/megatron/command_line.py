"""What our optimizers change in Megatron's command line."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_eopt.checkpoints.contents import TRACKER
from megatron_eopt.family import DEFAULT_TP_MODE, OPTIMIZERS
from megatron_eopt.megatron.given import TYPED, refuse_idle_of_megatrons
from megatron_eopt.megatron.run_flags import FLAGS, OF_OPTIMIZERS, RUN_FLAGS
from megatron_eopt.megatron.support.buffers import clear_where_refused
from megatron_eopt.megatron.support.facts import on, primary_of
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import EMERGING_OPTIMIZERS, list_optimizers
from megatron_eopt.screen import refuse_once
from megatron_eopt.settings.values import Check


class _Noted(argparse.Action):
    """Notes that its flag was typed, which a value equal to the default does not tell."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values, option_string)
        setattr(namespace, TYPED, (*getattr(namespace, TYPED), self.dest))


def amend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let Megatron's parser know our optimizers, and :data:`~megatron_eopt.megatron.run_flags.FLAGS`."""
    actions = parser._option_string_actions  # argparse has no public way to look an argument up
    optimizer = actions["--optimizer"]
    # those of emerging-optimizers know neither shards nor checkpoints of Megatron
    theirs = [name for name in optimizer.choices or () if name not in EMERGING_OPTIMIZERS]
    optimizer.choices = [*theirs, *list_optimizers()]
    actions["--muon-tp-mode"].default = DEFAULT_TP_MODE
    parser.set_defaults(**{TYPED: ()})
    parser.usage = "%(prog)s [FLAGS], which --help lists"  # theirs is 700 lines, before the error
    parser.error = functools.partial(refuse_once, parser)  # type: ignore[method-assign]
    group = parser.add_argument_group("megatron_eopt")
    for flag in FLAGS:
        if flag.name not in actions:
            group.add_argument(flag.name, dest=flag.dest, help=flag.help, **flag.options)
    for flag in (*OF_OPTIMIZERS, *RUN_FLAGS):
        taken = actions.get(flag.name)
        if taken is None:  # of a later Megatron
            continue
        taken.__class__ = type("Noted", (_Noted, type(taken)), {})
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


def _refuse_random_weights(args: argparse.Namespace) -> None:
    """Refuse a ``--load`` without a checkpoint, unless the run saves there.

    Megatron would begin with random weights.
    """
    # where one may be, too; slime, which has the last one, loads a folder of Hugging Face's itself
    elsewhere = on(args, "pretrained_checkpoint", "non_persistent_ckpt_type", "enable_msc", "hf_checkpoint")
    if args.load is None or elsewhere or loads_its_own(args):
        return
    if not Path(args.load, TRACKER).exists():
        raise ValueError(
            f"--load {args.load} has no {TRACKER}, and the run would begin with random weights: name a folder that a "
            f"run saved to, or leave --load out. A first run may load from the folder of its --save"
        )


def loads_its_own(args: Any) -> bool:
    """Whether a run loads from the folder that it saves to."""
    named = on(args, "load") and on(args, "save")
    return named and Path(args.save).resolve() == Path(args.load).resolve()


@around
def validated(validate: Original, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
    """Replaces ``validate_args``: refuses what Megatron overlooks, and hides three flags.

    - The optimizer's name under an FSDP: Megatron asserts sgd or adam for Megatron-FSDP, and for others no FSDP and
      ckpt_format torch or torch_dist; and makes ``use_distributed_optimizer``, which Megatron-FSDP needs, layer-wise.
    - ``--optimizer-cpu-offload``: Megatron's is an Adam that steps on the CPU, and wants flags for that.
    - ``--qk-clip``: Megatron wants Transformer Engine. Attention that records its largest logits will do (``qk_clip``).
    """
    refuse_idle_of_megatrons(args)
    name = args.optimizer
    hidden: dict[str, Any] = {}
    if builds(args):
        _refuse_random_weights(args)
        hidden = {"optimizer_cpu_offload": False, "qk_clip": False}
        if args.qk_clip and (not 0 < args.qk_clip_alpha < 1 or not args.qk_clip_threshold > 0):
            raise ValueError(
                f"--qk-clip needs an alpha between 0 and 1 and a threshold above 0, got --qk-clip-alpha "
                f"{args.qk_clip_alpha} and --qk-clip-threshold {args.qk_clip_threshold}"
            )
    fsdp = on(args, "use_torch_fsdp2", "use_megatron_fsdp")
    if fsdp and name not in ("adam", "sgd") and not name.startswith("dist_"):  # which means the layer-wise optimizer
        hidden["optimizer"] = "adam"
    given = {key: getattr(args, key) for key in hidden}
    vars(args).update(hidden)
    try:
        result = validate(args, *rest, **kwargs)
    finally:
        vars(args).update(given)
    if primary_of(args) in EMERGING_OPTIMIZERS:
        clear_where_refused(args)
    return result


def builds(args: argparse.Namespace) -> bool:
    """Whether the run's optimizer is in this package's table."""
    return primary_of(args) in OPTIMIZERS
