"""What the run that saved a checkpoint had decided, for bit-equal resumes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from megatron_eopt.checkpoints.contents import read_blob, read_layout
from megatron_eopt.checkpoints.gate import Load
from megatron_eopt.checkpoints.states import BLOCK, blocks_of
from megatron_eopt.megatron.checkpoints.stored import contents_of
from megatron_eopt.megatron.checkpoints.whole import resumed
from megatron_eopt.megatron.support.run import on
from megatron_eopt.optimizers.base import UNDECIDED
from megatron_eopt.parallel.plan import TpMode

# With these Megatron loads no optimizer state, or chooses between two folders.
_NOT_READ = ("finetune", "no_load_optim", "moe_use_upcycling", "non_persistent_ckpt_type")


class Decided(NamedTuple):
    """Decisions of the run that saved; empty where unknown."""

    tp_mode: TpMode | None = None
    settings: Mapping[str, dict[str, Any]] = {}  # class of an optimizer -> kernels and rates in its groups


def decided_before(args: Any, megatron_fsdp: bool) -> Decided:
    """Decisions in the checkpoint to load; empty if unreadable."""
    if not on(args, "load") or on(args, *_NOT_READ):
        return Decided()
    try:
        path = resumed(Path(args.load), getattr(args, "ckpt_step", None))
        if path is None or path.name == "release":  # which is without optimizer state
            return Decided()
        return _in_fsdp_dtensor(path) if megatron_fsdp else _in_torch_dist(path)
    except Exception:  # whatever is wrong with it, the load says
        return Decided()


def _in_torch_dist(path: Path) -> Decided:
    modes = []
    groups = []
    for block in blocks_of(contents_of(path).common.get("optimizer")):
        modes.append(block["settings"].get("tp_mode"))
        for group in block["groups"]:
            groups.append((block["optimizer"], group["settings"]))
    return _decided(modes, groups)


def _in_fsdp_dtensor(path: Path) -> Decided:
    blobs = read_layout(path).blobs

    def read(key: str) -> Any:
        return json.loads(Load().load_saved(read_blob(path, blobs[key])))

    groups = [tuple(read(key)) for key in blobs if key.startswith("optimizer.settings.")]
    return _decided([read(f"optimizer.{BLOCK}.run")["tp_mode"]], groups)


def _decided(modes: Iterable[Any], groups: Iterable[tuple[str, Mapping[str, Any]]]) -> Decided:
    """The first of each; ``groups``: class of the optimizer, and settings."""
    settings: dict[str, dict[str, Any]] = {}
    for name, group in groups:
        of_class = settings.setdefault(name, {})
        for key in UNDECIDED:
            if key in group:
                of_class.setdefault(key, group[key])
    mode = next((mode for mode in modes if mode in get_args(TpMode)), None)
    return Decided(mode, settings)
