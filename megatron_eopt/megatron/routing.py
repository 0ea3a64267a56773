"""Which parameters go to which optimizer, in Megatron's terms."""

from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.registry import is_muon_excluded, is_nonlinear_or_embedding


def nonlinear_and_embedding_to_adam() -> dict[ParamKey, dict[str, Any]]:
    """Overrides that give embeddings, output layers and whatever is no matrix to Megatron's Adam."""
    predicate = ParamPredicate(name="nonlinear_or_embedding", fn=is_nonlinear_or_embedding)
    return {ParamKey(predicate=predicate): {"optimizer": "adam"}}


def excluded_from_muon_to_adam() -> dict[ParamKey, dict[str, Any]]:
    """The same, and those whose attribute ``use_muon`` is False."""
    predicate = ParamPredicate(name="muon_excluded", fn=is_muon_excluded)
    return {ParamKey(predicate=predicate): {"optimizer": "adam"}}
