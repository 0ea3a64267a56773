"""Which parameters decay, which are matrices, and which are embeddings and output layers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

OUTPUT_LAYERS = ("lm_head", "head", "output", "output_head", "output_layer", "embed_out", "unembed", "classifier")
"""Names of a Linear that is an output layer, where no number is in the path to it, as in that of a block's layers."""

MARK = "is_embedding_or_output_parameter"
"""Attribute of a parameter, True or False, that says it where names do not; Megatron sets it as well."""

Group = dict[str, Any]


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay is for a parameter: more than one dimension, and no "bias" in the name."""
    return parameter.ndim > 1 and "bias" not in name


def mark_embeddings_and_outputs(model: nn.Module) -> None:
    """Set :data:`MARK` on the weights of embeddings and output layers that do not have it."""
    for name, module in model.named_modules():
        embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        output = isinstance(module, nn.Linear) and _is_output(name)
        if (embedding or output) and not hasattr(module.weight, MARK):
            setattr(module.weight, MARK, True)


def divided(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Groups of what an optimizer of matrices is given, and of the rest: what does not decay or is marked.

    Args:
        groups: with ``param_names``, as :func:`~megatron_eopt.plain.build.build_optimizer` makes them.
    """
    matrices: list[Group] = []
    rest: list[Group] = []
    for group in groups:
        named = list(zip(group["param_names"], group["params"], strict=True))
        taken = [decays(name, p) and not getattr(p, MARK, False) for name, p in named]
        for into, wanted in ((matrices, True), (rest, False)):
            some = [each for each, take in zip(named, taken, strict=True) if take is wanted]
            if some:
                others = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                into.append({"params": some, **others})
    return matrices, rest


def _is_output(name: str) -> bool:
    *path, last = name.split(".")
    return last in OUTPUT_LAYERS and not any(part.isdigit() for part in path)
