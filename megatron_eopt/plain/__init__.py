"""Optimizers for plain torch: what a config says of a model's parameters, built by name."""

from megatron_eopt.plain import builders as builders  # registers them
from megatron_eopt.plain.build import build_optimizer
from megatron_eopt.plain.config import OptimizerConfig

__all__ = ["OptimizerConfig", "build_optimizer"]
