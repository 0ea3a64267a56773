"""Adam's first moments as momenta: a run that began with Adam goes on with Muon, where the user asks for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_eopt.checkpoints.states import BLOCK
from megatron_eopt.megatron.checkpoints.sharding import state_key
from megatron_eopt.optimizers.orthogonalized import MOMENTUM_BUFFER

FIRST_MOMENT = "exp_avg"


def imports_adam(parts: Sequence[Mapping[Any, Any]], stored: Mapping[str, Any]) -> bool:
    """Whether the user asked for Adam's first moments, and the checkpoint has these and no momentum.

    Args:
        parts: state dicts of Megatron's optimizers, with our block.
        stored: keys of the checkpoint.
    """
    asked = any(part[BLOCK]["import_adam"] for part in parts)
    momentum, first_moment = (state_key(name, "") for name in (MOMENTUM_BUFFER, FIRST_MOMENT))
    return (
        asked
        and not any(key.startswith(momentum) for key in stored)
        and any(key.startswith(first_moment) for key in stored)
    )


def take_first_moments(parts: Sequence[Mapping[Any, Any]]) -> None:
    """Let every momentum be read from where Adam's first moment is."""
    for part in parts:
        for value in nested_values(part):
            if isinstance(value, ShardedTensor | ShardedTensorFactory):
                name = value.key.removeprefix(state_key(MOMENTUM_BUFFER, ""))
                if name != value.key:
                    value.key = state_key(FIRST_MOMENT, name)
