"""Whether the files of a checkpoint are whole, before Megatron reads them."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_eopt.checkpoints.contents import (
    METADATA,
    TRACKER,
    CheckpointError,
    is_legacy,
    load_metadata,
    newest,
    read_contents,
    read_layout,
    read_text,
)
from megatron_eopt.checkpoints.faults import check_extra_states, check_pickles
from megatron_eopt.checkpoints.gate import reading, readings
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.checkpoints.stored import contents_of, damage_of
from megatron_eopt.megatron.consensus import from_rank_0, say
from megatron_eopt.megatron.support.facts import primary_of
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import list_optimizers
from megatron_eopt.screen import printable


def _is_our_run(args: Any) -> bool:
    return primary_of(args) in list_optimizers()


def _reading(args: Any) -> AbstractContextManager[None]:
    return reading(*(getattr(args, "trust_checkpoint_globals", None) or "").split(","))


@around
def checked_base(load_base: Original, load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
    """Replaces ``_load_base_checkpoint``: refuses damage and pickles with foreign names."""
    if not _is_our_run(args):
        return load_base(load_dir, args, rank0, *rest, **kwargs)
    with _reading(args):
        if rank0 and load_dir is not None:
            _refuse_damage(Path(load_dir), args)
        base = load_base(load_dir, args, rank0, *rest, **kwargs)
        check_extra_states(base[0])
    return base


@around
def gated_metadata(read: Original, reader: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``FileSystemReader.read_metadata``, which unpickles whatever is there."""
    if not readings or not isinstance(reader.path, Path):  # which is of object storage
        return read(reader, *args, **kwargs)
    return load_metadata(reader.path / METADATA)


def _refuse_damage(load_dir: Path, args: Any) -> None:
    folders: list[tuple[Path, int | None]] = [(load_dir, getattr(args, "ckpt_step", None))]
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        folders.append((Path(args.non_persistent_global_ckpt_dir or load_dir / "non_persistent"), None))
    for folder, step in folders:
        find = partial(damage_of_resumed, folder, step, args.ckpt_format)
        problem = from_rank_0(find) if dist.is_initialized() else find()
        if problem:
            raise CheckpointError(printable(problem))


@around
def checked_tracker(read_metadata: Original, tracker_filename: str) -> Any:
    """Replaces ``read_metadata``: an empty tracker file means the newest checkpoint."""
    file = Path(tracker_filename)
    iteration = None
    args = releases.training_args()
    if _is_our_run(args) and args.ckpt_format == "torch_dist" and dist.is_initialized():
        with _reading(args):
            iteration = from_rank_0(lambda: None if read_text(file) else _newest_whole(file.parent))
    if iteration is None:
        return read_metadata(tracker_filename)
    say(
        f"{file} is empty, as a save leaves it that was killed while it wrote there; the newest checkpoint that is "
        f"whole is of iteration {iteration}"
    )
    return iteration, False


def _newest_whole(folder: Path) -> int | None:
    names = [path.name.removeprefix("iter_") for path in folder.glob("iter_*")]
    for step in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
        if damage_of_resumed(folder, step) is None:
            return step
    return None


def resumed(folder: Path, step: int | None) -> Path | None:
    """The checkpoint that Megatron will take, if there is one."""
    if step:
        return folder / f"iter_{step:07d}"
    tracker = folder / TRACKER
    return newest(folder) if tracker.exists() and read_text(tracker) else None


def damage_of_resumed(folder: Path, step: int | None, ckpt_format: str = "torch_dist") -> str | None:
    """What is wrong with the files that Megatron will read."""
    try:
        path = resumed(folder, step)
        if path is None:
            return None
        legacy = path.is_dir() and is_legacy(path)
        if legacy or ckpt_format != "torch_dist":  # whose files are not all read here
            for file in path.rglob("*"):
                if file.exists() and not file.is_file() and not file.is_dir():
                    return f"{file} is no regular file: take another checkpoint, or a copy"
        if legacy:
            return None
        if ckpt_format == "torch_dist":
            contents = contents_of(path) if dist.is_initialized() else read_contents(path)
            damage = damage_of(contents)
            if damage is not None:
                return f"{path}: {damage}"
            if not dist.is_initialized():  # Megatron reads arguments only
                contents = replace(contents, blobs={})
        else:
            contents = read_layout(path)
        for problem in check_pickles(contents):
            return f"{path}: {problem.what}. {problem.advice}"
    except Exception as error:  # what is damaged or hostile raises anything
        return str(error)
    return None
