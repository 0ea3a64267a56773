"""What all ranks agree on: results, settings and kernels."""

import argparse
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os.path import basename
from typing import Any, cast

import megatron.core
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.parameters import ModelParameter
from megatron_eopt.optimizers import step_choice
from megatron_eopt.optimizers.base import KERNEL, BaseOptimizer
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.orthogonalize import timing
from megatron_eopt.orthogonalize.kernels import reason_against
from megatron_eopt.parallel.agreement import hashed, in_turns, lowest_of_all, versions
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.collectives import gather_numbers, lowest, values_of
from megatron_eopt.routing import OverrideError
from megatron_eopt.routing.entries import Entry
from megatron_eopt.settings.groups import is_plain, plain

# Texts that are no choice are names and paths, which a node may have of its own, but for those of the data's order.
_DATA = ("split", "step_batch_size_schedule", "data_path", "train_data_path", "valid_data_path", "test_data_path")
_PATHS = ("_dir", "_file", "optimizer_overrides")  # ends of names in a config


def say(message: str) -> None:
    """Print a line of this package on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"megatron_eopt: {message}", flush=True)


def distinct[T](value: T) -> list[T]:
    """The distinct values of all ranks, in rank order."""
    return list(by_first_rank(value).values())


def by_first_rank[T](value: T, group: ProcessGroup | None = None) -> dict[int, T]:
    """The distinct values of all ranks of a group, or the world, by first rank.

    Every rank sends a hash, and the first of each hash its value. ``value`` is plain data without sets: equal values
    have an equal ``repr``.
    """
    ranks = group or cast(ProcessGroup, dist.group.WORLD)
    first: dict[tuple[int, ...], int] = {}
    for rank, words in enumerate(gather_numbers(hashed(value), ranks)):
        first.setdefault(tuple(words), rank)
    if len(first) == 1:
        return {0: value}
    return dict(zip(first.values(), values_of([*first.values()], value, ranks), strict=True))


def union(texts: Iterable[str]) -> list[str]:
    """The distinct texts of all ranks together, sorted."""
    return sorted(set().union(*distinct(sorted(set(texts)))))


def refuse_different(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError on all ranks where settings differ."""
    lines = differences(by_first_rank(settings))
    if lines:
        what = (
            "ranks have different settings, and would train a wrong model: start all with the same flags, files and "
            "packages"
        )
        raise ValueError("\n".join([what, *lines[:8]]))


def refuse_different_parameters(parameters: Sequence[ModelParameter], groups: Any) -> None:
    """Raise a ValueError where ranks of a group have different parameters.

    Data-parallel and tensor-parallel ranks have the same names, global shapes and dtypes, and freeze the same; pipeline
    stages and experts differ. All ranks call it, and those of a group without a difference go on.
    """
    lines = []
    for names_of_groups, of_expert in ((("dp_cp", "tp"), False), (("expt_dp", "expt_tp"), True)):
        here = {}
        for parameter in parameters:
            if is_expert(parameter.tensor) == of_expert:
                kind = "trainable" if parameter.tensor.requires_grad else "frozen"
                here[parameter.name] = f"{kind}, {parameter.tensor.dtype}, {parameter.info.shape}"
        for name in names_of_groups:
            group = getattr(groups, name, None)
            if group is not None:  # a difference is raised at the end: ranks of the next group wait for this one
                lines += _different_parameters(here, group)
    if lines:
        what = (
            "ranks have different parameters, and would train a wrong model: build them in the same order, and freeze "
            "the same, on all ranks"
        )
        raise ValueError("\n".join([what, *lines[:8]]))


def _different_parameters(here: dict[str, str], group: ProcessGroup) -> list[str]:
    of_ranks = by_first_rank(here, group)
    names = dict.fromkeys(name for of_rank in of_ranks.values() for name in of_rank)
    by_name = {}
    by_position = {}
    for rank, of_rank in of_ranks.items():
        global_rank = dist.get_global_rank(group, rank)
        by_name[global_rank] = {name: of_rank.get(name, "missing") for name in names}
        by_position[global_rank] = {f"parameter {i}": name for i, name in enumerate(of_rank)}
    return differences(by_name) or differences(by_position)


def differences(of_ranks: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A line for each setting with two values."""
    known: dict[str, tuple[int, Any]] = {}
    lines: dict[str, str] = {}
    for rank, settings in of_ranks.items():
        for name, value in settings.items():
            first, before = known.setdefault(name, (rank, value))
            if repr(value) != repr(before):
                lines.setdefault(name, f"{name} is {before!r} on rank {first} and {value!r} on rank {rank}")
    return list(lines.values())


def from_rank_0[T](find: Callable[[], T]) -> T:
    """What the first rank finds; its failure is raised everywhere."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except Exception as error:
            found[1] = f"{type(error).__name__}: {error}"
            dist.broadcast_object_list(found, src=0)
            raise
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise RuntimeError(f"the first rank failed: {found[1]}")
    return cast(T, found[0])


def on_all_ranks[T](decide: Callable[[], T]) -> T:
    """What this rank decides; all raise a ValueError of one."""
    mistake = None
    try:
        decided = decide()
    except ValueError as error:
        mistake = (str(error), isinstance(error, OverrideError))
    all_well = lowest(torch.tensor([mistake is None]).int(), dist.group.WORLD)  # type: ignore[arg-type]
    for message, of_overrides in filter(None, [] if all_well else distinct(mistake)):
        raise (OverrideError if of_overrides else ValueError)(message)
    return decided


def choose_kernels(optimizers: Sequence[Any]) -> None:
    """Choose the kernels of symmetric products and of steps.

    The slowest rank counts, and a kernel that fails on one rank serves on none. Ranks without optimizers call it too: a
    checkpoint holds one choice, and replicas need not share a group. What is given is compiled in turns here, and
    checked by ``prepare``.
    """
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, BaseOptimizer)]
    choosing = [optimizer for optimizer in ours if KERNEL in optimizer.carried_settings]
    devices = [next(p for group in x.param_groups for p in group["params"]).device for x in choosing]
    timed = [x for x, device in zip(choosing, devices, strict=True) if timing.is_timed(device)]
    found = [(x.symmetric_products or x.param_groups[0].get(KERNEL), x.kernel_products()) for x in timed]
    # Muon's may be in 16 bits and SOAP's in fp32, where other kernels are fast, and not all are timed
    kinds = [1 + (precision == "ieee") if torch.float32 in dtypes else 0 for _, (_, dtypes, _, precision) in found]

    def slowest() -> torch.Tensor:
        times = torch.stack([timing.times([], [], torch.device("cpu"))] * 3)
        for kind, (given, products) in zip(kinds, found, strict=True):
            if given is None:
                times[kind] = times[kind].maximum(timing.times(*products))
            else:
                reason_against(given, *products)
        return times

    world = {"world": dist.group.WORLD} if dist.group.WORLD else {}
    choices = [timing.fastest(each) or "torch" for each in -lowest_of_all(-in_turns(slowest, world), world)]
    for kind, optimizer in zip(kinds, timed, strict=True):
        for group in optimizer.param_groups:
            group.setdefault(KERNEL, choices[kind])
    muons = [x for x in timed if isinstance(x, TensorParallelMuon)]
    free = [x for x in muons if x.step_kernels is None and step_choice.STEP_KERNELS not in x.param_groups[0]]

    def fault() -> str | None:
        reasons = (step_choice.reason_against(x, x._parameters()[0].device) for x in free)
        return next(filter(None, reasons), None)

    reason = in_turns(fault, world)
    form = step_choice.agreed_form(None, None, reason, partial(lowest_of_all, groups=world))
    for group in (group for optimizer in free for group in optimizer.param_groups):
        group.setdefault(step_choice.STEP_KERNELS, form)


def of_command_line(args: Any) -> dict[str, Any]:
    """Numbers and choices of flags, and the data's file names."""
    from megatron.training import arguments

    flags = {}
    actions = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))._actions
    for dest, action in {x.dest: x for x in reversed(actions)}.items():  # the first of those that set the same
        is_text = action.nargs != 0 and action.choices is None and action.type in (None, str)
        value = getattr(args, dest, None)
        if dest in _DATA and dest.endswith("_path"):
            value = [basename(word) for word in value or ()]
        if dest != "local_rank" and (not is_text or dest in _DATA) and is_plain(value):
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
    said = ((str(entry.selector), plain(entry.settings)) for entry in entries)
    return {"the number of overrides": len(entries)} | {f"override {n}": entry for n, entry in enumerate(said)}


def of_optimizers(optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Settings that all torch optimizers of a class here share."""
    values: dict[str, list[Any]] = {}
    for optimizer in optimizers:
        settings = plain(optimizer.defaults | (optimizer.settings() if isinstance(optimizer, BaseOptimizer) else {}))
        for key in settings.keys() - {"of_groups"}:
            values.setdefault(f"{type(optimizer).__name__} {key}", []).append(settings[key])
    return {name: alike[0] for name, alike in sorted(values.items()) if all(value == alike[0] for value in alike)}
