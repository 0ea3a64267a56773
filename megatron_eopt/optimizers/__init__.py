"""Optimizers: subclasses of torch.optim.Optimizer.

The package adds the optimizers of :mod:`megatron_eopt.family` as names of this module.
"""

import sys
from typing import Any

from megatron_eopt.optimizers.distributed_muon import DistributedMuon as DistributedMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer as OrthogonalizedOptimizer
from megatron_eopt.optimizers.spectron import factor_pairs as factor_pairs


def __getattr__(name: str) -> Any:
    """Return a class of the table, which is imported later."""
    if not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["megatron_eopt"], name)
