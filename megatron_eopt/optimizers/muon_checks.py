"""What settings, parameters and users' functions of Muon cannot be."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.settings.groups import DECOUPLED, METHOD
from megatron_eopt.settings.modifiers import INSTEAD_OF_DECAY, GroupModifiers
from megatron_eopt.settings.records import SCALE, names_of
from megatron_eopt.step.momenta.momentum_optimizer import OF_PARAMETERS
from megatron_eopt.step.parameters import check_shard

OF_MATRICES = ("scaled_orthogonalize_fn", "orthogonalize_fn")
DECIDED_BY = {"num_ns_steps": OF_MATRICES, "coefficient_type": OF_MATRICES} | dict.fromkeys(
    names_of(SCALE), ("scaled_orthogonalize_fn", "scale_factor_fn")
)
"""Settings of a group -> functions of the user's that decide in their place."""


def check_scale(modifiers: GroupModifiers, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse settings of the scale, unlike ``defaults``, where a modifier sizes updates."""
    for key in names_of(SCALE):
        if modifiers.size and key in defaults and settings[key] != defaults[key]:
            raise ValueError(
                f"{key} has no effect here, got {settings[key]!r}: the size of an update is {modifiers.size}; set lr, "
                f"take the setting away"
            )


def check_decided(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Refuse settings of a group, unlike the optimizer's, in whose place something else decides."""
    check_scale(optimizer.modifiers_of(group), group, optimizer.defaults)
    for key, functions in DECIDED_BY.items():
        users = optimizer._overridden(*functions)
        if users and key in optimizer.defaults and group[key] != optimizer.defaults[key]:
            raise ValueError(
                f"{key} has no effect here, got {group[key]!r}: {users[0]} of your own decides, take the setting away"
            )


def check_functions(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Refuse functions of the user's that do not go with other settings."""
    name = type(optimizer).__name__
    rule = optimizer.size_rule or optimizer.modifiers_of(group).size
    if rule and optimizer._overridden("scale_factor_fn"):
        raise ValueError(f"scale_factor_fn has no effect here: the size of an update is {rule}; set lr")
    users = optimizer._overridden(*OF_PARAMETERS)
    if not users:
        return
    if optimizer.execution.offload_fraction or optimizer.execution.cuda_graphs:
        raise ValueError(
            f"{name} has an {users[0]} of its own, which gets one parameter after another, whose state is on the "
            f"device, and may wait for it: leave offload_fraction at 0 and cuda_graphs off"
        )


def check_second_moment(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Refuse a second moment of updates that a user's function makes."""
    users = optimizer._overridden(*OF_PARAMETERS)
    method = optimizer.modifiers_of(group).moment2_method
    if users and method != "none":
        raise ValueError(
            f"{type(optimizer).__name__} has an {users[0]} of its own, and moment2_method {method!r} "
            f"needs the orthogonal factors of all matrices together: leave the setting away, or take "
            f"TensorParallelAdaptiveMuon"
        )


def check_parameter(optimizer: Any, parameter: Tensor) -> None:
    """Refuse a parameter whose step or state cannot be as asked for."""
    name = type(optimizer).__name__
    shape = tuple(parameter.shape)
    run = optimizer.execution
    if run.cuda_graphs and (parameter.device.type != "cuda" or optimizer.layout(parameter).ranks > 1):
        raise ValueError(
            f"cuda_graphs cannot work for parameters that other ranks share, or that are not on a CUDA device, got "
            f"one on {parameter.device}: leave it off"
        )
    if run.offload_fraction and isinstance(parameter, DTensor):
        raise ValueError(
            f"{name}: state of a DTensor cannot be in host memory, got one of shape {shape}: leave offload_fraction at "
            f"0"
        )
    if run.momentum_dtype is not None and parameter.dtype == torch.float64:
        raise ValueError(
            f"{name}: momenta with a momentum_dtype are averaged in fp32, got a parameter in fp64 of shape {shape}: "
            f"leave it away"
        )


def check_shards(optimizer: Any, parameter: Tensor, called: str) -> None:
    """Refuse a shard without the group of its ranks."""
    if optimizer.tp_mode != "blockwise":
        otherwise = ", or tp_mode='blockwise' for the approximation that treats each shard as a matrix"
        check_shard(parameter, optimizer.pg_collection, called, otherwise)


def check_decay(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Refuse a group's weight decay that does not go with its other settings."""
    name = type(optimizer).__name__
    modifiers = optimizer.modifiers_of(group)
    method = modifiers.decay_method
    decays = isinstance(group["weight_decay"], Tensor) or group["weight_decay"] != 0
    if modifiers.moment2_method == "namo" and decays and method == "l2":
        raise ValueError(
            f"{name}: namo compares the norms of gradient and momentum, which L2 decay would add to: take "
            f"use_decoupled_weight_decay=True, or weight_decay=0 instead of {group['weight_decay']}"
        )
    if modifiers.cautious_weight_decay and method == "l2":
        raise ValueError(
            f"{name}: cautious_weight_decay compares signs of weights and updates, of which l2 decay is a part: "
            f"take another {METHOD}, or leave it off"
        )
    if optimizer.decays_weights and not modifiers.holds:
        return
    instead_of_decay = optimizer.instead_of_decay
    if not instead_of_decay:
        name += " with weight_norm 'hold'"
        instead_of_decay = INSTEAD_OF_DECAY
    if method != "decoupled":
        raise ValueError(
            f"{name} has no weight decay, but its {METHOD} is {method!r}: {instead_of_decay}; take {METHOD} "
            f"and {DECOUPLED} away"
        )
    # by these Megatron's scheduler sets that of a group that has one
    schedule = ("start_wd", "end_wd") if optimizer.decays_weights else ()
    set_to = [group[key] for key in schedule if key in group] or [group["weight_decay"]]
    # a group that is to be loaded is not one of the optimizer's yet
    if any(set_to) and any(own is group for own in optimizer.param_groups):
        raise ValueError(
            f"{name} has no weight decay, got {max(set_to)}: {instead_of_decay}; set the weight_decay of its matrices "
            f"to 0"
        )
