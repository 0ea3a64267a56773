"""What differs between Megatron-Core 0.19 and 0.20; imports none."""

import importlib
import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch.nn import Module

from megatron_eopt.redirect import Redirection, Redirections, becomes

SUPPORTED = "0.19"
MAIN, MAIN_AS_OF = "0.20", "22 August 2026"  # what Megatron's main branch was to become, and when it was tried


def caveat(release: str) -> str | None:
    """What was not tried of a release; None for :data:`SUPPORTED`."""
    if number(release) <= number(SUPPORTED):
        return None
    if number(release) == number(MAIN):
        return (
            f"megatron-core {release} is supported as Megatron's main branch was on {MAIN_AS_OF}: what has changed "
            f"since then is untried"
        )
    return f"megatron-core {release} is newer than {MAIN}, the latest that was tried"


def number(release: str) -> tuple[int, int]:
    """The first two numbers of a release; zeros where missing."""
    major, minor, *_ = *re.findall(r"\d+", release), "0", "0"
    return int(major), int(minor)


def distributed_optimizer(release: str) -> dict[str, Any]:
    """What ``--use-distributed-optimizer`` means, as facts of ``support``'s Run.

    0.20 lays gradient buffers out for whole matrices; 0.19's ``pretrain`` does not.
    """
    facts = {"layer_wise": True, "data_parallel": 2}
    if number(release) != (0, 19):
        facts |= {"whole_matrices": True, "ddp.use_distributed_optimizer": True}
    return facts


def version() -> str:
    """The imported release, without a commit after ``+``."""
    return str(importlib.import_module("megatron.core").__version__).partition("+")[0]


def core_optimizer(name: str = "") -> ModuleType:
    """Megatron's module of optimizers, or one in it."""
    return importlib.import_module(f"megatron.core.optimizer{name}")


def has_training() -> bool:
    """Whether ``megatron.training`` and what it needs can be imported."""
    try:
        importlib.import_module("megatron.training.training")
    except ImportError:
        return False
    return True


def package_not_needed() -> Redirections:
    """Let Megatron build optimizers without the emerging-optimizers package."""
    reason = "the optimizers that Megatron builds are ours"
    return Redirections([Redirection(core_optimizer(), "HAVE_EMERGING_OPTIMIZERS", becomes(True), reason)])


def check_supported() -> None:
    """Raise an ImportError for a release before :data:`SUPPORTED`."""
    if number(version()) < number(SUPPORTED):
        raise ImportError(f"megatron_eopt needs megatron-core {SUPPORTED} or later, found {version()}: upgrade it")


def training_args() -> Any:
    """The arguments of ``megatron.training``; None where it is not running."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def training_writers() -> tuple[Any, Any]:
    """Megatron's TensorBoard and W&B writers; None for a missing one."""
    known = sys.modules.get("megatron.training.global_vars")
    return getattr(known, "_GLOBAL_TENSORBOARD_WRITER", None), getattr(known, "_GLOBAL_WANDB_WRITER", None)


def mark_sinks(model_chunks: Iterable[Module]) -> None:
    """Mark learnable attention sinks as shards of their heads.

    Megatron does not, and so leaves those of all ranks but the first out of the gradient's norm (MLM 7452, finding 8).
    """
    for chunk in model_chunks:
        for name, sinks in chunk.named_parameters():
            if name.rpartition(".")[2] == "softmax_offset":
                attributes = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
                vars(sinks).update(attributes)


def linear_attention_rows(module: Any) -> dict[str, int]:
    """Global rows of matrices in linear attention's ``in_proj``, if any."""
    if not hasattr(module, "in_proj_split_names"):
        return {}
    sizes = zip(module.in_proj_split_names, module.in_proj_split_sections, strict=True)
    return {name: size * module.tp_size for name, size in sizes}


def delta_product_rows(module: Any) -> dict[str, int]:
    """Global rows of matrices in a gated delta product's ``in_proj`` (0.20).

    Each Householder step has its own V, K and b.
    """
    steps = range(module.num_householder)
    group = module.ngroups * module.d_state
    return {
        "z": module.d_inner,
        **{f"V{step}": module.d_inner for step in steps},
        **{f"K{step}": group for step in steps},
        "Q": group,
        **{f"b{step}": module.nheads for step in steps},
        "a": module.nheads,
    }
