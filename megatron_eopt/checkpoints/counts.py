"""Numbers of a checkpoint that say how far its run had come.

Megatron takes them as they are. With an iteration that is NaN it ends at once and well, with a schedule at step NaN it
trains on at the rate of the end: each of these is looked at before.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from megatron_eopt.checkpoints.contents import Contents
from megatron_eopt.checkpoints.problems import Problem
from megatron_eopt.checkpoints.states import blocks_of, groups
from megatron_eopt.optimizers.whole_matrices import CLOCK

_MOST = 2**63  # of which no run comes near
_OF_ARGS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_OPERATIONS = "num_floating_point_operations_so_far"
_ANOTHER = "take another checkpoint: a run would go on elsewhere, or not at all"


def check_counts(contents: Contents) -> Iterator[Problem]:
    """Check that they are numbers, and the iteration that of the folder's name."""
    for name, value in _counts(contents):
        if not _is_count(value):
            what = f"{name} is {_shown(value)}, and has to be a whole number from 0 on"
            yield Problem("error", what, _ANOTHER)
    operations = contents.common.get(_OPERATIONS, 0)
    if type(operations) not in (int, float) or not 0 <= operations < math.inf:
        yield Problem("error", f"{_OPERATIONS} is {_shown(operations)}, and has to be a number from 0 on", _ANOTHER)
    iteration = contents.common.get("iteration")
    named = re.fullmatch(r"iter_(\d{1,18})", contents.folder.absolute().name)
    if named and _is_count(iteration) and int(named[1]) != iteration:
        what = f"it is of iteration {iteration:,}, and its folder is named {named[0]}"
        advice = f"rename it to iter_{iteration:07d} if that is right, and write {iteration} into the tracker file"
        yield Problem("error", what, advice)


def _counts(contents: Contents) -> Iterator[tuple[str, Any]]:
    common = contents.common
    for name in ("iteration", "total_iters"):  # the second in old checkpoints
        if name in common:
            yield name, common[name]
    for name in _OF_ARGS:
        if name in contents.args:
            yield name, contents.args[name]
    for schedule in ("opt_param_scheduler", "lr_scheduler"):
        for name in ("num_steps", "num_iters"):
            if isinstance(common.get(schedule), dict) and name in common[schedule]:
                yield f"{name} of {schedule}", common[schedule][name]
    settings = [group for _, group in groups(contents)]
    for block in blocks_of(common.get("optimizer")):
        if block.get("common_step") is not None:
            yield f"the step of {block.get('optimizer')}", _whole(block["common_step"])
        settings += [group["settings"] for group in block.get("groups") or ()]
    for group in settings:
        for name in ("step", CLOCK):
            if name in group:
                yield f"{name} of a parameter group", _whole(group[name])


def _whole(step: Any) -> Any:
    """A step as an integer; torch's AdamW has it as a float, in a tensor."""
    value = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) >= _MOST:
        return "a number that no run reaches"
    return repr(value)[:100]
