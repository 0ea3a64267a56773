"""With which settings groups go on after a load.

Users' settings come from the run that loads, and a difference is reported; what the run itself computed (step counts,
the schedule's position) comes from the checkpoint.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.states import Settings
from megatron_eopt.megatron.checkpoints.changes import FROM_CHECKPOINT, GOES_ON, Changes, listed_changes
from megatron_eopt.megatron.checkpoints.refusals import FRESH
from megatron_eopt.megatron.consensus import log_rank0
from megatron_eopt.megatron.support.facts import on, training_args
from megatron_eopt.megatron.wrappers import torch_optimizers
from megatron_eopt.redirect import Original, around
from megatron_eopt.settings.groups import differs
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.state import settings_in

_SCHEDULE = frozenset({"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult"})  # what it starts from
_STRUCTURE = frozenset({"is_expert_parallel", "default_config"})  # of the layout, and of how Megatron logs


@around
def with_optimizer(
    load: Original, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``load_checkpoint``: optimizers see what was loaded, and keep rates.

    For ``--override-opt-param-scheduler`` Megatron 0.20 gives every group ``--lr`` and ``--min-lr`` after the load.
    With ``--use-checkpoint-opt-param-scheduler`` its scheduler sets the weight decay of the groups before it takes over
    that of the checkpoint, so that the first step would decay as the command line says: it sets it once more.
    """
    if not hasattr(optimizer, "megatron_eopt"):
        return load(model, optimizer, opt_param_scheduler, *args, **kwargs)
    if "skip_load_to_model_and_opt" in kwargs:
        kwargs["skip_load_to_model_and_opt"] = False
    of_run = schedules(optimizer)
    result = load(model, optimizer, opt_param_scheduler, *args, **kwargs)
    of_megatron = training_args()
    if on(of_megatron, "no_load_optim") and result[0]:
        log_rank0(
            f"--no-load-optim: the weights are those of iteration {result[0]}, all optimizer state begins at zero, and "
            f"so does the schedule of rates and weight decay"
        )
    overrides = on(of_megatron, "override_opt_param_scheduler")
    if opt_param_scheduler is not None and (overrides or on(of_megatron, FROM_CHECKPOINT)):
        if overrides:
            restore_schedules(optimizer, of_run)
        opt_param_scheduler.step(0)
    return result


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
        log_rank0(
            f"--override-opt-param-scheduler: Megatron gave {changed} parameter groups other rates in the load, and "
            f"they are again as the flags and overrides of this run say"
        )


def _groups(optimizer: Any) -> Iterator[Settings]:
    for each in torch_optimizers(optimizer):
        yield from each.param_groups


def groups_after_load(optimizer: Optimizer, saved: Sequence[Sequence[Settings]]) -> list[Settings]:
    """The groups of a state dict to load, with :func:`settings_after_load`; changes are printed.

    ``saved`` are, for each group, the checkpoint's groups that have its parameters.
    """
    carried = optimizer.persistent_group_keys if isinstance(optimizer, BaseOptimizer) else frozenset()
    from_checkpoint = on(training_args(), FROM_CHECKPOINT)
    grows = getattr(training_args(), "weight_decay_incr_style", "constant") != "constant"
    groups = []
    numbers: dict[str, list[str]] = {}  # of groups, by what changed in them
    for number, (group, of_group) in enumerate(zip(optimizer.state_dict()["param_groups"], saved, strict=True)):
        settings, changed = settings_after_load(group, of_group, carried, from_checkpoint, grows)
        groups.append(settings)
        if changed:
            numbers.setdefault(listed_changes(changed), []).append(str(number))
    for changes, alike in numbers.items():
        where = f"group{'s' if len(alike) > 1 else ''} {', '.join(alike)}"
        log_rank0(f"{type(optimizer).__name__} {GOES_ON} in {where}: {changes}")
    return groups


def settings_after_load(
    current: Settings,
    saved: Sequence[Settings],
    carried: Set[str],
    from_checkpoint: bool = False,
    decay_grows: bool = False,
) -> tuple[Settings, Changes]:
    """A group's settings, and changes.

    ``saved`` are the checkpoint's groups that have its parameters. A group goes on without an ``optimizer`` that this
    run does not name. Where the schedule stands, the rate and a weight decay that grows, is the checkpoint's if the
    schedule is the same and saved groups agree. ``from_checkpoint`` takes the schedule of the checkpoint. A ValueError
    refuses saved groups that differ in what is ``carried`` over, which the optimizer computes.
    """
    settings = dict(current)
    changed: Changes = {}
    if not saved:
        return settings, changed
    then: dict[str, list[Any]] = defaultdict(list)
    for group in saved:
        for key, value in group.items():
            then[key].append(value)
    # Megatron's scheduler computes them anew after a load, a loop without one goes on from them
    position = {"lr", "weight_decay"} if from_checkpoint or decay_grows else {"lr"}
    for key, values in sorted(then.items()):
        others = [value for value in values if differs(settings.get(key), value)]
        is_gone = key not in current
        if key in carried or key == "step" or (is_gone and key not in _SCHEDULE | {"optimizer"}):
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"parameters of one group come from groups of the checkpoint with different {key!r}: {values}; "
                    f"keep the groups of the run that saved, or {FRESH}"
                )
            settings[key] = values[0]
        elif is_gone and key == "optimizer":
            changed[key] = (values[0], "the optimizer's own")
        elif is_gone or key in position | _STRUCTURE:
            continue
        elif others:
            changed[key] = (others[0], settings[key])
    schedule, *more = [{key: group[key] for key in _SCHEDULE & group.keys()} for group in saved]
    if from_checkpoint and schedule and all(each == schedule for each in more):
        for key in _SCHEDULE:  # also what only one of the two has
            settings.pop(key, None)
            changed.pop(key, None)
        settings |= schedule
    if not _SCHEDULE & changed.keys():
        for key in position & then.keys():
            if any(differs(then[key][0], value) for value in then[key]):
                changed[key] = (then[key], settings[key])
            else:
                settings[key] = then[key][0]
    return settings, changed


def saved_settings(group: Settings) -> Settings:
    """What is saved of a group."""
    return dict(sorted(settings_in(group).items()))
