"""Optimizers: subclasses of torch.optim.Optimizer, thin over the rooms below."""

from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer

__all__ = ["OrthogonalizedOptimizer", "TensorParallelMuon"]
