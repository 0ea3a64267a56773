"""What all ranks agree on: results, settings and parameters."""

import argparse
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import basename
from typing import Any, cast

import megatron.core
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_eopt.megatron.model_parameters import ModelParameter
from megatron_eopt.parallel.agreement import compare, hashed, versions
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.collectives import gather_numbers, lowest, values_of
from megatron_eopt.routing import OverrideError
from megatron_eopt.routing.entries import Entry
from megatron_eopt.settings.groups import is_plain, plain

# Texts that are no choice are names and paths, which a node may have of its own, but for those of the data's order.
_DATA = ("split", "step_batch_size_schedule", "data_path", "train_data_path", "valid_data_path", "test_data_path")
_PATHS = ("_dir", "_file", "optimizer_overrides")  # ends of names in a config


def log_rank0(message: str) -> None:
    """Print a line of this package on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"megatron_eopt: {message}", flush=True)


def distinct[T](value: T) -> list[T]:
    """The distinct values of all ranks, in rank order.

    Every rank sends a hash, and the first of each hash its value. ``value`` is plain data without sets: equal values
    have an equal ``repr``.
    """
    world = cast(ProcessGroup, dist.group.WORLD)
    first: dict[tuple[int, ...], int] = {}
    for rank, words in enumerate(gather_numbers(hashed(value), world)):
        first.setdefault(tuple(words), rank)
    return [value] if len(first) == 1 else values_of([*first.values()], value, world)


def union(texts: Iterable[str]) -> list[str]:
    """The distinct texts of all ranks together, sorted."""
    return sorted(set().union(*distinct(sorted(set(texts)))))


def refuse_different(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError on all ranks where settings differ."""
    start_alike = "start all with the same flags, files and packages"
    _refuse("settings", compare(settings, cast(ProcessGroup, dist.group.WORLD)), start_alike)


def refuse_different_parameters(parameters: Sequence[ModelParameter], groups: Any) -> None:
    """Raise a ValueError where ranks of a group have different parameters.

    Data-parallel and tensor-parallel ranks have the same names, global shapes and dtypes, and freeze the same; pipeline
    stages and experts differ. All ranks call it, and those of a group without a difference go on.
    """
    dense: dict[str, str] = {}
    experts: dict[str, str] = {}
    for parameter in parameters:
        tensor = parameter.tensor
        kind = "trainable" if tensor.requires_grad else "frozen"
        of_kind = experts if is_expert(tensor) else dense
        of_kind[parameter.name] = f"{kind}, {tensor.dtype}, {parameter.info.shape}"
    lines = []
    for name, here in (("dp_cp", dense), ("tp", dense), ("expt_dp", experts), ("expt_tp", experts)):
        group = getattr(groups, name, None)
        if group is not None:  # a difference is raised at the end: ranks of the next group wait for this one
            in_order = {f"parameter {number}": parameter for number, parameter in enumerate(here)}
            lines += compare(here | in_order, group)
    _refuse("parameters", lines, "build them in the same order, and freeze the same, on all ranks")


def _refuse(what: str, lines: Sequence[str], instead: str) -> None:
    if lines:
        first = f"ranks have different {what}, and would train a wrong model: {instead}"
        raise ValueError("\n".join([first, *lines[:8]]))


def from_rank_0[T](find: Callable[[], T]) -> T:
    """What the first rank finds; its failure is raised everywhere."""
    sent: list[Any] = [None, None]  # what was found, and why nothing was
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            sent[0] = find()
        except Exception as error:
            failure = error
            sent[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(sent, src=0)
    found, reason = sent
    if reason is not None:
        raise failure or RuntimeError(f"the first rank failed: {reason}")
    return cast(T, found)


def on_all_ranks[T](decide: Callable[[], T]) -> T:
    """What this rank decides; all raise a ValueError of one."""
    mistake = None
    try:
        decided = decide()
    except ValueError as error:
        mistake = (str(error), isinstance(error, OverrideError))
    if not lowest(torch.tensor([mistake is None]).int(), cast(ProcessGroup, dist.group.WORLD)):
        for of_rank in distinct(mistake):
            if of_rank is not None:
                message, of_overrides = of_rank
                raise (OverrideError if of_overrides else ValueError)(message)
    return decided


def of_command_line(args: Any) -> dict[str, Any]:
    """Numbers and choices of flags, and the data's file names."""
    from megatron.training import arguments

    flags: dict[str, Any] = {}
    read = {"local_rank"}
    for action in arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))._actions:
        if action.dest in read:  # the first of those that set the same counts
            continue
        read.add(action.dest)
        value = getattr(args, action.dest, None)
        is_text = action.nargs != 0 and action.choices is None and action.type in (None, str)
        if action.dest in _DATA and action.dest.endswith("_path"):
            value = [basename(word) for word in value or ()]
        elif is_text and action.dest not in _DATA:
            continue
        if is_plain(value):
            flags[action.option_strings[0]] = value
    return flags


def of_packages() -> dict[str, Any]:
    """Versions of the packages that compute a step."""
    found = {**versions(), "megatron-core": megatron.core.__version__}
    try:
        found["transformer-engine"] = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        found["transformer-engine"] = "not installed"
    return {f"the version of {package}": version for package, version in found.items()}


def of_config(config: Any) -> dict[str, Any]:
    """The plain values of a config of Megatron's, without paths."""
    name = type(config).__name__
    return {f"{name}.{key}": x for key, x in vars(config).items() if is_plain(x) and not key.endswith(_PATHS)}


def of_entries(entries: Sequence[Entry]) -> dict[str, Any]:
    """The overrides of a run by number: what is set, not from where."""
    found: dict[str, Any] = {"the number of overrides": len(entries)}
    for number, entry in enumerate(entries):
        found[f"override {number}"] = (str(entry.selector), plain(entry.settings))
    return found
