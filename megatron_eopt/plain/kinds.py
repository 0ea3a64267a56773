"""What parameters are: matrices, factors, embeddings, output layers, the rest."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from megatron_eopt.matrices import (
    ATTRIBUTE,
    WHOLE,
    Split,
    concatenated,
    declared_split,
    experts,
    flattened,
    interleaved_gate_up,
    transposed,
)
from megatron_eopt.optimizers.spectron import factor_pairs
from megatron_eopt.step.parameters import NAME

OUTPUT_LAYERS = {
    "lm_head",
    "head",
    "output",
    "output_head",
    "output_layer",
    "embed_out",
    "unembed",
    "classifier",
    "score",
    "fc",
    "qa_outputs",
}
"""Names of output layers, where no number comes before them in the path, as in a block; add those of your models."""

OUTPUT_GETTERS = ("get_output_embeddings", "get_classifier")  # by which models of transformers and timm say it

OUTPUTS = "output layers"
VECTORS = "vectors and scalars"
MARK = "is_embedding_or_output_parameter"  # attribute of a parameter, True or False; Megatron sets it, too
MARKED_AS = "marked_as"  # attribute of what is marked here
NO_LINEAR_MAP = "is_no_linear_map"  # attribute of a parameter of two or more dimensions that multiplies no vectors
LOGARITHMS = "A_log"  # name of Mamba's parameter (channels x states): logarithms of decay rates
MAX_ASPECT_RATIO = 10  # of the matrices that Muon is given
FEW_CHANNELS = 4  # of an image or its like: what reads or makes it is no hidden layer
FUSED = {"qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "gate_up_proj", "in_proj_qkvz", "in_proj_ba"}
"""Names of layers that Hugging Face's and others' models fuse several projections in."""

Group = dict[str, Any]
Rule = Callable[[Tensor], str | None]
"""What a parameter is that is AdamW's; None for those of an optimizer of matrices."""


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is decayed: no vector, no bias."""
    return parameter.ndim > 1 and "bias" not in name


def mark_other_than_hidden(model: nn.Module) -> None:
    """Set :data:`MARK` on weights of embeddings, output layers, first convolutions.

    Of convolutions also those from or to few channels, such as an image's.
    """
    first = True
    for name, module in model.named_modules():
        *path, last = name.split(".")
        outputs = _said_outputs(module)
        is_output = last in OUTPUT_LAYERS or (last == "decoder" and isinstance(module, nn.Linear))
        if is_output and not any(part.isdigit() for part in path):
            outputs.append(module)
        for layer in outputs:
            _mark(_output_weights(layer), OUTPUTS)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _mark(module.parameters(), "embeddings")  # several where it is parametrized
        if isinstance(module, _ConvNd) and module.groups == 1:
            if first or min(module.in_channels, module.out_channels) <= FEW_CHANNELS:
                _mark(module.parameters(), "first or last convolutions")
            first = False


def taken_for_hidden(model: nn.Module) -> str | None:
    """The last linear map, where none is known as an output layer, and nobody has said what it is."""
    marked = [p for p in model.parameters() if hasattr(p, MARK)]
    if any(getattr(p, MARKED_AS, OUTPUTS) == OUTPUTS for p in marked):
        return None
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear or any(hasattr(p, MARK) for p in linear[-1][1].parameters()):
        return None
    return linear[-1][0]


def _mark(weights: Iterable[Tensor], kind: str) -> None:
    for weight in weights:
        if weight.ndim > 1 and not hasattr(weight, MARK):
            setattr(weight, MARK, True)
            setattr(weight, MARKED_AS, kind)


def _said_outputs(module: nn.Module) -> list[nn.Module]:
    """The output layers that a model says it has."""
    said: list[Any] = []
    for name in OUTPUT_GETTERS:
        getter = getattr(module, name, None)
        if callable(getter) and not signature(getter).parameters:
            layers = getter()
            said += layers if isinstance(layers, list | tuple) else [layers]
    return [layer for layer in said if isinstance(layer, nn.Module)]


def _output_weights(layer: nn.Module) -> list[Tensor]:
    """The weights of an output layer, which may be wrapped, or the last of several.

    Those in it that have as many rows as the last one: parts of one weight, its copies and adapters.
    """
    weights = [p for p in layer.parameters() if p.ndim > 1]
    return [p for p in weights if p.shape[0] == weights[-1].shape[0]]


def mark_no_linear_maps(model: nn.Module) -> None:
    """Set :data:`NO_LINEAR_MAP` on ``A_log`` and grouped filters."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            grouped = name == "weight" and isinstance(module, _ConvNd) and module.groups > 1
            if grouped or name == LOGARITHMS:
                setattr(parameter, NO_LINEAR_MAP, True)


def declare_layers(model: nn.Module) -> None:
    """Declare the matrices of convolutions, torch's attention and gates, Hugging Face's Conv1D and experts.

    What is declared already stays.
    """
    for path, module in model.named_modules():
        for name, split in _splits(path, module).items():
            weight = getattr(module, name)
            if isinstance(weight, nn.Parameter) and declared_split(weight) is None:
                setattr(weight, ATTRIBUTE, split)


def _splits(path: str, module: nn.Module) -> dict[str, Split]:
    """The matrices in a module's own parameters, by name."""
    if isinstance(module, _ConvTransposeNd):
        return {"weight": transposed(flattened())}
    if isinstance(module, _ConvNd):
        return {"weight": flattened()}
    if isinstance(module, nn.MultiheadAttention):
        return {"in_proj_weight": concatenated(**dict.fromkeys("qkv"))}
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return _gates(module, "ifgo")
    if isinstance(module, nn.GRU | nn.GRUCell):
        return _gates(module, "rzn")
    if any(cls.__name__ == "Conv1D" for cls in type(module).__mro__):
        return _conv1d(path, module)
    return _experts(module)


def _gates(module: nn.Module, gates: str) -> dict[str, Split]:
    """The gates in a recurrent layer's weights, one behind the other."""
    names = [name for name, _ in module.named_parameters(recurse=False) if name.startswith(("weight_ih", "weight_hh"))]
    return dict.fromkeys(names, concatenated(**dict.fromkeys(gates)))


def _conv1d(path: str, module: nn.Module) -> dict[str, Split]:
    """The weight (in, out) of Hugging Face's Conv1D."""
    shape = tuple(module.get_parameter("weight").shape)
    if shape[1:] != (getattr(module, "nf", None),):
        return {}
    # GPT-2 fuses q, k and v in c_attn, and of cross attention k and v
    fused = {3.0: "qkv", 2.0: "kv"}.get(shape[1] / shape[0])
    split = WHOLE if fused is None or "c_attn" not in path.split(".") else concatenated(**dict.fromkeys(fused))
    return {"weight": transposed(split)}


def _experts(module: nn.Module) -> dict[str, Split]:
    """The matrices in a module's own stacks of experts, by name."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
    if "down_proj" not in shapes:
        return {}
    count, rows, cols = shapes["down_proj"]
    gate_up = shapes.get("gate_up_proj")
    if gate_up in ((count, 2 * cols, rows), (count, cols, 2 * rows)):
        is_transposed = gate_up == (count, cols, 2 * rows)
        by_turns = not getattr(module, "is_concatenated", True)
        by_turns = by_turns or any(cls.__name__.startswith("GptOss") for cls in type(module).__mro__)
        both = interleaved_gate_up(1) if by_turns else concatenated(gate=None, up=None)
        splits = {"gate_up_proj": both, "down_proj": WHOLE}
    else:  # their shapes are the same either way
        is_transposed = bool(getattr(module, "is_transposed", False))
        apart = [name for name in ("gate_proj", "up_proj") if shapes.get(name) == (count, cols, rows)]
        splits = dict.fromkeys([*apart, "down_proj"], WHOLE) if apart else {}
    stacks = {name: experts(count, split) for name, split in splits.items()}
    return {name: transposed(stack) if is_transposed else stack for name, stack in stacks.items()}


def for_matrices(parameter: Tensor) -> str | None:
    """Rule of most optimizers: hidden matrices, also those that are declared in more dimensions."""
    if parameter.ndim < 2:
        return VECTORS
    if parameter.ndim > 2 and parameter.numel() == max(parameter.shape):
        return "one row or column"
    if getattr(parameter, NO_LINEAR_MAP, False):
        return "no linear maps"
    if getattr(parameter, MARK, False):
        return str(getattr(parameter, MARKED_AS, "marked as embeddings or output layers"))
    if not decays(getattr(parameter, NAME, ""), parameter):
        return "biases"
    if parameter.ndim > 2 and declared_split(parameter) is None:
        return "more than two dimensions"
    return None


def for_muon(parameter: Tensor) -> str | None:
    """Rule of Muon: also no extreme aspect ratio."""
    return for_matrices(parameter) or for_muon_of_all(parameter)


def for_muon_of_all(parameter: Tensor) -> str | None:
    """KempnerForge's rule of Muon: by shape alone, also embeddings."""
    if parameter.ndim < 2:
        return VECTORS
    split = declared_split(parameter)
    if split is not None and (split.parts or split.stacked):
        return None
    short, long = sorted((parameter.shape[0], parameter.shape[1:].numel()))
    if short == 0 or long > MAX_ASPECT_RATIO * short:
        return f"matrices more than {MAX_ASPECT_RATIO} times as long as wide"
    return None


def kind_of_matrix(parameter: Tensor) -> str:
    """What a parameter of an optimizer of matrices is."""
    split = declared_split(parameter) or WHOLE
    said = ["experts" if split.stacked else "convolutions" if parameter.ndim > 2 else "hidden matrices"]
    if split.parts:
        order = "by turns" if split.order == "interleaved" else "one behind the other"
        said.append(f"{', '.join(part.name for part in split.parts)} {order}")
    if split.transposed:
        said.append("(in, out)")
    return ", ".join(said)


def divided(groups: Sequence[Group], why_adamw: Rule) -> tuple[list[Group], list[Group]]:
    """Non-empty groups of matrices, and of the rest."""
    matrices: list[Group] = []
    rest: list[Group] = []
    for group in groups:
        own = [p for p in group["params"] if why_adamw(p) is None]
        others = [p for p in group["params"] if why_adamw(p) is not None]
        if own:
            matrices.append({**group, "params": own})
        if others:
            rest.append({**group, "params": others})
    return matrices, rest


def fused_by_name(groups: Sequence[Group]) -> list[str]:
    """Names of matrices that are fused projections by their names, undeclared."""
    found = []
    for group in groups:
        for p in group["params"]:
            name = getattr(p, NAME, "")
            if declared_split(p) in (None, flattened()) and not FUSED.isdisjoint(name.split(".")[-2:]):
                found.append(name)
    return found


def adapters(groups: Sequence[Group]) -> list[str]:
    """Names of LoRA factors, by name and shape."""
    found = []
    for group in groups:
        for p in group["params"]:
            name = getattr(p, NAME, "")
            short, *_, long = sorted(p.shape)
            if "lora_" in name and short <= min(64, long // 4):
                found.append(name)
    return found


def without_factors(groups: Sequence[Group], patterns: Sequence[tuple[str, str]]) -> tuple[list[Group], list[Group]]:
    """Groups of factor pairs, and the groups without them.

    A pair has the settings of its first factor. A ``ValueError`` is for a pattern that no name fits, and for what is no
    pair of its own.
    """
    named = {getattr(p, NAME, ""): p for group in groups for p in group["params"]}
    other_of: dict[str, str] = {}
    for first, second in patterns:
        for name, other in _matched(first, second, named):
            taken = {*other_of, *other_of.values()}
            if other not in named or other == name or taken & {name, other}:
                raise ValueError(
                    f"{name!r} and {other!r} are no pair of factors, by {first!r} and {second!r}: expected two "
                    f"trainable parameters that are in no other pair"
                )
            other_of[name] = other
    paired = {*other_of, *other_of.values()}
    found = []
    others = []
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        own = {getattr(p, NAME, "") for p in group["params"]}
        pairs = [(named[first], named[second]) for first, second in other_of.items() if first in own]
        rest = [p for p in group["params"] if getattr(p, NAME, "") not in paired]
        if pairs:
            found.append(factor_pairs(pairs, **settings))
        others.append({**settings, "params": rest})
    return found, others


def _matched(first: str, second: str, names: Collection[str]) -> list[tuple[str, str]]:
    """The names that a pattern fits, each with that of the other factor."""
    expression = re.compile("(.*)".join(map(re.escape, first.split("*"))))
    pairs = []
    for name in names:
        match = expression.fullmatch(name)
        if match is None:
            continue
        other = second
        for text in match.groups():
            other = other.replace("*", text, 1)
        pairs.append((name, other))
    if not pairs:
        raise ValueError(f"no parameter is called {first!r}, of which factors are to be paired: {', '.join(names)}")
    return pairs
