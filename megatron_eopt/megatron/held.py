"""Which parameter of the model which torch optimizer inside Megatron's wrappers holds on this rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.registry import built_as


@dataclass(frozen=True)
class Held:
    """A parameter and what updates it.

    Attributes:
        parameter: the model's.
        optimizer: the torch optimizer.
        group: its group there.
        own: what the torch optimizer holds for it, itself or its fp32 copy; None where that is shards of a buffer.
    """

    parameter: Tensor
    optimizer: Optimizer
    group: dict[str, Any]
    own: Tensor | None


def held(optimizer: Any) -> Iterator[Held]:
    """All that an optimizer of Megatron's holds on this rank, in the order of its wrappers and groups."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for each in chained:
            yield from held(each)
    elif getattr(optimizer, "optimizer", None) is not None:
        ranges = getattr(optimizer, "model_param_group_index_map", None)
        yield from _held_whole(optimizer) if ranges is None else _held_in_shards(optimizer, ranges)


def model_parameters(wrapper: Any) -> list[Tensor]:
    """Those of the model, in the order of the torch optimizer's, which may be their fp32 copies.

    Args:
        wrapper: Megatron's, of one torch optimizer that holds whole parameters.
    """
    groups = (getattr(wrapper, name, []) for name in ("fp32_from_float16_groups", "float16_groups"))
    of_main = {
        id(main): model
        for mains, models in zip(*groups, strict=True)
        for main, model in zip(mains, models, strict=True)
    }
    own = (parameter for group in wrapper.optimizer.param_groups for parameter in group["params"])
    return [of_main.get(id(parameter), parameter) for parameter in own]


def owner_name(optimizer: Optimizer) -> str:
    """The name by which a run asks for a torch optimizer: the registered one, or that of its kind."""
    name = built_as(optimizer)
    kind = type(optimizer).__name__
    known = ("adam", "sgd", "lion", "muon")  # which Megatron builds by itself, Muon up to 0.17
    return name or next((name for name in known if name in kind.lower()), kind)


def _held_whole(wrapper: Any) -> Iterator[Held]:
    models = iter(model_parameters(wrapper))
    for group in wrapper.optimizer.param_groups:
        for own in group["params"]:
            yield Held(next(models), wrapper.optimizer, group, own)


def _held_in_shards(wrapper: Any, ranges: dict[Tensor, tuple[int, int]]) -> Iterator[Held]:
    for parameter, (number, _) in ranges.items():
        yield Held(parameter, wrapper.optimizer, wrapper.optimizer.param_groups[number], None)
