"""Which parameters go to which optimizer, in Megatron's terms."""

from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.registry import is_nonlinear_or_embedding


def nonlinear_and_embedding_to_adam() -> dict[ParamKey, dict[str, Any]]:
    """Overrides that give embeddings, output layers and whatever is no matrix to Megatron's Adam."""
    predicate = ParamPredicate(name="nonlinear_or_embedding", fn=is_nonlinear_or_embedding)
    return {ParamKey(predicate=predicate): {"optimizer": "adam"}}
