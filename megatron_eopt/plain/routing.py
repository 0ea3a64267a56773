"""Which parameters decay, which are matrices, which are factors of one, and which are embeddings and output layers."""

import re
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from torch import Tensor, nn

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.parameters import NAME
from megatron_eopt.optimizers.spectron import factor_pairs

OUTPUT_LAYERS = ("lm_head", "head", "output", "output_head", "output_layer", "embed_out", "unembed", "classifier")
"""Names of a Linear that is an output layer, where no number is in the path to it, as in that of a block's layers."""

MARK = "is_embedding_or_output_parameter"
"""Attribute of a parameter, True or False, that says it where names do not; Megatron sets it as well."""

MAX_ASPECT_RATIO = 10
"""Of the matrices that Muon is given."""

Group = dict[str, Any]
Rule = Callable[[Tensor], str | None]
"""Why a parameter is AdamW's; None where an optimizer of matrices is given it."""


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


def for_matrices(parameter: Tensor) -> str | None:
    """The rule of optimizers of matrices: what has two dimensions, or is declared to be several matrices."""
    if parameter.ndim > 2 and declared_split(parameter) is None:
        return "of more than two dimensions"
    return _other_than_hidden(parameter)


def for_muon(parameter: Tensor) -> str | None:
    """The rule of Muon: also what is flattened to a matrix, and nothing that is far longer than wide."""
    return for_muon_of_all(parameter) or _other_than_hidden(parameter)


def for_muon_of_all(parameter: Tensor) -> str | None:
    """KempnerForge's rule of Muon: by shape alone, embeddings and output layers among them."""
    if parameter.ndim < 2:
        return "of fewer than two dimensions"
    too_long = declared_split(parameter) is None and _aspect_ratio(parameter) > MAX_ASPECT_RATIO
    return f"of aspect ratio above {MAX_ASPECT_RATIO}" if too_long else None


def divided(groups: Sequence[Group], why_adamw: Rule) -> tuple[list[Group], list[Group]]:
    """Groups of what an optimizer of matrices is given, and of the rest; none is empty."""
    matrices = [_part(group, lambda p: why_adamw(p) is None) for group in groups]
    rest = [_part(group, lambda p: why_adamw(p) is not None) for group in groups]
    return [group for group in matrices if group["params"]], [group for group in rest if group["params"]]


def without_factors(groups: Sequence[Group], patterns: Sequence[tuple[str, str]]) -> tuple[list[Group], list[Group]]:
    """Groups of factor pairs, each with the settings of the group of its first factors, and the groups without them.

    Args:
        groups: of parameters that know their names.
        patterns: names of the two factors, as in :class:`~megatron_eopt.plain.config.OptimizerConfig`.

    Raises:
        ValueError: for a pattern that no name fits, a factor without the other one, or one in two pairs.
    """
    named = {getattr(p, NAME, ""): p for group in groups for p in group["params"]}
    pairs = [(named[a], named[b]) for a, b in _pairs(list(named), patterns)]
    factors = {factor for pair in pairs for factor in pair}
    found = []
    for group in groups:
        own = set(group["params"])
        settings = {key: value for key, value in group.items() if key != "params"}
        found.append(factor_pairs([pair for pair in pairs if pair[0] in own], **settings))
    return [group for group in found if group["params"]], [_part(group, lambda p: p not in factors) for group in groups]


def _pairs(names: Sequence[str], patterns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for first, second in patterns:
        expression = re.compile("(.*)".join(map(re.escape, first.split("*"))))
        matched = [match for match in map(expression.fullmatch, names) if match]
        if not matched:
            raise ValueError(f"no parameter is called {first!r}, of which factors are to be paired: {', '.join(names)}")
        for match in matched:
            texts = iter(match.groups())
            other = "".join(next(texts, "*") if part == "*" else part for part in re.split(r"(\*)", second))
            pairs.append((match[0], other))
            if other not in names or other == match[0]:
                raise ValueError(
                    f"the other factor of {match[0]!r} is to be {other!r} by the pattern {second!r}, which is no other "
                    f"trainable parameter of the model"
                )
    factors = [name for pair in pairs for name in pair]
    twice = sorted({name for name in factors if factors.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} would be in two pairs of factors: write narrower patterns")
    return pairs


def _part(group: Group, taken: Callable[[Tensor], bool]) -> Group:
    return {**group, "params": [p for p in group["params"] if taken(p)]}


def _other_than_hidden(parameter: Tensor) -> str | None:
    if parameter.ndim < 2:
        return "of fewer than two dimensions"
    if getattr(parameter, MARK, False):
        return "embeddings or output layers"
    return None if decays(getattr(parameter, NAME, ""), parameter) else "biases"


def _aspect_ratio(parameter: Tensor) -> float:
    """Long side by short side of the matrix that a parameter is read as."""
    rows = parameter.shape[0]
    columns = parameter.numel() // rows if rows else 0
    return max(rows, columns) / min(rows, columns) if columns else inf


def _is_output(name: str) -> bool:
    *path, last = name.split(".")
    return last in OUTPUT_LAYERS and not any(part.isdigit() for part in path)
