"""From a model and a config to an optimizer."""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from megatron_eopt.matrices import tag_declared
from megatron_eopt.plain.config import OptimizerConfig
from megatron_eopt.plain.routing import decays, mark_embeddings_and_outputs
from megatron_eopt.registry import get_optimizer_builder

logger = logging.getLogger(__name__)

Named = Sequence[tuple[str, Tensor]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer that a config names, for the trainable parameters of a model.

    Weight decay is for parameters of more than one dimension without "bias" in their name: the builder gets them as the
    first group, and all others as a second one without decay, both with their names. The first rank logs how many there
    are. Call it when the model lies as it will be trained: after ``to(device)``, ``fully_shard`` and the like.

    Optimizers of matrices leave embeddings and output layers to AdamW. These are marked by the attribute
    ``is_embedding_or_output_parameter``, unless a parameter has it: the weights of ``nn.Embedding`` and
    ``nn.EmbeddingBag``, also where they are tied, and of a ``nn.Linear`` with one of the names in
    :data:`~megatron_eopt.plain.routing.OUTPUT_LAYERS`.

    What :func:`megatron_eopt.matrices.declare` said of names is in force for them.

    Raises:
        ValueError: if no parameter is trainable, and for what the optimizer refuses.
    """
    builder = get_optimizer_builder(config.name)
    named = list(model.named_parameters())
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter, of {len(named)} in all: give a model with parameters "
            f"whose requires_grad is set"
        )
    mark_embeddings_and_outputs(model)
    tag_declared(trained)
    decayed = [each for each in trained if decays(*each)]
    others = [each for each in trained if not decays(*each)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(
            "%s: weight decay %s of %s, none of %s; %s parameters are frozen",
            config.name,
            config.weight_decay,
            _counted(decayed),
            _counted(others),
            len(named) - len(trained),
        )
    groups = [_group(decayed, config.weight_decay), _group(others, 0.0)]
    return builder([group for group in groups if group["params"]], config)


def _group(named: Named, weight_decay: float) -> dict[str, Any]:
    return {
        "params": [parameter for _, parameter in named],
        "param_names": [name for name, _ in named],
        "weight_decay": weight_decay,
    }


def _counted(named: Named) -> str:
    return f"{len(named)} parameters with {sum(parameter.numel() for _, parameter in named)} entries"
