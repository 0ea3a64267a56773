"""The trainable parameters of a Megatron model: names and shapes that are the same at every parallel size."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_eopt.overrides import ParameterInfo, unwrapped
from megatron_eopt.parallel.layout import is_cut_again, is_expert, is_sharded, padding_of

_GROUPED_WEIGHT = re.compile(r"(weight|bias)(\d+)")


@dataclass(frozen=True)
class Described:
    """A trainable parameter of this rank.

    Attributes:
        parameter: itself, or this rank's part of it.
        info: what selectors see: its global name and shape, and the attributes that Megatron set.
        chunk: the model chunk that has it.
        path: where the module that it belongs to lies in the chunk.
    """

    parameter: Tensor
    info: ParameterInfo
    chunk: Any
    path: str


def trainable(model_chunks: Sequence[Any], pg_collection: Any) -> list[Described]:
    """All parameters that require a gradient, in the order of the model; one that is used twice comes once."""
    return [
        Described(parameter, _info(name, parameter, pg_collection), chunk, path)
        for chunk in model_chunks
        for name, parameter, path in _named(chunk)
        if parameter.requires_grad
    ]


def frozen_names(model_chunks: Sequence[Any]) -> list[str]:
    """Global names of the parameters that require no gradient."""
    named = (each for chunk in model_chunks for each in _named(chunk))
    return [name for name, parameter, _ in named if not parameter.requires_grad]


def _named(chunk: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Global name, parameter, and where its module is."""
    numbers = dict(_numbers(chunk))
    for name, parameter in chunk.named_parameters():
        path, _, last = name.rpartition(".")
        yield _global_name(path, last, numbers), parameter, path


def _numbers(chunk: nn.Module) -> Iterator[tuple[str, int]]:
    """Where a module's number in a list differs from its global one: path -> by how much."""
    for path, module in chunk.named_modules():
        layer = getattr(module, "layer_number", None)
        parent, _, last = path.rpartition(".")
        if isinstance(layer, int) and parent.rpartition(".")[2] == "layers" and last.isdecimal():
            yield path, layer - 1 - int(last)
        experts = getattr(module, "num_local_experts", None)
        group = getattr(module, "ep_group", None)
        if isinstance(experts, int) and group is not None:
            yield f"{path}.local_experts.*", group.rank() * experts
            yield f"{path}.linear_fc*.weight*", group.rank() * experts


def _global_name(path: str, last: str, numbers: dict[str, int]) -> str:
    parts = path.split(".")
    for place, part in enumerate(parts):
        if not part.isdecimal():
            continue
        ahead = ".".join(path.split(".")[:place])
        offset = numbers.get(f"{ahead}.{part}", numbers.get(f"{ahead}.*", 0))
        parts[place] = str(int(part) + offset)
    grouped = _GROUPED_WEIGHT.fullmatch(last)
    if grouped:  # Transformer Engine's experts are numbered in the name of the weight
        owner = path.rpartition(".")[0]
        last = f"{grouped[1]}{int(grouped[2]) + numbers.get(f'{owner}.linear_fc*.weight*', 0)}"
    return unwrapped(".".join([*parts, last] if path else [last]))


def _info(name: str, parameter: Tensor, pg_collection: Any) -> ParameterInfo:
    attributes = {key: value for key, value in vars(parameter).items() if isinstance(value, bool | int | str)}
    # Megatron says so only while it builds the optimizer
    attributes["expert_tp"] = is_expert(parameter) or ("experts" in name and "shared" not in name)
    return ParameterInfo(name, _global_shape(parameter, pg_collection), attributes, parameter=parameter)


def _global_shape(parameter: Tensor, pg_collection: Any) -> tuple[int, ...]:
    shape, prefix = list(parameter.shape), "expt_" if is_expert(parameter) else ""
    group, again = (getattr(pg_collection, prefix + name, None) for name in ("tp", "gtp_remat"))
    if is_cut_again(parameter) and again is not None and again.size() > 1:
        shape[0] = shape[0] * again.size() - padding_of(parameter)
    if is_sharded(parameter) and group is not None:
        shape[parameter.partition_dim] *= group.size()  # type: ignore[attr-defined]
    return tuple(shape)
