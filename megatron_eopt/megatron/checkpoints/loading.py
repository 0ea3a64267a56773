"""Load a torch_dist checkpoint: compare it with what is requested first, and tell what changes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, StateDict, blocks_of, holding, split_key
from megatron_eopt.checkpoints.sums import CHECKSUMS, saved_sums
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.checkpoints import matching
from megatron_eopt.megatron.checkpoints.checksums import compare_sums
from megatron_eopt.megatron.checkpoints.fitting import fitted
from megatron_eopt.megatron.checkpoints.refusals import of_another, of_buffers, problem_of, requested_of
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors
from megatron_eopt.megatron.checkpoints.stored import Stored, contents_of, read_stored
from megatron_eopt.megatron.consensus import from_rank_0, say, union
from megatron_eopt.megatron.support.facts import on
from megatron_eopt.redirect import Original, around
from megatron_eopt.routing import ParamPattern, compare, from_json, to_json, with_schedule


@around
def checked_load(load: Original, sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``dist_checkpointing.load``: checks that requested optimizer state is there."""
    optimizers = list(holding(sharded_state_dict, BLOCK))
    with_state = optimizers or "optimizer" in sharded_state_dict
    stored = from_rank_0(lambda: read_stored(Path(checkpoint_dir))) if with_state else None
    contents_of.cache_clear()  # nobody asks again
    if stored is None:
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    problem = stored.damage
    if problem is None and optimizers:
        optimizers = fitted(optimizers, stored)
        request = matching.without_ours(sharded_state_dict) | {matching.OPTIMIZERS: dict(enumerate(optimizers))}
        problem = problem_of(optimizers, stored) or of_buffers(sharded_tensors(request), stored.shapes)
    elif problem is None:  # none of ours; Megatron checks the rest itself
        wanted = union(requested_of({"optimizer": sharded_state_dict["optimizer"]}))
        problem = of_another(None, wanted, blocks_of(stored.optimizer))
    if problem:
        raise CheckpointError(f"{checkpoint_dir}: {problem}")
    if not optimizers:
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    sums = None
    if any(each[BLOCK]["checksums"] for each in optimizers):
        entries = {key: math.prod(shape) for key, shape in stored.shapes.items()}
        sums = saved_sums(stored.checksums, stored.optimizer, entries)
    _report_differences(request, stored)
    _report_settings(optimizers, stored)
    result = load(request, checkpoint_dir, *args, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result
    if sums:
        compare_sums(sums, stored, request, loaded, checkpoint_dir)
    loaded.pop(CHECKSUMS, None)
    matching.put_back(sharded_state_dict, loaded, stored.optimizer)
    return result


@around
def with_optimizer(
    load: Original, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``load_checkpoint``: optimizers see what was loaded, and keep rates.

    For ``--override-opt-param-scheduler`` Megatron 0.20 gives every group ``--lr`` and ``--min-lr`` after the load.
    With ``--use-checkpoint-opt-param-scheduler`` its scheduler sets the weight decay of the groups before it takes over
    that of the checkpoint, so that the first step would decay as the command line says: it sets it once more.
    """
    ours = hasattr(optimizer, "megatron_eopt")
    if ours and kwargs.get("skip_load_to_model_and_opt"):
        kwargs["skip_load_to_model_and_opt"] = False
    of_run = matching.schedules(optimizer) if ours else []
    result = load(model, optimizer, opt_param_scheduler, *args, **kwargs)
    args = releases.training_args()
    if ours and on(args, "no_load_optim") and result[0]:
        say(
            f"--no-load-optim: the weights are those of iteration {result[0]}, all optimizer state begins at zero, and "
            f"so does the schedule of rates and weight decay"
        )
    overrides = on(args, "override_opt_param_scheduler")
    if ours and opt_param_scheduler is not None and (overrides or on(args, matching.FROM_CHECKPOINT)):
        if overrides:
            matching.restore_schedules(optimizer, of_run)
        opt_param_scheduler.step(0)
    return result


def _report_differences(request: Any, stored: Stored) -> None:
    """Say what of the stored will be of another size or dtype here."""
    tensors = list(sharded_tensors(request))
    warning = other_padding(tensors, stored.shapes)
    if warning and dist.get_rank() == 0:
        say(f"warning: {warning}")
    converted = []
    for tensor in tensors:
        state, _ = split_key(tensor.key)
        if state:
            converted.append((state, stored.dtypes.get(tensor.key, tensor.dtype), tensor.dtype))
    report_converted(converted)


def _report_settings(optimizers: Iterable[StateDict], stored: Stored) -> None:
    """Say which settings of optimizers are others than the checkpoint's."""
    saved = {block["optimizer"]: block["settings"] for block in blocks_of(stored.optimizer)}
    now = {each[BLOCK]["optimizer"]: each[BLOCK] for each in optimizers}  # those of experts have the same
    for name, block in now.items():
        if "in_groups" in block and name in saved:
            matching.report_settings(name, saved[name], block["settings"], block["in_groups"])


def other_padding(requested: Iterable[ShardedTensor], stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """What becomes of a vocabulary that was padded otherwise."""
    for tensor in requested:
        was = stored.get(tensor.key, tensor.global_shape)
        if tensor.allow_shape_mismatch and was != tensor.global_shape:
            return (
                f"the vocabulary is padded otherwise than in the checkpoint ({tensor.key} is {tensor.global_shape}, "
                f"and was {was}): rows that only one of them has are dropped, or begin anew; "
                f"--make-vocab-size-divisible-by sets the padding"
            )
    return None


def report_converted(state: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> None:
    """Say which state is converted: its key, the checkpoint's dtype, and this run's."""
    converted = union(f"{key} from {was} to {now}" for key, was, now in state if was != now)
    if converted:
        say(f"the state of the checkpoint is converted: {', '.join(converted)}")


def report_changes(saved: dict[str, Any] | None, families: Sequence[ParamPattern]) -> None:
    """Say what changed since the save; an unreadable manifest passes."""
    if saved is None or dist.get_rank() != 0:
        return
    try:
        old = from_json(saved)
    except ValueError as error:
        say(f"changed since the checkpoint: not known, since {error}")
        return
    new = from_json(to_json(families))
    counts = new
    if on(releases.training_args(), matching.FROM_CHECKPOINT):
        counts = with_schedule(new, old)
    for line in compare(old, counts):
        say(f"changed since the checkpoint: {line}")
    for line in compare(new, counts):
        say(f"taken from the checkpoint, by --use-checkpoint-opt-param-scheduler: {line}")
