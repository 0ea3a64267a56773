"""Which checkpoint a run of ``megatron.training`` resumes from, and that it is whole, before Megatron looks at it.

What Megatron makes of a damaged checkpoint depends on what is damaged: another format, a failed read far below, or an
exit with status 0 where a save was killed while it wrote the tracker file, which a job queue takes for success.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_eopt.checkpoints.contents import TRACKER, CheckpointError, is_legacy, newest, read_contents
from megatron_eopt.checkpoints.problems import check_files
from megatron_eopt.megatron import releases
from megatron_eopt.registry import list_optimizers


def checked_base(load_base: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_load_base_checkpoint``: a checkpoint in torch_dist that is not whole is refused on all ranks.

    Where there is no tracker file Megatron starts anew, and it does so still: that is how a first save that was killed
    looks.
    """

    @functools.wraps(load_base)
    def load_base_checked(load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
        if rank0 and load_dir is not None and _is_ours(args) and dist.is_initialized():
            problem = _on_rank_0(lambda: _problem(Path(load_dir), getattr(args, "ckpt_step", None)))
            if problem:
                raise CheckpointError(problem)
        return load_base(load_dir, args, rank0, *rest, **kwargs)

    return load_base_checked


def checked_tracker(read_metadata: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``read_metadata``: an empty tracker file, which a killed save leaves, stands for the newest checkpoint."""

    @functools.wraps(read_metadata)
    def read_metadata_checked(tracker_filename: str) -> Any:
        tracker = Path(tracker_filename)
        if not _is_ours(releases.training_args()) or not dist.is_initialized():
            return read_metadata(tracker_filename)
        iteration = _on_rank_0(lambda: None if tracker.read_text().strip() else _newest_whole(tracker.parent))
        if iteration is None:
            return read_metadata(tracker_filename)
        if dist.get_rank() == 0:
            print(
                f"megatron_eopt: {tracker} is empty, as a save leaves it that was killed while it wrote there; the "
                f"newest checkpoint that is whole is of iteration {iteration}",
                flush=True,
            )
        return iteration, False

    return read_metadata_checked


def _is_ours(args: Any) -> bool:
    name = getattr(args, "optimizer", "").removeprefix("dist_")
    return name in list_optimizers() and getattr(args, "ckpt_format", None) == "torch_dist"


def _on_rank_0[T](look: Callable[[], T]) -> T:
    """What the first rank finds, on all ranks."""
    found: list[Any] = [look() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    result: T = found[0]
    return result


def _problem(folder: Path, step: int | None) -> str | None:
    """Why the checkpoint cannot be resumed from that Megatron will take."""
    try:
        tracker = folder / TRACKER
        if not step and not (tracker.is_file() and tracker.read_text().strip()):
            return None
        path = folder / f"iter_{step:07d}" if step else newest(folder)
        if path.is_dir() and is_legacy(path):
            return None
        faults = [problem for problem in check_files(read_contents(path)) if problem.severity == "error"]
        return f"{path}: {faults[0].what}. {faults[0].advice}" if faults else None
    except CheckpointError as error:
        return str(error)


def _newest_whole(folder: Path) -> int | None:
    steps = sorted((int(each.name.removeprefix("iter_")) for each in folder.glob("iter_*")), reverse=True)
    return next((step for step in steps if _problem(folder, step) is None), None)
