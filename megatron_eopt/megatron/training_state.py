"""What a run of ``megatron.training`` holds in this process."""

import sys
from typing import Any


def training_args() -> Any:
    """The arguments of ``megatron.training``; None where it is not running."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def training_writers() -> tuple[Any, Any]:
    """Megatron's TensorBoard and W&B writers; None for a missing one."""
    known = sys.modules.get("megatron.training.global_vars")
    return getattr(known, "_GLOBAL_TENSORBOARD_WRITER", None), getattr(known, "_GLOBAL_WANDB_WRITER", None)
