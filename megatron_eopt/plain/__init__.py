"""Optimizers for plain torch: what a config says of a model's parameters, built by name."""

from megatron_eopt.plain.build import build_optimizer, register_builders
from megatron_eopt.plain.config import OptimizerConfig
from megatron_eopt.registry import get_optimizer_builder, list_optimizer_builders, register_optimizer

__all__ = [
    "OptimizerConfig",
    "build_optimizer",
    "get_optimizer",
    "get_optimizer_builder",
    "list_optimizers",
    "register_optimizer",
]

get_optimizer = get_optimizer_builder
list_optimizers = list_optimizer_builders

register_builders()
