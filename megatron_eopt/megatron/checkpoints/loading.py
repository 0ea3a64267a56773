"""What Megatron saves and loads, checked: a checkpoint is whole, serves the run, and is read as it was written.

Megatron itself takes a damaged checkpoint for one of another format, or fails in a read far below, or exits with status
0 after a save that was killed while it wrote the tracker file, which a job queue takes for success. It would load
some of the state of another optimizer.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.api import CheckpointException

from megatron_eopt.checkpoints.bounds import TRACKER_BYTES, printable, read_text
from megatron_eopt.checkpoints.contents import (
    METADATA,
    TRACKER,
    CheckpointError,
    Contents,
    is_legacy,
    newest,
    read_contents,
    read_layout,
)
from megatron_eopt.checkpoints.problems import check_files, check_pickles
from megatron_eopt.checkpoints.states import BLOCK, MAIN, blocks_of, holding, split_key
from megatron_eopt.manifest import ParamPattern, compare, from_json, to_json
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import distinct, from_rank_0, say
from megatron_eopt.megatron.checkpoints.checksums import CHECKSUMS, Sums, checksums, loaded_tensors
from megatron_eopt.megatron.checkpoints.matching import put_back, taken_out
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors, state_key
from megatron_eopt.optimizers.orthogonalized import MOMENTUM_BUFFER
from megatron_eopt.redirect import around
from megatron_eopt.registry import list_optimizers, optimizer_class

FORMAT = 1  # of what this package writes down; it grows when an older release could not read a checkpoint any more
_FIRST_MOMENT, _SECOND_MOMENT = "exp_avg", "exp_avg_sq"
_DISTRIBUTED_MAIN = "param"  # the main copy, in what Megatron's distributed optimizer saves by parameter
FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"
_STACKED = re.compile(r"\.layers\.(?!\d)")


@around
def checked_base(
    load_base: Callable[..., Any], load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any
) -> Any:
    """Around ``_load_base_checkpoint``: one in torch_dist that is not whole is refused on all ranks, before it is read.

    So is one in any format of torch's distributed checkpointing whose pickles name what may not be called. Without a
    tracker file Megatron starts anew, as it does without this package: a first save that was killed leaves none.
    """
    if rank0 and load_dir is not None and _is_ours(args):
        registered = torch.serialization.get_safe_globals()
        trusted = {
            each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in registered
        }
        trusted.update((getattr(args, "trust_checkpoint_globals", None) or "").split(","))
        folders = [(Path(load_dir), getattr(args, "ckpt_step", None))]
        if getattr(args, "non_persistent_ckpt_type", None) == "global":
            folders.append((Path(args.non_persistent_global_ckpt_dir or Path(load_dir, "non_persistent")), None))
        for folder, step in folders:
            find = partial(_damage_of_resumed, folder, step, args.ckpt_format, trusted)
            if problem := from_rank_0(find) if dist.is_initialized() else find():
                raise CheckpointError(printable(problem))
    return load_base(load_dir, args, rank0, *rest, **kwargs)


@around
def with_optimizer(load: Callable[..., Any], model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``load_checkpoint``: optimizers of ours are always told what was loaded for them.

    Under torch FSDP2 Megatron relies on tensors that are loaded in place, and step counts and settings are none.
    """
    if hasattr(optimizer, "megatron_eopt") and kwargs.get("skip_load_to_model_and_opt"):
        kwargs["skip_load_to_model_and_opt"] = False
    return load(model, optimizer, *args, **kwargs)


@around
def checked_tracker(read_metadata: Callable[..., Any], tracker_filename: str) -> Any:
    """Around ``read_metadata``: an empty tracker file, which a killed save leaves, stands for the newest checkpoint."""
    tracker, iteration = Path(tracker_filename), None
    args = releases.training_args()
    if _is_ours(args) and args.ckpt_format == "torch_dist" and dist.is_initialized():
        iteration = from_rank_0(
            lambda: None if read_text(tracker, TRACKER_BYTES).strip() else _newest_whole(tracker.parent)
        )
    if iteration is None:
        return read_metadata(tracker_filename)
    killed = f"{tracker} is empty, as a save leaves it that was killed while it wrote there"
    say(f"{killed}; the newest checkpoint that is whole is of iteration {iteration}")
    return iteration, False


@around
def checked_save(save: Callable[..., Any], sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``dist_checkpointing.save``: with our optimizers, checksums of all tensors are saved."""
    if any(each[BLOCK]["checksums"] for each in holding(sharded_state_dict, BLOCK)):
        sharded_state_dict[CHECKSUMS] = checksums(sharded_tensors(sharded_state_dict))
    return save(sharded_state_dict, *args, **kwargs)


@around
def named_disk(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``save_checkpoint``, and the end of an asynchronous save: a disk that takes no more is named."""
    try:
        return save(*args, **kwargs)
    except (Exception, CheckpointException) as error:
        folder = Path(getattr(releases.training_args(), "save", None) or "")
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(2**20))  # writers of Megatron's log their errors, and raise others
        except OSError as full:
            if folder.is_dir():  # and not one that Megatron has by other means
                raise CheckpointError(
                    f"the checkpoint was not written: {full.strerror} in {folder}, where {disk_usage(folder).free:,} "
                    f"bytes are free. Those before it are untouched, and --load takes the newest complete one: make "
                    f"room, or give another folder to --save, and start the run again"
                ) from error
        raise


@around
def checked_load(
    load: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Around ``dist_checkpointing.load``: the checkpoint must have the state of our optimizers that is requested.

    State of our optimizers must not be loaded by Megatron's own.
    """
    optimizers = list(holding(sharded_state_dict, BLOCK))
    if not optimizers and "optimizer" not in sharded_state_dict:
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    stored = from_rank_0(lambda: _read(Path(checkpoint_dir)))
    if not optimizers:  # of ours; Megatron checks the rest itself
        own = sorted(_requested({"optimizer": sharded_state_dict["optimizer"]}))
        wanted = set().union(*distinct(own))
        if problem := of_another(None, wanted, blocks_of(stored.optimizer)):
            raise CheckpointError(f"{checkpoint_dir}: {problem}")
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if problem := stored.damage or _problem(optimizers, stored):
        raise CheckpointError(f"{checkpoint_dir}: {problem}")
    if dist.get_rank() == 0 and (warning := other_padding(sharded_tensors(sharded_state_dict), stored.shapes)):
        say(f"warning: {warning}")
    request = taken_out(sharded_state_dict)
    of_state = [(split_key(t.key)[0], t) for t in sharded_tensors(request)]
    report_converted((name, stored.dtypes.get(t.key, t.dtype), t.dtype) for name, t in of_state if name)
    result = load(request, checkpoint_dir, *args, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result
    if stored.sums and any(each[BLOCK]["checksums"] for each in optimizers):
        _compare(stored, request, loaded, checkpoint_dir)
    loaded.pop(CHECKSUMS, None)
    put_back(sharded_state_dict, loaded, stored.optimizer)
    return result


class _Stored(NamedTuple):
    """What a checkpoint holds, as it is sent to all ranks."""

    damage: str | None  # why it cannot be read
    shapes: dict[str, tuple[int, ...]]  # global, by key
    dtypes: dict[str, torch.dtype]
    optimizer: Any  # the common state of it
    sums: Sums  # empty where the checkpoint has none


def _read(folder: Path) -> _Stored:
    try:
        contents = read_contents(folder)
    except CheckpointError as error:
        return _Stored(str(error), {}, {}, None, {})
    return _Stored(
        _damage(contents),
        {key: tensor.shape for key, tensor in contents.tensors.items()},
        {key: tensor.dtype for key, tensor in contents.tensors.items()},
        contents.common.get("optimizer"),
        contents.common.get(CHECKSUMS, {}),
    )


def _problem(optimizers: Sequence[dict[Any, Any]], stored: _Stored) -> str | None:
    """Why the checkpoint cannot serve, the same on every rank; momenta are read from Adam's where that is requested."""
    blocks = blocks_of(stored.optimizer)
    written = max((block.get("format", 0) for block in blocks), default=0)
    if problem := too_new(written):
        return problem
    if not any(split_key(key)[0] for key in stored.shapes):
        if any(".distributed." in key for key in stored.shapes):
            return (
                f"it holds the state of Adam in flat buffers of the distributed optimizer, which say nothing of "
                f"parameters: save it with --dist-ckpt-optim-fully-reshardable, or {FRESH}"
            )
        return f"it holds no optimizer state (it was saved with --no-save-optim, or converted): {FRESH}"
    optional = frozenset[str]()
    if any(each[BLOCK]["import_adam"] for each in optimizers) and has_adams_alone(stored.shapes):
        optional = frozenset({_SECOND_MOMENT, _DISTRIBUTED_MAIN})
        theirs = {MOMENTUM_BUFFER: _FIRST_MOMENT}
        if any(split_key(key)[0] == _DISTRIBUTED_MAIN for key in stored.shapes):
            theirs[MAIN] = _DISTRIBUTED_MAIN
        requested = (value for each in optimizers for value in nested_values(each))
        for value in (each for each in requested if isinstance(each, ShardedTensor | ShardedTensorFactory)):
            name, parameter = split_key(value.key)
            if name in theirs:
                value.key = state_key(theirs[name], parameter)
    own = [(each[BLOCK]["optimizer"], _requested(each)) for each in optimizers]
    for of_ranks in zip(*distinct(own), strict=True):
        name, wanted = of_ranks[0][0], {key: shape for _, shapes in of_ranks for key, shape in shapes.items()}
        if problem := mismatch(name, wanted, stored.shapes, optional) or of_another(name, wanted, blocks):
            return problem
    return stacks_layers(stored.shapes) if any(each[BLOCK]["layers_differ"] for each in optimizers) else None


def too_new(written: int) -> str | None:
    """Why a checkpoint of this format cannot be read; None for one that can."""
    if written <= FORMAT:
        return None
    found = f"format {written}; this one reads up to {FORMAT}"
    return f"it was written by a later release of megatron_eopt ({found}): update the package"


def mismatch(
    name: str,
    wanted: Mapping[str, tuple[int, ...] | None],
    stored: Mapping[str, tuple[int, ...]],
    optional: Set[str] = frozenset(),
) -> str | None:
    """Why a checkpoint cannot serve the optimizer of this name; ``optional`` states need not be loaded.

    ``wanted`` has the global shape of every tensor that it loads on any rank, by key; None where any shape will do.
    ``stored`` has those of the checkpoint, of models and of all optimizers.
    """
    parameters = {split_key(key)[1] for key in wanted}
    missing = sorted(wanted.keys() - stored.keys())
    split = ((key, *split_key(key)) for key in sorted(stored.keys() - wanted.keys()))
    unused = [key for key, state, name in split if name in parameters and state not in optional | {""}]
    if missing or unused:
        example = split_key((missing or unused)[0])[1]
        needs, has = ({split_key(key)[0] for key in keys if split_key(key)[1] == example} for keys in (wanted, stored))
        has.discard("")
        if not has and example not in stored:
            others = f"{len(missing) - 1} other tensors that this run needs"
            return f"{example} is not in it, nor are {others}: it is of another model"
        copies = {MAIN, _DISTRIBUTED_MAIN}
        of_adam = has - copies == {_FIRST_MOMENT, _SECOND_MOMENT} and has_adams_alone(stored)
        reason = "another optimizer wrote it, or this one with other settings; resume with that one, or"
        if MAIN in has ^ needs and _DISTRIBUTED_MAIN not in has:
            saved, now = ("bf16", "fp32") if MAIN in has else ("fp32", "bf16")
            reason = f"it is of a run in {saved}, and this one is in {now}; resume in {saved}, or"
        elif of_adam and needs - {MAIN} == {MOMENTUM_BUFFER}:
            reason = "Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or"
        listed_has, listed_needs = (", ".join(sorted(states)) or "no state" for states in (has, needs))
        return f"it holds {listed_has} for {example}, and {name} needs {listed_needs}: {reason} {FRESH}"
    for key, shape in wanted.items():
        if shape is not None and stored[key] != shape:
            reason = f"it is of another model, or of other settings of the optimizer; {FRESH}"
            return f"{key} has shape {stored[key]} in it, and this run needs {shape}: {reason}"
    return None


def has_adams_alone(stored: Iterable[str]) -> bool:
    """Whether there are first moments that can be imported: a checkpoint that also has momenta goes on with those."""
    starts = [state_key(name, "") for name in (MOMENTUM_BUFFER, _FIRST_MOMENT)]
    momentum, first_moment = (any(key.startswith(start) for key in stored) for start in starts)
    return first_moment and not momentum


def of_another(name: str | None, wanted: Iterable[str], blocks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why state with the same names and shapes cannot serve: one of our optimizers wrote it, and another one loads it.

    The name is None for one of Megatron's own. What a user's own optimizer is called now, or was, says nothing.
    """
    ours = {optimizer_class(each).__name__ for each in list_optimizers()}
    parameters = {split_key(key)[1] for key in wanted}
    for block in blocks if name is None or name in ours else ():
        wrote = block["optimizer"]
        shared = sorted(parameters & {key for group in block["groups"] for key in group["names"]})
        if shared and wrote != name and wrote in ours:
            taker = name or "an optimizer of Megatron"
            taken = f"{wrote} wrote the state of {shared[0]}, and {taker} would take it for its own"
            return f"{taken}: resume with that one, or {FRESH}"
    return None


def stacks_layers(stored: Iterable[str]) -> str | None:
    """Why a checkpoint cannot serve a run that keeps its layers apart; None where it keeps them apart, too."""
    stacked = next((key for key in sorted(stored) if split_key(key)[0] and _STACKED.search(key)), None)
    return stacked and (
        f"it stacks the state of all layers ({stacked}), which were treated alike when it was saved, and in this run "
        f"layers differ in their optimizers: leave away the overrides that single out layers (and what freezes some), "
        f"or {FRESH}"
    )


def _requested(optimizer: Any) -> dict[str, tuple[int, ...] | None]:
    """Key -> shape of the tensors that are requested; None for a vocabulary, whose padding may differ."""
    return {t.key: None if t.allow_shape_mismatch else t.global_shape for t in sharded_tensors(optimizer)}


def other_padding(requested: Iterable[ShardedTensor], stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """What a resume makes of a vocabulary that is padded otherwise, and which flag pads it as in the checkpoint."""
    for tensor in (t for t in requested if t.allow_shape_mismatch and t.key in stored):
        shapes = zip(stored[tensor.key], tensor.global_shape, tensor.axis_fragmentations, strict=True)
        for was, now, ranks in shapes:
            if was != now:
                flag = f"--make-vocab-size-divisible-by {was // ranks} pads the same vocabulary as it was"
                if was % ranks:
                    flag = f"no --make-vocab-size-divisible-by pads it so at a tensor-parallel size of {ranks}"
                return (
                    f"the vocabulary is padded to {now} rows, and was to {was} in the checkpoint ({tensor.key}): rows "
                    f"that only one of them has are dropped, or begin anew; {flag}"
                )
    return None


def _compare(stored: _Stored, requested: Any, loaded: dict[str, Any], folder: str) -> None:
    comparable = (
        tensor
        for tensor in loaded_tensors(requested, loaded)
        if stored.shapes.get(tensor.key) == tuple(tensor.global_shape) and stored.dtypes[tensor.key] == tensor.dtype
    )
    changed = sorted(
        key
        for key, (value, entries) in checksums(comparable).items()
        # Of a vocabulary with another padding, other entries were loaded.
        if key in stored.sums and entries == stored.sums[key][1] and value != stored.sums[key][0]
    )
    if changed:
        raise CheckpointError(
            f"{folder}: {len(changed)} tensors are not what was saved, such as {changed[0]}: their bytes have changed "
            f"since. megatron-eopt verify-checkpoint says where; load another checkpoint, or a good copy of this one"
        )


def report_converted(state: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> None:
    """Say which state has another dtype in the checkpoint: it is rounded to the nearest as it is read.

    ``state`` has the name of a state, its dtype there and the one here. All ranks call it together.
    """
    found = {f"{name} from {was} to {now}" for name, was, now in state if was != now}
    everywhere = sorted(set().union(*distinct(sorted(found))))
    if everywhere:
        say(f"the state of the checkpoint is converted: {', '.join(everywhere)}")


def report_changes(saved: dict[str, Any] | None, families: Sequence[ParamPattern]) -> None:
    """Say what changed since the save. Nothing is decided by it, so one that cannot be read ends no run."""
    if saved is None or dist.get_rank() != 0:
        return
    try:
        changes = compare(from_json(saved), from_json(to_json(families)))
    except ValueError as error:
        changes = [f"not known, since {error}"]
    for line in changes:
        say(f"changed since the checkpoint: {line}")


def resumed(folder: Path, step: int | None) -> Path:
    """The checkpoint that Megatron will take from a folder: of a step, or the newest."""
    return folder / f"iter_{step:07d}" if step else newest(folder)


def _is_ours(args: Any) -> bool:
    return getattr(args, "optimizer", "").removeprefix("dist_") in list_optimizers()


def _damage(contents: Contents) -> str | None:
    return next((f"{fault.what}. {fault.advice}" for fault in check_files(contents)), None)


def _damage_of_resumed(
    folder: Path, step: int | None, ckpt_format: str = "torch_dist", trusted: Set[str] | None = None
) -> str | None:
    """Why the checkpoint that Megatron will take from a folder is not whole, or may not be unpickled.

    Pickles are looked at if it is known which other names are ``trusted``. Before there is a process group Megatron
    reads arguments alone, and each rank looks only at what they are in.
    """
    try:
        tracker = folder / TRACKER
        if not step and not (tracker.exists() and read_text(tracker, TRACKER_BYTES).strip()):
            return None
        path = resumed(folder, step)
        if path.is_dir() and is_legacy(path):
            return None
        if ckpt_format == "torch_dist":
            contents = read_contents(path)
            if damage := _damage(contents):
                return f"{path}: {damage}"
        else:
            tensors, blobs, of_metadata = read_layout(path)
            contents = Contents(path, tensors, blobs, {}, "", {METADATA: of_metadata})
        if trusted is not None:
            if ckpt_format == "torch_dist" and not dist.is_initialized():
                contents = replace(contents, blobs={})
            if harm := next(check_pickles(contents, trusted), None):
                return f"{path}: {harm.what}. {harm.advice}"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _newest_whole(folder: Path) -> int | None:
    names = [each.name.removeprefix("iter_") for each in folder.glob("iter_*")]
    steps = sorted(map(int, filter(str.isdecimal, names)), reverse=True)
    return next((step for step in steps if _damage_of_resumed(folder, step) is None), None)
