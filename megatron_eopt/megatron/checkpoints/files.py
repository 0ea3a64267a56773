"""Check files of checkpoints before a load; name full disks."""

import tempfile
from collections.abc import Callable, Set
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_eopt.checkpoints.bounds import printable, read_text
from megatron_eopt.checkpoints.contents import (
    TRACKER,
    CheckpointError,
    Contents,
    is_legacy,
    newest,
    read_contents,
    read_layout,
)
from megatron_eopt.checkpoints.faults import check_counts, check_files, check_pickles
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import from_rank_0, say
from megatron_eopt.megatron.checkpoints.gated import gate_extra_states, is_ours, loading, trusted_by
from megatron_eopt.redirect import around

# Reading takes seconds for each hundred thousand chunks: what a run reads before its build is kept until the load.
contents_of = lru_cache(maxsize=1)(read_contents)


@around
def checked_base(
    load_base: Callable[..., Any], load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any
) -> Any:
    """Replaces ``_load_base_checkpoint``: refuses damage and pickles with foreign names."""
    if not is_ours(args):
        return load_base(load_dir, args, rank0, *rest, **kwargs)
    if rank0 and load_dir is not None:
        trusted = trusted_by(args).keys()
        folders = [(Path(load_dir), getattr(args, "ckpt_step", None))]
        if getattr(args, "non_persistent_ckpt_type", None) == "global":
            folders.append((Path(args.non_persistent_global_ckpt_dir or Path(load_dir, "non_persistent")), None))
        for folder, step in folders:
            counts = not getattr(args, "finetune", False)  # which starts at iteration 0
            find = partial(_damage_of_resumed, folder, step, args.ckpt_format, trusted, counts)
            if problem := from_rank_0(find) if dist.is_initialized() else find():
                raise CheckpointError(printable(problem))
    with loading(args):
        base = load_base(load_dir, args, rank0, *rest, **kwargs)
        gate_extra_states(base[0])
    return base


@around
def checked_tracker(read_metadata: Callable[..., Any], tracker_filename: str) -> Any:
    """Replaces ``read_metadata``: an empty tracker file means the newest checkpoint."""
    file, iteration = Path(tracker_filename), None
    args = releases.training_args()
    if is_ours(args) and args.ckpt_format == "torch_dist" and dist.is_initialized():
        iteration = from_rank_0(lambda: None if read_text(file).strip() else _newest_whole(file.parent))
    if iteration is None:
        return read_metadata(tracker_filename)
    killed = f"{file} is empty, as a save leaves it that was killed while it wrote there"
    say(f"{killed}; the newest checkpoint that is whole is of iteration {iteration}")
    return iteration, False


@around
def named_disk(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around saves: name a disk that takes no more."""
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


def resumed(folder: Path, step: int | None) -> Path | None:
    """The checkpoint that Megatron will take, if there is one."""
    if step:
        return folder / f"iter_{step:07d}"
    tracker = folder / TRACKER
    return newest(folder) if tracker.exists() and read_text(tracker).strip() else None


def damage_of(contents: Contents) -> str | None:
    """Why a checkpoint's files are not whole."""
    return next((f"{fault.what}. {fault.advice}" for fault in check_files(contents)), None)


def _damage_of_resumed(
    folder: Path,
    step: int | None,
    ckpt_format: str = "torch_dist",
    trusted: Set[str] | None = None,
    counts: bool = True,
) -> str | None:
    """What is wrong with the files that Megatron will read."""
    try:
        path = resumed(folder, step)
        if path is None or (path.is_dir() and is_legacy(path)):
            return None
        if ckpt_format == "torch_dist":
            contents = contents_of(path) if dist.is_initialized() else read_contents(path)
            if damage := damage_of(contents):
                return f"{path}: {damage}"
            if counts and (wrong := next(check_counts(contents), None)):
                return f"{path}: {wrong.what}. {wrong.advice}"
        else:
            contents = read_layout(path)
        if trusted is not None:
            if ckpt_format == "torch_dist" and not dist.is_initialized():  # Megatron reads arguments only
                contents = replace(contents, blobs={})
            if harm := next(check_pickles(contents, trusted), None):
                return f"{path}: {harm.what}. {harm.advice}"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _newest_whole(folder: Path) -> int | None:
    names = [path.name.removeprefix("iter_") for path in folder.glob("iter_*")]
    steps = sorted(map(int, filter(str.isdecimal, names)), reverse=True)
    return next((step for step in steps if _damage_of_resumed(folder, step) is None), None)
