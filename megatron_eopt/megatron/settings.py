"""The settings that have to be the same on every rank of a run: of its command line, its config and its optimizers."""

import argparse
from collections.abc import Iterable, Sequence
from os.path import basename
from typing import Any

from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.group_settings import is_plain, plain
from megatron_eopt.overrides import Entry

# Texts that are no choice are names and paths, which a node may have of its own, but for those of the data's order.
_DATA = ("split", "step_batch_size_schedule", "data_path", "train_data_path", "valid_data_path", "test_data_path")
_PATHS = ("_dir", "_file", "optimizer_overrides")  # ends of names in a config


def of_command_line(args: Any) -> dict[str, Any]:
    """The numbers and choices of Megatron's flags and of ours, and the data; of its paths the last part alone."""
    from megatron.training import arguments

    found = {}
    actions = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))._actions
    for dest, action in {each.dest: each for each in reversed(actions)}.items():  # the first of those that set the same
        is_text = action.nargs != 0 and action.choices is None and action.type in (None, str)
        value = getattr(args, dest, None)
        if dest in _DATA and dest.endswith("_path"):
            value = [basename(word) for word in value or ()]
        if dest != "local_rank" and (not is_text or dest in _DATA) and is_plain(value):
            found[action.option_strings[0]] = value
    return found


def of_config(config: Any) -> dict[str, Any]:
    """What a config of Megatron's says, but for paths."""
    name = type(config).__name__
    return {f"{name}.{key}": x for key, x in vars(config).items() if is_plain(x) and not key.endswith(_PATHS)}


def of_entries(entries: Sequence[Entry]) -> dict[str, Any]:
    """The overrides of a run and their mistakes, by number, from whatever file."""
    said = ((str(each.selector), plain(each.settings), each.mistakes) for each in entries)
    return {"the number of overrides": len(entries)} | {f"override {n}": each for n, each in enumerate(said)}


def of_optimizers(optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """What torch optimizers have for all of their groups, as far as those of one class on this rank have it alike."""
    values: dict[str, list[Any]] = {}
    for each in optimizers:
        own = plain(each.defaults | (each.settings() if isinstance(each, BaseOptimizer) else {}))
        for key in own.keys() - {"of_groups"}:
            values.setdefault(f"{type(each).__name__} {key}", []).append(own[key])
    return {name: alike[0] for name, alike in sorted(values.items()) if all(each == alike[0] for each in alike)}
