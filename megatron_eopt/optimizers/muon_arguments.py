"""Arguments that Muon and its relatives share, and their checks."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.group_settings import DECOUPLED, METHOD, decay_method
from megatron_eopt.optimizers.modifiers import INSTEAD_OF_DECAY, Modifiers, RelativeUpdate, WeightNorm
from megatron_eopt.optimizers.parameters import TensorParallelGroups, check_shard
from megatron_eopt.orthogonalize.choices import check_choice, check_count
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.kernels import KERNELS
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.records import TpMode

MOMENTUM_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
"""Name of a flag's -> ``momentum_dtype``, whose None is that of each parameter, fp32 in a run of Megatron."""


class Execution(TypedDict, total=False):
    """Arguments that say where and how steps are computed, and modifiers."""

    cautious_weight_decay: bool
    weight_norm: WeightNorm
    brake_outward: float
    brake_inward: float
    relative_update: RelativeUpdate
    update_ratio: float

    cuda_graphs: bool
    data_parallel_group: ProcessGroup | None
    plan_rates: Rates | Literal["measure"]
    symmetric_products: str | None
    workspace: int
    offload_fraction: float
    momentum_dtype: torch.dtype | None
    momentum_warmup: int
    step_kernels: str | None


class Transport(Execution, total=False):
    """Also those for finding, orthogonalizing and exchanging matrices."""

    split_qkv: bool
    is_qkv_fn: Callable[[Tensor], bool] | None
    qkv_split_shapes: Sequence[int] | None
    fp32_matmul_prec: MatmulPrecision
    coefficient_type: str | Sequence[Coefficients]
    num_ns_steps: int
    pg_collection: TensorParallelGroups | None
    tp_mode: TpMode


def spelled_out[**P](kind: type[Execution], base: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Show ``**kind`` in a signature, as ``base`` has its arguments."""

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)
        of_base = inspect.signature(base).parameters
        written = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = kind.__annotations__.keys() - {p.name for p in written}
        taken = [p.replace(kind=p.KEYWORD_ONLY) for name, p in of_base.items() if name in names]
        init.__signature__ = signature.replace(parameters=[*written, *taken])  # type: ignore[attr-defined]
        return init

    return decorate


def check_execution(optimizer: Any) -> None:
    """Refuse arguments of :class:`Execution` that are out of their range."""
    name = type(optimizer).__name__
    if optimizer.symmetric_products is not None:
        check_choice("symmetric_products", optimizer.symmetric_products, tuple(KERNELS))
    if not isinstance(optimizer.plan_rates, Rates) and optimizer.plan_rates != "measure":
        raise ValueError(f"plan_rates are Rates or 'measure', got {optimizer.plan_rates!r}")
    check_count(f"{name}: workspace, in bytes,", optimizer.workspace)
    check_count(f"{name}: momentum_warmup, in steps,", optimizer.momentum_warmup, least=0)
    fraction = optimizer.offload_fraction
    if type(fraction) not in (int, float) or not 0 <= fraction <= 1:
        raise ValueError(f"{name}: offload_fraction must lie in [0, 1], got {fraction!r}")
    if optimizer.momentum_dtype not in MOMENTUM_DTYPES.values():
        raise ValueError(
            f"{name}: momentum_dtype is None, for that of each parameter, or torch.bfloat16, got "
            f"{optimizer.momentum_dtype!r}"
        )


def check_graphs(optimizer: Any) -> None:
    """Refuse to capture a step that a graph cannot replay."""
    if optimizer.offload_fraction or optimizer.momentum_dtype or optimizer.momentum_warmup:
        raise ValueError(
            "cuda_graphs cannot work with offload_fraction, momentum_dtype or momentum_warmup, by which steps differ: "
            "leave it off"
        )
    for parameter in optimizer._parameters():
        if parameter.device.type != "cuda" or optimizer.layout(parameter).ranks > 1:
            raise ValueError(
                f"cuda_graphs cannot work for parameters that other ranks share, or that are not on a CUDA device, got "
                f"one on {parameter.device}: leave it off"
            )


def check_kept(optimizer: Any, parameter: Tensor) -> None:
    """Refuse a parameter whose momentum cannot be kept as asked for."""
    name = type(optimizer).__name__
    shape = tuple(parameter.shape)
    if optimizer.offload_fraction and isinstance(parameter, DTensor):
        raise ValueError(
            f"{name}: state of a DTensor cannot be in host memory, got one of shape {shape}: leave offload_fraction at "
            f"0"
        )
    if optimizer.momentum_dtype is not None and parameter.dtype == torch.float64:
        raise ValueError(
            f"{name}: momenta with a momentum_dtype are averaged in fp32, got a parameter in fp64 of shape {shape}: "
            f"leave it away"
        )


def check_shards(optimizer: BaseOptimizer, parameter: Tensor, called: str) -> None:
    """Refuse a shard without the group of its ranks."""
    if optimizer.tp_mode != "blockwise":
        otherwise = ", or tp_mode='blockwise' for the approximation that treats each shard as a matrix"
        check_shard(parameter, optimizer.pg_collection, called, otherwise)


def refuse_blockwise(optimizer: BaseOptimizer, measured: str, otherwise: str = "") -> None:
    """Refuse ``blockwise`` where global matrices are measured, at every number of ranks."""
    if optimizer.tp_mode == "blockwise":
        raise ValueError(
            f"{type(optimizer).__name__}: with tp_mode blockwise the {measured} would be those of shards, which belong "
            f"to no matrix of the model and to no other number of ranks: take an exact tp_mode (auto, duplicated, ...)"
            f"{otherwise}"
        )


def check_decay(optimizer: BaseOptimizer, group: Mapping[str, Any], modifiers: Modifiers) -> None:
    """Refuse a group's weight decay that does not go with its modifiers."""
    name = type(optimizer).__name__
    traits = optimizer.traits
    method = decay_method(name, group)
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
    if traits.decays_weights and modifiers.weight_norm != "hold":
        return
    instead_of_decay = traits.instead_of_decay
    if not instead_of_decay:
        name += " with weight_norm 'hold'"
        instead_of_decay = INSTEAD_OF_DECAY
    if method != "decoupled":
        raise ValueError(
            f"{name} has no weight decay, but its {METHOD} is {method!r}: {instead_of_decay}; take {METHOD} "
            f"and {DECOUPLED} away"
        )
    # by these Megatron's scheduler sets that of a group that has one
    schedule = ("start_wd", "end_wd") if traits.decays_weights else ()
    set_to = [group[key] for key in schedule if key in group] or [group["weight_decay"]]
    # a group that is to be loaded is not one of the optimizer's yet
    if any(set_to) and any(own is group for own in optimizer.param_groups):
        raise ValueError(
            f"{name} has no weight decay, got {max(set_to)}: {instead_of_decay}; set the weight_decay of its matrices "
            f"to 0"
        )
