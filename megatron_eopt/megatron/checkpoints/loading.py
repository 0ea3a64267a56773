"""Load a torch_dist checkpoint: it is compared with what is requested first, and what changes is said.

Megatron pairs optimizers and groups by position, which differs at another expert-parallel size, after another
optimizer, or where a pipeline stage has no parameter of a group. So the state of each optimizer is loaded under a name
of its own, and each finds its groups in the common state of the whole checkpoint, by names of parameters.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, Block, StateDict, blocks_of, holding, split_key
from megatron_eopt.checkpoints.sums import CHECKSUMS, saved_sums
from megatron_eopt.family import CLASSES
from megatron_eopt.megatron.checkpoints.changes import report_converted, report_padding, report_settings
from megatron_eopt.megatron.checkpoints.integrity import compare_sums, read_stored
from megatron_eopt.megatron.checkpoints.keys import fitted, sharded_tensors
from megatron_eopt.megatron.checkpoints.refusals import keys_of, of_another, problem_of
from megatron_eopt.megatron.consensus import from_rank_0, union
from megatron_eopt.redirect import Original, around

MAIN_PARAMETERS = "fp32_from_fp16_params"
_OPTIMIZERS = "optimizers of megatron_eopt"  # no name of Megatron's, so nothing is merged into it
_TORCHS = ("Adam", "AdamW")


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
        problem = problem_of(optimizers, shapes, blocks)
    else:  # none of ours; Megatron checks the rest itself
        problem = of_another(None, union(keys_of(sharded_state_dict["optimizer"])), blocks)
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


def _report_settings(optimizers: Iterable[StateDict], blocks: Iterable[Block]) -> None:
    """Say which settings of optimizers are others than the checkpoint's."""
    saved = {block["optimizer"]: block["settings"] for block in blocks}
    now = {each[BLOCK]["optimizer"]: each[BLOCK] for each in optimizers}  # those of experts have the same
    for name, block in now.items():
        if "settings" in block and name in saved:
            report_settings(name, saved[name], block["settings"])
