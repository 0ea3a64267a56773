"""Optimizers: subclasses of torch.optim.Optimizer, thin over the rooms below.

The optimizers of the table, :mod:`megatron_eopt.family`, are names of this room too, which the package gives it.
"""

import sys
from typing import Any

from megatron_eopt.optimizers.distributed_muon import DistributedMuon as DistributedMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer as OrthogonalizedOptimizer
from megatron_eopt.optimizers.spectron import factor_pairs as factor_pairs


def __getattr__(name: str) -> Any:
    """The classes of the table, which stands above."""
    if not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["megatron_eopt"], name)
