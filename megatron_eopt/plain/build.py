"""From a model and a config to an optimizer."""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from megatron_eopt.matrices import tag_declared
from megatron_eopt.optimizers.parameters import NAME
from megatron_eopt.plain.config import OptimizerConfig
from megatron_eopt.plain.routing import decays, mark_embeddings_and_outputs
from megatron_eopt.registry import get_optimizer_builder

logger = logging.getLogger(__name__)

Named = Sequence[tuple[str, Tensor]]

_COMPILED = "_orig_mod."
"""What torch.compile puts into the names of a model's parameters."""


def build_optimizer(model: nn.Module, config: OptimizerConfig | Any) -> Optimizer:
    """Build the optimizer that a config names, for the trainable parameters of a model.

    Weight decay is for parameters of more than one dimension without "bias" in their name: the builder gets them as the
    first group, and all others as a second one without decay; one of the two may be empty. Each parameter has its name
    as the attribute ``name_in_model``. The first rank logs how many there are. Call it when the model lies as it will
    be trained: after ``to(device)``, ``fully_shard`` and the like.

    Optimizers of matrices leave embeddings and output layers to AdamW. These are marked by the attribute
    ``is_embedding_or_output_parameter``, unless a parameter has it: the weights of ``nn.Embedding`` and
    ``nn.EmbeddingBag``, also where they are tied, and of a ``nn.Linear`` with one of the names in
    :data:`~megatron_eopt.plain.routing.OUTPUT_LAYERS`.

    What :func:`megatron_eopt.matrices.declare` said of names is in force for them.

    Args:
        model: as it lies for training.
        config: an :class:`~megatron_eopt.plain.config.OptimizerConfig`, or any object that has some of its fields;
            it is handed on to the builder as it is.

    Raises:
        ValueError: if no parameter is trainable, and for what the optimizer refuses.
    """
    optimizer_name = getattr(config, "name", OptimizerConfig.name)
    weight_decay = getattr(config, "weight_decay", OptimizerConfig.weight_decay)
    builder = get_optimizer_builder(optimizer_name)
    named = list(model.named_parameters())
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter, of {len(named)} in all: give a model with parameters "
            f"whose requires_grad is set"
        )
    mark_embeddings_and_outputs(model)
    tag_declared(trained)
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    for name, parameter in trained:
        setattr(parameter, NAME, name.replace(_COMPILED, "").removeprefix(prefix))
    decayed = [each for each in trained if decays(*each)]
    others = [each for each in trained if not decays(*each)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(
            "%s: weight decay %s of %s, none of %s; %s parameters are frozen",
            optimizer_name,
            weight_decay,
            _counted(decayed),
            _counted(others),
            len(named) - len(trained),
        )
    groups = [
        {"params": [parameter for _, parameter in decayed], "weight_decay": weight_decay},
        {"params": [parameter for _, parameter in others], "weight_decay": 0.0},
    ]
    return builder(groups, config)


def _counted(named: Named) -> str:
    return f"{len(named)} parameters with {sum(parameter.numel() for _, parameter in named)} entries"
