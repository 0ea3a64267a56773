"""Optimizers for plain torch, built by name."""

from megatron_eopt.plain.build import build_optimizer as build_optimizer
from megatron_eopt.plain.build import register_builders
from megatron_eopt.plain.options import OptimizerConfig as OptimizerConfig
from megatron_eopt.registry import get_optimizer_builder as get_optimizer_builder
from megatron_eopt.registry import list_optimizer_builders
from megatron_eopt.registry import register_optimizer as register_optimizer

get_optimizer = get_optimizer_builder
list_optimizers = list_optimizer_builders

register_builders()
