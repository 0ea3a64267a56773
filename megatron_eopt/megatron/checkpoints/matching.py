"""Match optimizers and groups with a checkpoint's, by parameter names.

Megatron goes by position, which differs at another expert-parallel size, after another optimizer, or where a pipeline
stage has no parameter of a group. So the state of each optimizer is loaded under a name of its own, and each finds its
groups in the common state of the whole checkpoint. Users' settings come from the run that loads, and a difference is
reported; what the run itself computed (step counts, the schedule's position) comes from the checkpoint.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.states import BLOCK, blocks_of, holding
from megatron_eopt.family import CLASSES
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import say
from megatron_eopt.megatron.parameters import torch_optimizers
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.state import NO_SETTINGS
from megatron_eopt.routing.patterns import compressed as boxes_of
from megatron_eopt.settings.records import MODIFIERS, names_of

OPTIMIZERS = "optimizers of megatron_eopt"  # no name of Megatron's, so nothing is merged into it
MAIN_PARAMETERS = "fp32_from_fp16_params"

_TORCHS = ("Adam", "AdamW")

# Key of a parameter -> runs [first, last + 1] of the layers and experts stacked under it; [[0, 1]] where none are.
Names = dict[str, list[list[int]]]

# Where the schedule stands: Megatron's scheduler computes them anew after a load, a loop without one goes on from them.
_SCHEDULED = frozenset({"lr", "weight_decay"})
_SCHEDULE = frozenset({"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult"})  # what it starts from
# What a user gives to single groups: where a run no longer has one of them, it goes on without.
_OVERRIDES = frozenset(
    {
        *("optimizer", "betas", "eps", "momentum", "num_ns_steps", "coefficient_type", "scale_mode"),
        *("extra_scale_factor", *names_of(MODIFIERS)),
    }
)
_STRUCTURE = frozenset({"is_expert_parallel", "default_config"})  # of the layout, and of how Megatron logs


def compressed(names: Iterable[tuple[str, int]]) -> Names:
    """Names, each a key and an index, in short form."""
    indices: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for key, index in names:
        indices[key].add((index,))
    return {key: [list(run) for (runs,) in boxes_of(indices[key]) for run in runs] for key in sorted(indices)}


def merged(names: Iterable[Names]) -> Names:
    """The names of all ranks."""
    of_keys = (of_key for of_rank in names for of_key in of_rank.items())
    return compressed((key, index) for key, runs in of_keys for first, end in runs for index in range(first, end))


def has(names: Names, key: str, index: int) -> bool:
    """Whether a parameter is among the names."""
    return any(first <= index < end for first, end in names.get(key, ()))


def settings_after_load(
    current: dict[str, Any], saved: Sequence[dict[str, Any]], carried: Set[str], from_checkpoint: bool = False
) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """A group's settings, and changes: name -> (checkpoint's, now).

    ``saved`` are the checkpoint's groups that have its parameters. ``from_checkpoint`` takes its schedule. A ValueError
    refuses saved groups that differ in what is ``carried`` over, which the optimizer computes.
    """
    result = {key: value for key, value in current.items() if key not in NO_SETTINGS}
    if not saved:
        return result, {}
    then = {key: [group[key] for group in saved if key in group] for group in saved for key in group}
    gone = then.keys() - current.keys() - NO_SETTINGS
    carried = carried | {"step"} | (gone - _OVERRIDES - _SCHEDULE)
    for key in sorted(carried & then.keys()):
        if any(value != then[key][0] for value in then[key]):
            raise ValueError(
                f"parameters of one group come from groups of the checkpoint with different {key!r}: {then[key]}; keep "
                f"the groups of the run that saved, or pass --no-load-optim to start with fresh state"
            )
        result[key] = then[key][0]
    changed = {key: (then[key][0], "the optimizer's own") for key in sorted(gone & _OVERRIDES)}
    for key in result.keys() & then.keys() - carried - _SCHEDULED - _STRUCTURE:
        if any(_differs(result[key], value) for value in then[key]):
            changed[key] = (then[key][0], result[key])
    if from_checkpoint:
        result |= {key: changed.pop(key)[0] for key in _SCHEDULE & changed.keys()}
    if not _SCHEDULE & changed.keys():
        result |= {key: saved[0][key] for key in _SCHEDULED & saved[0].keys()}
    return result, changed


def settings_of_group(optimizer: Optimizer, number: int, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """:func:`settings_after_load` of one group; changes are printed."""
    carried = optimizer.carried_settings if isinstance(optimizer, BaseOptimizer) else frozenset()
    from_checkpoint = bool(getattr(releases.training_args(), "use_checkpoint_opt_param_scheduler", False))
    settings, changed = settings_after_load(optimizer.param_groups[number], saved, carried, from_checkpoint)
    if changed:
        listed = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in sorted(changed.items()))
        group = f"group {number} of {type(optimizer).__name__}"
        say(f"{group} goes on with other settings than the checkpoint has: {listed}")
    return settings


def schedules(optimizer: Any) -> list[list[dict[str, Any]]]:
    """What the schedules of all groups start from, by torch optimizers."""
    groups = (each.param_groups for each in torch_optimizers(optimizer))
    return [[{key: group[key] for key in _SCHEDULE & group.keys()} for group in of_one] for of_one in groups]


def restore_schedules(optimizer: Any, of_run: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Give all groups back what :func:`schedules` returned; changes are printed."""
    changed = 0
    for each, before in zip(torch_optimizers(optimizer), of_run, strict=True):
        for group, kept in zip(each.param_groups, before, strict=True):
            changed += any(group.get(key) != value for key, value in kept.items())
            group.update(kept)
    if changed:
        say(
            f"--override-opt-param-scheduler: Megatron gave {changed} parameter groups other rates in the load, and "
            f"they are again as the flags and overrides of this run say"
        )


def _differs(a: Any, b: Any) -> bool:
    # a list comes back from a file where a tuple went in
    return list(a) != list(b) if isinstance(a, list | tuple) and isinstance(b, list | tuple) else bool(a != b)


def torch_state(state_dict: dict[str, Any]) -> Any:
    """The torch optimizer's state dict; in bf16 it is nested."""
    return state_dict.get("optimizer", state_dict)


def taken_out(requested: dict[Any, Any]) -> dict[Any, Any]:
    """The request, with our optimizers by number under :data:`OPTIMIZERS`."""

    def without(state_dict: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key: without(value) if any(holding(value, BLOCK)) else value
            for key, value in state_dict.items()
            if not (isinstance(value, dict) and BLOCK in value)
        }

    return without(requested) | {OPTIMIZERS: dict(enumerate(holding(requested, BLOCK)))}


def put_back(requested: dict[Any, Any], loaded: dict[Any, Any], common: Any) -> None:
    """Bring what :func:`taken_out` loaded into the requested form, in place."""
    optimizers = loaded.pop(OPTIMIZERS, {})
    numbers = itertools.count()

    def put(value: Any, rest: Any) -> Any:
        if not any(holding(value, BLOCK)):
            return rest
        if BLOCK in value:
            return _completed(value, optimizers.get(next(numbers), {}), common)
        rest = rest if isinstance(rest, dict) else {}
        return {key: put(inner, rest.get(key)) for key, inner in value.items()}

    loaded |= {key: put(value, loaded.get(key)) for key, value in requested.items() if any(holding(value, BLOCK))}


def _completed(requested: dict[Any, Any], loaded: dict[Any, Any], common: Any) -> dict[Any, Any]:
    """An optimizer's state dict with groups, step count and manifest."""
    theirs = list(holding(common, "param_groups"))
    blocks = blocks_of(common)
    inner: dict[str, Any] = {
        "state": dict(torch_state(loaded).get("state", {})),
        "param_groups": [group for each in theirs for group in each["param_groups"]],
    }
    step = _steps_made(requested[BLOCK]["optimizer"], blocks, theirs)
    if step is not None:
        inner["state"]["common_step"] = step
    block = {"state": loaded.get(BLOCK, {}).get("state", {})}
    if blocks:
        block["groups"] = [group for each in blocks for group in each["groups"]]
    for each in reversed(blocks):  # the first that has something counts
        found = each | each["settings"]
        block |= {key: found[key] for key in ("tp_mode", "manifest", "average") if key in found}
    if "optimizer" not in requested:
        return inner | {BLOCK: block}
    main = loaded.get(MAIN_PARAMETERS, [])
    if isinstance(main, list):
        filled = iter(main)
        main = [next(filled) if group else [] for group in requested.get(MAIN_PARAMETERS, [])]
    return {"optimizer": inner, MAIN_PARAMETERS: main, BLOCK: block}


def _steps_made(name: str, blocks: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Any:
    """How many steps a class of optimizers has made; None where nothing says so."""
    counts = []
    for block in blocks:
        if block["optimizer"] == name or (_is_adam(name) and _is_adam(block["optimizer"])):
            counts.append(block["common_step"])
    if not blocks and _is_adam(name):
        counts = [each.get("state", {}).get("common_step") for each in theirs]
    for count in counts:
        if count is not None:
            return count
    if name in _TORCHS:  # the distributed optimizer saves its count with the groups
        for group in (group for each in theirs for group in each["param_groups"] if "step" in group):
            return torch.tensor(float(group["step"]))
    return None


def _is_adam(name: str) -> bool:
    """Whether a class counts steps as Adam does: torch's, Transformer Engine's, Apex's, or a user's."""
    return "Adam" in name and name not in CLASSES
