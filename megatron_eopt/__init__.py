"""Muon and its relatives for Megatron-Core and plain torch: parallel, exact, resumable, nothing silent.

Importing this package imports torch and not Megatron; :func:`activate` and :func:`get_megatron_optimizer` do.
"""

from typing import Any

from megatron_eopt.optimizers import (
    SOAP,
    DistributedMuon,
    Lion,
    MuonHyperball,
    OrthogonalizedOptimizer,
    PolarGrad,
    ScheduleFreeAdamW,
    Scion,
    Signum,
    Spectron,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
    factor_pairs,
)
from megatron_eopt.optimizers.with_adamw import Muon
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from megatron_eopt.registry import (
    EMERGING_OPTIMIZERS,
    EmergingOptimizerEntry,
    get_optimizer_entry,
    list_optimizers,
    register_optimizer,
)

__all__ = [
    "EMERGING_OPTIMIZERS",
    "SOAP",
    "DistributedMuon",
    "EmergingOptimizerEntry",
    "Lion",
    "Muon",
    "MuonHyperball",
    "OptimizerConfig",
    "OrthogonalizedOptimizer",
    "PolarGrad",
    "ScheduleFreeAdamW",
    "Scion",
    "Signum",
    "Spectron",
    "TensorParallelAdaptiveMuon",
    "TensorParallelMuon",
    "activate",
    "build_optimizer",
    "factor_pairs",
    "get_megatron_optimizer",
    "get_optimizer_entry",
    "list_optimizers",
    "register_optimizer",
]


def activate() -> None:
    """Let ``--optimizer NAME`` build the optimizers of this package in whatever calls Megatron-Core from here on.

    See :func:`megatron_eopt.megatron.activation.activate`.
    """
    from megatron_eopt.megatron.activation import activate

    activate()


def get_megatron_optimizer(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the optimizer of a Megatron model, as ``megatron.core.optimizer.get_megatron_optimizer`` does.

    For those who write their own training loop; :func:`activate` is called first. See
    :func:`megatron_eopt.megatron.factory.get_megatron_optimizer`.
    """
    activate()
    from megatron_eopt.megatron.factory import get_megatron_optimizer

    return get_megatron_optimizer(config, model_chunks, *args, **kwargs)
