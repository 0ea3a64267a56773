"""Match optimizers and groups with a checkpoint's, by parameter names.

Megatron goes by position, which differs at another expert-parallel size, after another optimizer, or where a pipeline
stage has no parameter of a group. So the state of each optimizer is loaded under a name of its own, and each finds its
groups in the common state of the whole checkpoint. Users' settings come from the run that loads, and a difference is
reported; what the run itself computed (step counts, the schedule's position) comes from the checkpoint.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.states import BLOCK, Block, Settings, StateDict, blocks_of, holding
from megatron_eopt.family import CLASSES
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.consensus import say
from megatron_eopt.megatron.support.facts import on
from megatron_eopt.megatron.wrappers import torch_optimizers
from megatron_eopt.orthogonalize.coefficients import name_of_schedule
from megatron_eopt.routing.patterns import compressed as boxes_of
from megatron_eopt.routing.settings import settings_of_groups
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.state import NO_SETTINGS

OPTIMIZERS = "optimizers of megatron_eopt"  # no name of Megatron's, so nothing is merged into it
MAIN_PARAMETERS = "fp32_from_fp16_params"

_TORCHS = ("Adam", "AdamW")

# A parameter in a checkpoint: its key, and its index among the layers and experts that are stacked under it.
Name = tuple[str, int]
# Names in short form: key -> runs [first, last + 1] of such indices; [[0, 1]] where none are stacked.
Names = dict[str, list[list[int]]]

# Where the schedule stands: Megatron's scheduler computes them anew after a load, a loop without one goes on from them.
_SCHEDULED = frozenset({"lr", "weight_decay"})
_SCHEDULE = frozenset({"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult"})  # what it starts from
_SAID_ELSEWHERE = frozenset({"momentum_dtype", "of_groups"})  # when their change is found
FROM_CHECKPOINT = "use_checkpoint_opt_param_scheduler"  # Megatron's flag: the schedule of the checkpoint counts
_CHANGED = "goes on with other settings than the checkpoint has"
_STRUCTURE = frozenset({"is_expert_parallel", "default_config"})  # of the layout, and of how Megatron logs


def compressed(names: Iterable[Name]) -> Names:
    """Names in short form."""
    indices: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for key, index in names:
        indices[key].add((index,))
    runs: Names = {}
    for key in sorted(indices):
        runs[key] = [list(run) for (of_index,) in boxes_of(indices[key]) for run in of_index]
    return runs


def merged(names: Iterable[Names]) -> Names:
    """The names of all ranks."""
    single: list[Name] = []
    for of_rank in names:
        for key, runs in of_rank.items():
            for first, end in runs:
                single += [(key, index) for index in range(first, end)]
    return compressed(single)


def has(names: Names, key: str, index: int) -> bool:
    """Whether a parameter is among the names."""
    return any(first <= index < end for first, end in names.get(key, ()))


def settings_after_load(
    current: Settings, saved: Sequence[Settings], carried: Set[str], settable: Set[str], from_checkpoint: bool = False
) -> tuple[Settings, dict[str, tuple[Any, Any]]]:
    """A group's settings, and changes: name -> (checkpoint's, now).

    ``saved`` are the checkpoint's groups that have its parameters. A group goes on without what a user may set,
    ``settable``, and this run does not. ``from_checkpoint`` takes the schedule of the checkpoint. A ValueError refuses
    saved groups that differ in what is ``carried`` over, which the optimizer computes.
    """
    settings = {key: value for key, value in current.items() if key not in NO_SETTINGS}
    if not saved:
        return settings, {}
    then: dict[str, list[Any]] = defaultdict(list)
    for group in saved:
        for key, value in group.items():
            then[key].append(value)
    changed: dict[str, tuple[Any, Any]] = {}
    for key, values in sorted(then.items()):
        is_gone = key not in current and key not in NO_SETTINGS
        if key in carried or key == "step" or (is_gone and key not in settable | _SCHEDULE):
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"parameters of one group come from groups of the checkpoint with different {key!r}: {values}; "
                    f"keep the groups of the run that saved, or pass --no-load-optim to start with fresh state"
                )
            settings[key] = values[0]
        elif is_gone and key in settable:
            changed[key] = (values[0], "the optimizer's own")
        elif key not in settings or key in _SCHEDULED | _STRUCTURE:
            continue
        elif any(_differs(settings[key], value) for value in values):
            changed[key] = (values[0], settings[key])
    if from_checkpoint and _SCHEDULE & saved[0].keys():
        for key in _SCHEDULE:  # also what only one of the two has
            settings.pop(key, None)
            changed.pop(key, None)
        settings |= {key: saved[0][key] for key in _SCHEDULE & saved[0].keys()}
    if not _SCHEDULE & changed.keys():
        for key in _SCHEDULED & saved[0].keys():
            settings[key] = saved[0][key]
    return settings, changed


def groups_after_load(optimizer: Optimizer, saved: Sequence[Sequence[Settings]]) -> list[Settings]:
    """:func:`settings_after_load` of each group; changes are printed.

    ``saved`` are, for each group, the checkpoint's groups that have its parameters.
    """
    carried = optimizer.persistent_group_keys if isinstance(optimizer, BaseOptimizer) else frozenset()
    settable = {"optimizer", *settings_of_groups(optimizer)}
    from_checkpoint = on(releases.training_args(), FROM_CHECKPOINT)
    found = []
    numbers: dict[str, list[str]] = {}  # of groups, by what changed in them
    for number, (group, of_group) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        settings, changed = settings_after_load(group, of_group, carried, settable, from_checkpoint)
        found.append(settings)
        if changed:
            numbers.setdefault(_listed(changed), []).append(str(number))
    for changes, alike in numbers.items():
        groups = f"group{'s' if len(alike) > 1 else ''} {', '.join(alike)}"
        say(f"{type(optimizer).__name__} {_CHANGED} in {groups}: {changes}")
    return found


def of_whole(optimizer: Any) -> dict[str, Any]:
    """What a load has to know of settings that no group has: their values, and names of those of groups."""
    return {"settings": optimizer.settings(), "in_groups": list(optimizer.defaults)}


def report_settings(name: str, saved: Settings, settings: Settings, in_groups: Iterable[str]) -> None:
    """Say which settings of a class of optimizers changed that no group has.

    A setting that is left out has its default.
    """
    changed = {}
    for key in (saved.keys() | settings.keys()) - _SAID_ELSEWHERE - set(in_groups):
        was = saved.get(key, "default")
        now = settings.get(key, "default")
        if _differs(was, now):
            changed[key] = (was, now)
    if "coefficients" in changed:
        was, now = map(_iteration, changed["coefficients"])
        if was != now:  # else they are of the user's own, and as many
            changed["coefficients"] = (was, now)
    if changed:
        say(f"{name} {_CHANGED}: {_listed(changed)}")


def _iteration(schedule: Sequence[Sequence[float]]) -> str:
    return f"{len(schedule)} steps of {name_of_schedule(schedule)}"


def _listed(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in sorted(changed.items()))


def schedules(optimizer: Any) -> list[Settings]:
    """What the schedule of each group starts from."""
    return [{key: group[key] for key in _SCHEDULE & group.keys()} for group in _groups(optimizer)]


def restore_schedules(optimizer: Any, of_run: Sequence[Settings]) -> None:
    """Give all groups back what :func:`schedules` returned; changes are printed."""
    changed = 0
    for group, kept in zip(_groups(optimizer), of_run, strict=True):
        changed += any(group.get(key) != value for key, value in kept.items())
        group.update(kept)
    if changed:
        say(
            f"--override-opt-param-scheduler: Megatron gave {changed} parameter groups other rates in the load, and "
            f"they are again as the flags and overrides of this run say"
        )


def _groups(optimizer: Any) -> Iterator[Settings]:
    for each in torch_optimizers(optimizer):
        yield from each.param_groups


def _differs(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return list(a) != list(b)  # a list comes back from a file where a tuple went in
    return bool(a != b)


def torch_state(state_dict: StateDict) -> Any:
    """The torch optimizer's state dict; in bf16 it is nested."""
    return state_dict.get("optimizer", state_dict)


def without_ours(state_dict: StateDict) -> StateDict:
    """A request without those of our optimizers."""
    rest = {}
    for key, value in state_dict.items():
        if not any(holding(value, BLOCK)):
            rest[key] = value
        elif BLOCK not in value:
            rest[key] = without_ours(value)
    return rest


def put_back(requested: StateDict, loaded: StateDict, common: Any) -> None:
    """Bring what was loaded by number under :data:`OPTIMIZERS` into the requested form, in place."""
    optimizers = loaded.pop(OPTIMIZERS, {})
    ours = []
    for number, each in enumerate(holding(requested, BLOCK)):
        ours.append(_completed(each, optimizers.get(number, {}), common))
    with_ours = {key: value for key, value in requested.items() if any(holding(value, BLOCK))}
    loaded |= _filled(with_ours, loaded, iter(ours))


def _filled(requested: StateDict, loaded: StateDict, ours: Iterator[StateDict]) -> StateDict:
    """What was loaded in the requested form, with ours in the order of :func:`holding`."""
    filled: StateDict = {}
    for key, value in requested.items():
        own = loaded.get(key)
        if not any(holding(value, BLOCK)):
            filled[key] = own
        elif BLOCK in value:
            filled[key] = next(ours)
        else:
            filled[key] = _filled(value, own if isinstance(own, dict) else {}, ours)
    return filled


def _completed(requested: StateDict, loaded: StateDict, common: Any) -> StateDict:
    """An optimizer's state dict with groups, step count and manifest."""
    theirs = list(holding(common, "param_groups"))
    blocks = blocks_of(common)
    inner: StateDict = {
        "state": dict(torch_state(loaded).get("state", {})),
        "param_groups": [group for each in theirs for group in each["param_groups"]],
    }
    step = _steps_made(requested[BLOCK]["optimizer"], blocks, theirs)
    if step is not None:
        inner["state"]["common_step"] = step
    block = {"state": loaded.get(BLOCK, {}).get("state", {})}
    if blocks:
        block["groups"] = [group for each in blocks for group in each["groups"]]
    for each in reversed(blocks):  # the first that has one counts
        block |= {key: each[key] for key in each.keys() & {"manifest"}}
    if "optimizer" not in requested:
        return inner | {BLOCK: block}
    main = loaded.get(MAIN_PARAMETERS, [])
    if isinstance(main, list):  # which lacks the groups without parameters
        filled = iter(main)
        main = [next(filled) if group else [] for group in requested.get(MAIN_PARAMETERS, [])]
    return {"optimizer": inner, MAIN_PARAMETERS: main, BLOCK: block}


def _steps_made(name: str, blocks: Sequence[Block], theirs: Sequence[StateDict]) -> Any:
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
        for each in theirs:
            for group in each["param_groups"]:
                if "step" in group:
                    return torch.tensor(float(group["step"]))
    return None


def _is_adam(name: str) -> bool:
    """Whether a class counts steps as Adam does: torch's, Transformer Engine's, Apex's, or a user's."""
    return "Adam" in name and name not in CLASSES
