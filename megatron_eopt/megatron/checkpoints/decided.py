"""What the run that saved a checkpoint had decided, for bit-equal resumes."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_eopt.checkpoints.contents import read_blob, read_layout
from megatron_eopt.checkpoints.gate import Load
from megatron_eopt.checkpoints.states import blocks_of
from megatron_eopt.megatron.checkpoints.stored import contents_of
from megatron_eopt.megatron.checkpoints.whole import resumed
from megatron_eopt.megatron.support.run import on
from megatron_eopt.optimizers.base import DECIDED_BY_STEPS

# With these Megatron loads no optimizer state, or chooses between two folders.
_NOT_READ = ("finetune", "no_load_optim", "moe_use_upcycling", "non_persistent_ckpt_type")


Decided = dict[str, dict[str, Any]]
"""Class of an optimizer -> kernels in its groups."""


def decided_before(args: Any, megatron_fsdp: bool) -> Decided:
    """Decisions in the checkpoint to load; empty if unreadable."""
    if not on(args, "load") or on(args, *_NOT_READ):
        return {}
    try:
        path = resumed(Path(args.load), getattr(args, "ckpt_step", None))
        if path is None or path.name == "release":  # which is without optimizer state
            return {}
        return _decided(_in_fsdp_dtensor(path) if megatron_fsdp else _in_torch_dist(path))
    except Exception:  # whatever is wrong with it, the load says
        return {}


def _in_torch_dist(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Class of the optimizer and settings of each group, as in the other format."""
    for block in blocks_of(contents_of(path).common.get("optimizer")):
        for group in block["groups"]:
            yield block["optimizer"], group["settings"]


def _in_fsdp_dtensor(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, blob in read_layout(path).blobs.items():
        if key.startswith("optimizer.settings."):
            name, settings = json.loads(Load().load_saved(read_blob(path, blob)))
            yield name, settings


def _decided(groups: Iterable[tuple[str, Mapping[str, Any]]]) -> Decided:
    """The first of each."""
    decided: Decided = {}
    for name, group in groups:
        of_class = decided.setdefault(name, {})
        for key in DECIDED_BY_STEPS:
            if key in group:
                of_class.setdefault(key, group[key])
    return decided
