"""Load a torch_dist checkpoint: it is compared with what is requested first, and what changes is said.

Megatron pairs optimizers and groups by position, which differs at another expert-parallel size, after another
optimizer, or where a pipeline stage has no parameter of a group. So the state of each optimizer is loaded under a name
of its own, and each finds its groups in the common state of the whole checkpoint, by names of parameters. Users'
settings come from the run that loads, and a difference is reported; what the run itself computed (step counts, the
schedule's position) comes from the checkpoint.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, Block, Settings, StateDict, blocks_of, holding, split_key
from megatron_eopt.checkpoints.sums import CHECKSUMS, saved_sums
from megatron_eopt.family import CLASSES
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.checkpoints.integrity import compare_sums, read_stored
from megatron_eopt.megatron.checkpoints.keys import (
    FRESH,
    fitted,
    of_another,
    of_buffers,
    problem_of,
    shapes_of,
    sharded_tensors,
)
from megatron_eopt.megatron.consensus import from_rank_0, log_rank0, union
from megatron_eopt.megatron.support.facts import on
from megatron_eopt.megatron.wrappers import torch_optimizers
from megatron_eopt.redirect import Original, around
from megatron_eopt.routing import ParamPattern, compare, from_json, to_json, with_schedule
from megatron_eopt.settings.groups import differs
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.state import settings_in

MAIN_PARAMETERS = "fp32_from_fp16_params"
_OPTIMIZERS = "optimizers of megatron_eopt"  # no name of Megatron's, so nothing is merged into it
_TORCHS = ("Adam", "AdamW")

# Where the schedule stands: Megatron's scheduler computes them anew after a load, a loop without one goes on from them.
_SCHEDULED = frozenset({"lr", "weight_decay"})
_SCHEDULE = frozenset({"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult"})  # what it starts from
_FROM_CHECKPOINT = "use_checkpoint_opt_param_scheduler"  # Megatron's flag: the schedule of the checkpoint counts
_CHANGED = "goes on with other settings than the checkpoint has"
_STRUCTURE = frozenset({"is_expert_parallel", "default_config"})  # of the layout, and of how Megatron logs

Changes = dict[str, tuple[Any, Any]]  # name of a setting -> checkpoint's, now


@around
def checked_load(load: Original, sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``dist_checkpointing.load``: checks that requested optimizer state is there."""
    optimizers = list(holding(sharded_state_dict, BLOCK))
    with_state = "optimizer" in sharded_state_dict
    stored = from_rank_0(lambda: read_stored(Path(checkpoint_dir))) if with_state else None
    if stored is None:
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    saved = stored.common["optimizer"]
    blocks = blocks_of(saved)
    shapes = {key: tensor.shape for key, tensor in stored.tensors.items()}
    if optimizers:
        optimizers = fitted(optimizers, shapes)
        request = _without_ours(sharded_state_dict) | {_OPTIMIZERS: dict(enumerate(optimizers))}
        problem = problem_of(optimizers, shapes, blocks) or of_buffers(sharded_tensors(request), shapes)
    else:  # none of ours; Megatron checks the rest itself
        problem = of_another(None, union(shapes_of(sharded_state_dict["optimizer"])), blocks)
    if problem:
        raise CheckpointError(f"{checkpoint_dir}: {problem}")
    if not optimizers:
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    sums = None
    if any(each[BLOCK]["checksums"] for each in optimizers):
        entries = {key: tensor.entries for key, tensor in stored.tensors.items()}
        sums = saved_sums(stored.common[CHECKSUMS], saved, entries)
    tensors = [tensor for tensor in sharded_tensors(request) if tensor.key in stored.tensors]
    report_padding(tensors, shapes)
    dtypes = [(split_key(tensor.key)[0], stored.tensors[tensor.key].dtype, tensor.dtype) for tensor in tensors]
    report_converted(each for each in dtypes if each[0])
    _report_settings(optimizers, blocks)
    result = load(request, checkpoint_dir, *args, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result
    if sums:
        compare_sums(sums, stored.tensors, request, loaded, checkpoint_dir)
    loaded.pop(CHECKSUMS, None)
    ours = loaded.pop(_OPTIMIZERS, {})
    found = [_completed(each, ours.get(number, {}), saved) for number, each in enumerate(optimizers)]
    loaded["optimizer"] = _in_form_of(sharded_state_dict["optimizer"], loaded.get("optimizer"), iter(found))
    return result


def _without_ours(state_dict: StateDict) -> StateDict:
    """A request without those of our optimizers."""
    rest = {}
    for key, value in state_dict.items():
        if not any(holding(value, BLOCK)):
            rest[key] = value
        elif BLOCK not in value:
            rest[key] = _without_ours(value)
    return rest


def _in_form_of(requested: Any, loaded: Any, ours: Iterator[StateDict]) -> Any:
    """What was loaded in the requested form, with ours in the order of :func:`holding`."""
    if not any(holding(requested, BLOCK)):
        return loaded
    if BLOCK in requested:
        return next(ours)
    return {key: _in_form_of(value, (loaded or {}).get(key), ours) for key, value in requested.items()}


def _completed(requested: StateDict, loaded: StateDict, saved: Any) -> StateDict:
    """An optimizer's state dict, with its step count, and in its block the groups of all that were ``saved``."""
    blocks = blocks_of(saved)
    theirs = list(holding(saved, "param_groups"))
    inner: StateDict = {
        "state": dict(torch_state(loaded).get("state", {})),
        "param_groups": [group for each in theirs for group in each["param_groups"]],
    }
    counts = _counts_of_steps(requested[BLOCK]["optimizer"], blocks, theirs)
    step = next((count for count in counts if count is not None), None)
    if step is not None:
        inner["state"]["common_step"] = step
    block = {
        "state": loaded.get(BLOCK, {}).get("state", {}),
        "groups": [group for each in blocks for group in each["groups"]] if blocks else None,
        "manifest": next((each["manifest"] for each in blocks if "manifest" in each), None),
    }
    if "optimizer" not in requested:
        return inner | {BLOCK: block}
    main = loaded.get(MAIN_PARAMETERS, [])
    if isinstance(main, list):  # which lacks the groups without parameters
        filled = iter(main)
        main = [next(filled) if group else [] for group in requested.get(MAIN_PARAMETERS, [])]
    return {"optimizer": inner, MAIN_PARAMETERS: main, BLOCK: block}


def torch_state(state_dict: StateDict) -> Any:
    """The torch optimizer's state dict; in bf16 it is nested."""
    return state_dict.get("optimizer", state_dict)


def _counts_of_steps(name: str, blocks: Iterable[Block], theirs: Iterable[StateDict]) -> Iterator[Any]:
    """What says how many steps a class of optimizers has made; None where one does not say so."""
    for block in blocks:
        if block["optimizer"] == name or (_is_adam(name) and _is_adam(block["optimizer"])):
            yield block["common_step"]
    for each in theirs:
        if not blocks and _is_adam(name):
            yield each.get("state", {}).get("common_step")
    for each in theirs:
        for group in each["param_groups"]:
            if name in _TORCHS and "step" in group:  # of the distributed optimizer
                yield torch.tensor(float(group["step"]))


def _is_adam(name: str) -> bool:
    """Whether a class counts steps as Adam does: torch's, Transformer Engine's, Apex's, or a user's."""
    return "Adam" in name and name not in CLASSES


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
    args = releases.training_args()
    if on(args, "no_load_optim") and result[0]:
        log_rank0(
            f"--no-load-optim: the weights are those of iteration {result[0]}, all optimizer state begins at zero, and "
            f"so does the schedule of rates and weight decay"
        )
    overrides = on(args, "override_opt_param_scheduler")
    if opt_param_scheduler is not None and (overrides or on(args, _FROM_CHECKPOINT)):
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
    from_checkpoint = on(releases.training_args(), _FROM_CHECKPOINT)
    groups = []
    numbers: dict[str, list[str]] = {}  # of groups, by what changed in them
    for number, (group, of_group) in enumerate(zip(optimizer.state_dict()["param_groups"], saved, strict=True)):
        settings, changed = settings_after_load(group, of_group, carried, from_checkpoint)
        groups.append(settings)
        if changed:
            numbers.setdefault(_listed(changed), []).append(str(number))
    for changes, alike in numbers.items():
        where = f"group{'s' if len(alike) > 1 else ''} {', '.join(alike)}"
        log_rank0(f"{type(optimizer).__name__} {_CHANGED} in {where}: {changes}")
    return groups


def settings_after_load(
    current: Settings, saved: Sequence[Settings], carried: Set[str], from_checkpoint: bool = False
) -> tuple[Settings, Changes]:
    """A group's settings, and changes.

    ``saved`` are the checkpoint's groups that have its parameters. A group goes on without an ``optimizer`` that this
    run does not name. ``from_checkpoint`` takes the schedule of the checkpoint. A ValueError refuses saved groups that
    differ in what is ``carried`` over, which the optimizer computes.
    """
    settings = dict(current)
    changed: Changes = {}
    if not saved:
        return settings, changed
    then: dict[str, list[Any]] = defaultdict(list)
    for group in saved:
        for key, value in group.items():
            then[key].append(value)
    for key, values in sorted(then.items()):
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
        elif is_gone or key in _SCHEDULED | _STRUCTURE:
            continue
        elif any(differs(settings[key], value) for value in values):
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


def settings_of(group: Settings) -> Settings:
    """What is saved of a group."""
    return dict(sorted(settings_in(group).items()))


def _report_settings(optimizers: Iterable[StateDict], blocks: Iterable[Block]) -> None:
    """Say which settings of optimizers are others than the checkpoint's."""
    saved = {block["optimizer"]: block["settings"] for block in blocks}
    now = {each[BLOCK]["optimizer"]: each[BLOCK] for each in optimizers}  # those of experts have the same
    for name, block in now.items():
        if "settings" in block and name in saved:
            report_settings(name, saved[name], block["settings"])


def report_settings(name: str, saved: Settings, settings: Settings) -> None:
    """Say which settings of an optimizer as a whole changed; one that is left out has its default."""
    changed: Changes = {}
    for key in saved.keys() | settings.keys():
        was = saved.get(key, "default")
        now = settings.get(key, "default")
        if differs(was, now):
            changed[key] = (was, now)
    if changed:
        log_rank0(f"{name} {_CHANGED}: {_listed(changed)}")


def _listed(changed: Changes) -> str:
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in sorted(changed.items()))


def report_padding(requested: Iterable[ShardedTensor], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Say what becomes of a vocabulary that was padded otherwise."""
    for tensor in requested:
        was = stored[tensor.key]
        if tensor.allow_shape_mismatch and was != tensor.global_shape:
            log_rank0(
                f"warning: the vocabulary is padded otherwise than in the checkpoint ({tensor.key} is "
                f"{tensor.global_shape}, and was {was}): rows that only one of them has are "
                f"dropped, or begin anew; --make-vocab-size-divisible-by sets the padding"
            )
            return


def report_converted(state: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> None:
    """Say which state is converted: its key, the checkpoint's dtype, and this run's."""
    converted = union(f"{key} from {was} to {now}" for key, was, now in state if was != now)
    if converted:
        log_rank0(f"the state of the checkpoint is converted: {', '.join(converted)}")


def report_changes(saved: dict[str, Any] | None, families: Sequence[ParamPattern]) -> None:
    """Say what changed since the save; an unreadable manifest passes."""
    if saved is None or dist.get_rank() != 0:
        return
    try:
        old = from_json(saved)
    except ValueError as error:
        log_rank0(f"changed since the checkpoint: not known, since {error}")
        return
    new = from_json(to_json(families))
    counts = new
    if on(releases.training_args(), _FROM_CHECKPOINT):
        counts = with_schedule(new, old)
    for line in compare(old, counts):
        log_rank0(f"changed since the checkpoint: {line}")
    for line in compare(new, counts):
        log_rank0(f"taken from the checkpoint, by --use-checkpoint-opt-param-scheduler: {line}")
