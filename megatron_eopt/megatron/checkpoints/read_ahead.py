"""Read a checkpoint's decisions before the build, for bit-equal resumes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from megatron_eopt.checkpoints.contents import read_blob, read_layout
from megatron_eopt.checkpoints.gate import Load
from megatron_eopt.checkpoints.states import BLOCK, blocks_of
from megatron_eopt.family import CLASSES
from megatron_eopt.megatron.checkpoints.files import contents_of, resumed
from megatron_eopt.megatron.support.run import on
from megatron_eopt.optimizers.base import KERNEL, RATES
from megatron_eopt.optimizers.factored import FactoredOptimizer
from megatron_eopt.optimizers.step_choice import STEP_KERNELS
from megatron_eopt.parallel.plan import TpMode

Group = tuple[str, Mapping[str, Any]]  # class of its optimizer, and settings

_KEPT = {KERNEL: str, RATES: dict, STEP_KERNELS: str}  # settings of groups

# With these Megatron loads no optimizer state, or chooses between two folders.
_NOT_READ = ("finetune", "no_load_optim", "moe_use_upcycling", "non_persistent_ckpt_type")


class Decided(NamedTuple):
    """Decisions of the run that saved; None where unknown."""

    tp_mode: TpMode | None = None
    kernel: str | None = None  # of symmetric products, but for those of factors
    rates: dict[str, float] | None = None  # of the plan
    step_kernels: str | None = None
    factors_kernel: str | None = None


def decided_before(args: Any, megatron_fsdp: bool) -> Decided:
    """Decisions in the checkpoint to load; empty if unreadable."""
    if not on(args, "load") or on(args, *_NOT_READ):
        return Decided()
    try:
        path = resumed(Path(args.load), getattr(args, "ckpt_step", None))
        if path is None or path.name == "release":  # which is without optimizer state
            return Decided()
        modes, groups = (_of_fsdp_dtensor if megatron_fsdp else _of_torch_dist)(path)
        mode = next((mode for mode in modes if mode in get_args(TpMode)), None)
        factored = {name for name, cls in CLASSES.items() if issubclass(cls, FactoredOptimizer)}
        of_factors = [group for name, group in groups if name in factored]
        others = [group for name, group in groups if name not in factored]
        kept = (_common(others, key, kind) for key, kind in _KEPT.items())
        return Decided(mode, *kept)._replace(factors_kernel=_common(of_factors, KERNEL, str))
    except Exception:  # whatever is wrong with it, the load says
        return Decided()


def _of_torch_dist(path: Path) -> tuple[list[Any], list[Group]]:
    """The modes of optimizers, and the settings of groups."""
    blocks = blocks_of(contents_of(path).common.get("optimizer"))
    modes = [block["settings"].get("tp_mode") for block in blocks]
    return modes, [(block["optimizer"], group["settings"]) for block in blocks for group in block["groups"]]


def _of_fsdp_dtensor(path: Path) -> tuple[list[Any], list[Group]]:
    blobs = read_layout(path).blobs

    def read(key: str) -> Any:
        return json.loads(Load().load_saved(read_blob(path, blobs[key])))

    groups = [tuple(read(key)) for key in blobs if key.startswith("optimizer.settings.")]
    return [read(f"optimizer.{BLOCK}.run")["tp_mode"]], groups


def _common(groups: Iterable[Mapping[str, Any]], key: str, kind: type) -> Any:
    values = [group[key] for group in groups if key in group]
    known = values and isinstance(values[0], kind) and all(value == values[0] for value in values)
    return values[0] if known else None
