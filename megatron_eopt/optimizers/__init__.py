"""Optimizers: subclasses of torch.optim.Optimizer, thin over the rooms below."""

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.lion import Lion
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer

__all__ = ["Lion", "OrthogonalizedOptimizer", "TensorParallelAdaptiveMuon", "TensorParallelMuon"]
