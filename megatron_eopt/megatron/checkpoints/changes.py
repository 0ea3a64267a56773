"""What is said of a load: what is otherwise than in the checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_eopt.checkpoints.states import Settings
from megatron_eopt.megatron.consensus import log_rank0, union
from megatron_eopt.megatron.support.facts import on, training_args
from megatron_eopt.routing import ParamPattern, compare, from_json, to_json, with_schedule
from megatron_eopt.settings.groups import differs

FROM_CHECKPOINT = "use_checkpoint_opt_param_scheduler"  # Megatron's flag: the schedule of the checkpoint counts
GOES_ON = "goes on with other settings than the checkpoint has"

Changes = dict[str, tuple[Any, Any]]  # name of a setting -> checkpoint's, now


def report_settings(name: str, saved: Settings, settings: Settings) -> None:
    """Say which settings of an optimizer as a whole changed; one that is left out has its default."""
    changed: Changes = {}
    for key in saved.keys() | settings.keys():
        was = saved.get(key, "default")
        now = settings.get(key, "default")
        if differs(was, now):
            changed[key] = (was, now)
    if changed:
        log_rank0(f"{name} {GOES_ON}: {listed_changes(changed)}")


def listed_changes(changed: Changes) -> str:
    """Each setting with the checkpoint's value, and the one now."""
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
    if on(training_args(), FROM_CHECKPOINT):
        counts = with_schedule(new, old)
    for line in compare(old, counts):
        log_rank0(f"changed since the checkpoint: {line}")
    for line in compare(new, counts):
        log_rank0(f"taken from the checkpoint, by --use-checkpoint-opt-param-scheduler: {line}")
